"""Transformer-XL in training and evaluation: exact resumption, processes, averages, what the flags
change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from mistakes import user_error

from fairseq import checkpoint
from fairseq.config import options
from fairseq.tasks import setup_task
from fairseq.training.averaging import WeightAverage
from fairseq_cli import eval_lm
from fairseq_cli.eval_lm import get_eval_lm_parser

COMMON = """--cpu --train-subset valid --valid-subset test --tokens-per-sample 16 --batch-size 4 --batch-size-valid 32
    --required-batch-size-multiple 1 --optimizer adam --lr 0.003 --lr-scheduler fixed --clip-norm 0.25 --seed 3
    --log-format json --log-interval 1 --cutoffs 100,400 --mem-len 24 --no-epoch-checkpoints"""
XL = f"--arch transformer_xl_tiny {COMMON} --dropout 0.2 --dropatt 0.1"
STILL = "--dropout 0 --dropatt 0"
KINDS = {
    "relative": "",
    "variational": "--variational-dropout --pre-lnorm --untie-r",
    "bands": "--div-val 2 --tie-projs --same-length --clamp-len 10",
    "shaw": "--position-encoding shaw",
    "learned": "--position-encoding learned --mem-len 0",
    "averaged": "--average-weights-from 4 --ema-decay 0.7",
    "passages": "--passage-tokens 32",
}


@pytest.mark.parametrize("kind", ["variational", "averaged", "passages"])
def test_a_resumed_run_is_bit_identical_to_the_uninterrupted_one(tmp_path: Path, kind: str) -> None:
    flags = [XL, KINDS[kind]]
    whole = runs.train(tmp_path / "whole", flags, "--max-update 12 --save-interval-updates 7")
    (tmp_path / "parts").mkdir()
    saved = next((tmp_path / "whole").glob("checkpoint_*_7.pt"))
    restore = ["--restore-file", saved]
    rest = runs.train(tmp_path / "parts", flags, restore, "--max-update 12 --save-interval-updates 7")
    assert runs.updates(rest) == runs.updates(whole)[7:]
    ends = [runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "parts")]
    assert runs.difference(*ends) is None


def test_loss_on_half_of_the_positions_counts_half_of_the_targets(tmp_path: Path) -> None:
    full, half = (
        runs.train(tmp_path / name, XL, STILL, flag, "--max-update 3 --disable-validation --no-save")
        for name, flag in (("full", ""), ("half", "--loss-positions half"))
    )
    assert [line["wpb"] for line in runs.updates(full)] == [64.0] * 3
    assert [line["wpb"] for line in runs.updates(half)] == [32.0] * 3
    args = runs.arguments(XL, "--loss-positions half")
    task = setup_task(args)
    model, criterion = task.build_model(args), task.build_criterion(args)
    training = next(iter(task.iterator("valid", model, criterion, training=True)))
    assert training is not None
    assert bool((training["target"][:, :8] == 1).all()) and not bool((training["target"][:, 8:] == 1).any())
    validation = next(iter(task.iterator("valid", model, criterion, training=False)))
    assert validation is not None and not bool((validation["target"] == 1).any())


def test_streams_give_a_model_without_memory_what_one_with_memory_reads() -> None:
    def read(flags: str) -> list[list[int]]:
        args = runs.arguments(XL, flags)
        task = setup_task(args)
        model = task.build_model(args)
        iterator = task.iterator("valid", model, task.build_criterion(args), training=True)
        return [sample["id"].tolist() for sample in iterator if sample is not None]

    memory, streams, blocks = read("--mem-len 8"), read("--mem-len 0 --streams"), read("--mem-len 0")
    assert memory == streams != blocks
    passages = read("--mem-len 8 --passage-tokens 64")
    assert read("--mem-len 0 --streams --passage-tokens 79") == passages not in (memory, blocks)
    assert sorted(sum(passages, [])) == sorted(sum(memory, []))
    # A passage has at least two blocks.
    assert read("--mem-len 8 --passage-tokens 1") == read("--mem-len 8 --passage-tokens 32") != passages


@pytest.mark.parametrize("kind", ["shaw", "learned", "averaged"])
def test_stages_in_one_run_equal_one_command_a_stage(tmp_path: Path, kind: str) -> None:
    flags = [XL.replace("--tokens-per-sample 16", ""), KINDS[kind], "--disable-validation"]
    tables = "--max-relative-length 56" if kind == "shaw" else "--max-relative-length 32" if kind == "learned" else ""
    runs.train(tmp_path / "staged", flags, "--stages 16:5,32:9")
    runs.train(tmp_path / "1", flags, tables, "--tokens-per-sample 16 --max-update 5")
    first = ["--restore-file", tmp_path / "1" / "checkpoint_last.pt"]
    runs.train(tmp_path / "2", flags, tables, "--tokens-per-sample 32 --max-update 9", first)
    one, two = (runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("staged", "2"))
    del one["extra_state"]["stage"]
    assert runs.difference(one, two) is None


@pytest.mark.parametrize("arch", ["transformer_xl", "transformer_xl_tiny"])
def test_an_architectures_memory_does_not_depend_on_the_segment(arch: str) -> None:
    short, long = (runs.arguments(f"--arch {arch} --tokens-per-sample {n}").mem_len for n in (8, 64))
    assert short == long > 0
    assert runs.arguments(f"--arch {arch} --position-encoding learned").mem_len == 0


@pytest.fixture(scope="module")
def full(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[float]]:
    """Flags of a run, and its losses in full precision."""
    flags = [XL, STILL, KINDS[request.param], "--max-update 12 --disable-validation"]
    return flags, runs.losses(runs.train(tmp_path_factory.mktemp("full"), flags, "--no-save"))


@pytest.mark.parametrize(
    ("full", "flag", "tolerance"),
    [
        ("bands", "--bf16", 0.02),
        ("bands", "--fp16", 0.005),
        ("bands", "--memory-efficient-fp16", 0.02),
        ("shaw", "--bf16", 0.02),
    ],
    indirect=["full"],
)
def test_lower_precision_follows_full_precision(
    tmp_path: Path, full: tuple[list[Any], list[float]], flag: str, tolerance: float
) -> None:
    flags, losses = full
    assert runs.losses(runs.train(tmp_path, flags, flag)) == pytest.approx(losses, abs=tolerance)
    path = tmp_path / "checkpoint_last.pt"
    rows = "--tokens-per-sample 16 --batch-size 8"
    there = scores(tmp_path, path, rows, flag.replace("--memory-efficient-fp16", "--fp16"))
    assert np.abs(there - scores(tmp_path, path, rows)).max() < 0.1


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ("", "--pre-lnorm", "--pre-lnorm True: .* was trained with False"),
        (
            "--position-encoding absolute --mem-len 0",
            "--position-encoding absolute --mem-len 0 --n-head 4",
            "holds another run, with --n-head 2",
        ),
        ("--position-encoding shaw", "--position-encoding shaw --mem-len 64", "holds another run, with --mem-len 24"),
        (
            "--position-encoding learned --mem-len 0",
            "--position-encoding absolute --mem-len 0",
            "absolute: .* with learned",
        ),
    ],
)
def test_parameters_are_not_used_for_another_computation(tmp_path: Path, first: str, then: str, message: str) -> None:
    runs.train(tmp_path, XL, first, "--max-update 2 --disable-validation")
    with user_error(message):
        runs.train(tmp_path, XL, then, "--max-update 4 --disable-validation")


def test_a_table_for_every_distance_of_an_endless_memory_is_refused(tmp_path: Path) -> None:
    with user_error("--mem-len 100000000: .* give --max-relative-length"):
        runs.train(tmp_path, XL, "--position-encoding shaw --mem-len 100000000")


# The average of the weights


def test_the_average_of_half_precision_weights_is_kept_in_full_precision(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    average = WeightAverage([parameter], 1)
    steps = torch.linspace(1.0, 1.2, 3000)
    for update, value in enumerate(steps, start=1):
        parameter.data.fill_(float(value))
        average.update(update)
    with average.in_place():
        assert parameter.dtype == torch.float16
        assert parameter.tolist() == pytest.approx([1.1] * 3, abs=1e-3)
    assert parameter.tolist() == pytest.approx([1.2] * 3, abs=1e-3)
    flags = [XL, "--memory-efficient-fp16 --average-weights-from 2 --disable-validation --max-update 8"]
    runs.train(tmp_path / "whole", flags, "--save-interval-updates 5")
    saved = next((tmp_path / "whole").glob("checkpoint_*_5.pt"))
    runs.train(tmp_path / "parts", flags, "--save-interval-updates 5", ["--restore-file", saved])
    assert runs.difference(*(runs.content(tmp_path / n / "checkpoint_last.pt") for n in ("whole", "parts"))) is None


# Evaluation


def evaluate(path: Path, *flags: Any) -> dict[str, Any]:
    words = runs.words("--cpu", "--path", path, *flags)
    return eval_lm.main(options.parse_args_and_arch(get_eval_lm_parser(), [str(runs.DATA), *words]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    runs.train(folder, XL, STILL, "--max-update 20 --disable-validation")
    return folder / "checkpoint_last.pt"


def scores(tmp_path: Path, path: Path, *flags: Any) -> np.ndarray:
    file = tmp_path / "scores.npz"
    evaluate(path, "--gen-subset test --save-token-scores", file, *flags)
    return np.load(file)["lprobs"]


def test_segments_and_memory_are_chosen_freely_at_evaluation(tmp_path: Path, trained: Path) -> None:
    """With memory for the whole text, clamped or not, its segments do not matter."""
    whole = scores(tmp_path, trained, "--tokens-per-sample 4096 --mem-len 0")
    assert len(whole) > 400
    for flags in ("--tokens-per-sample 17 --mem-len 4096", "--tokens-per-sample 64 --mem-len 4096 --sliding-inf 1"):
        np.testing.assert_allclose(scores(tmp_path, trained, flags), whole, atol=1e-5)
    assert np.abs(scores(tmp_path, trained, "--tokens-per-sample 16 --mem-len 8") - whole).max() > 1e-3


def test_same_length_and_clamp_are_what_they_say(tmp_path: Path, trained: Path) -> None:
    """A window of 12 keys is the same however the text is cut; a clamp at 5 changes only what lies
    farther."""
    flags = "--mem-len 12 --same-length --clamp-len 5 --tokens-per-sample"
    one = scores(tmp_path, trained, flags, "8")
    np.testing.assert_allclose(scores(tmp_path, trained, flags, "15"), one, atol=1e-5)
    near = scores(tmp_path, trained, "--mem-len 12 --same-length --tokens-per-sample 8")
    np.testing.assert_array_equal(near[:6], one[:6])
    assert np.abs(near[7:] - one[7:]).max() > 1e-4


def test_memory_longer_than_the_tables_counts_what_is_farther_as_the_farthest(tmp_path: Path) -> None:
    """Keys beyond the table do count: a change there changes the scores; and segments do not
    matter."""
    runs.train(tmp_path, XL, STILL, KINDS["shaw"], "--max-update 20 --disable-validation")
    path = tmp_path / "checkpoint_last.pt"
    whole = scores(tmp_path, path, "--tokens-per-sample 4096 --mem-len 0")
    np.testing.assert_allclose(scores(tmp_path, path, "--tokens-per-sample 19 --mem-len 4096"), whole, atol=1e-5)
    assert np.abs(scores(tmp_path, path, "--tokens-per-sample 16 --mem-len 24") - whole)[100:].max() > 1e-4


def test_memory_for_everything_makes_room_for_what_there_is(tmp_path: Path, trained: Path) -> None:
    whole = scores(tmp_path, trained, "--tokens-per-sample 4096 --mem-len 0")
    np.testing.assert_allclose(scores(tmp_path, trained, "--mem-len 1000000000"), whole, atol=1e-5)


def test_help_of_evaluation_says_whose_the_defaults_are() -> None:
    shown = " ".join(get_eval_lm_parser().format_help(all=True).split())
    assert "memory length in tokens (0: no recurrence) (default: the checkpoint's)" in shown
    assert "--loss-positions" not in shown and "--shuffle-lines" not in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mem-len -1", "--mem-len -1: must be at least 0"),
        ("--clamp-len 0", "--clamp-len 0"),
        ("--same-length --mem-len 0", "--same-length"),
        ("--context-window 4", "--context-window 4"),
        ("--sample-break-mode eos", "--sample-break-mode eos"),
        ("--mem-len many", "--mem-len: expected a whole number"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(trained: Path, flags: str, message: str) -> None:
    with user_error(message):
        evaluate(trained, flags)


def test_flags_of_memory_are_refused_for_models_without_them() -> None:
    path = runs.GOLDEN / "baseline.pt"
    with user_error("--mem-len: transformer_lm_wiki103 has no such setting"):
        evaluate(path, "--mem-len 8")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mem-len -3", "--mem-len -3: must be at least 0"),
        ("--average-weights-from 0", "--average-weights-from 0"),
        ("--ema-decay 1", "--ema-decay 1"),
        ("--loss-positions some", "--loss-positions some: choose from full, half"),
        ("--position-encoding rotary", "--position-encoding rotary: choose from relative"),
        ("--criterion adaptive_loss --sample-break-mode eos", "--sample-break-mode eos"),
        ("--mem-len 0 --streams --sample-break-mode eos", "--sample-break-mode eos"),
        ("--mem-len 0 --passage-tokens 64", "--passage-tokens 64: the model has no memory; .* --streams"),
    ],
)
def test_bad_flags_of_training_are_one_line(tmp_path: Path, flags: str, message: str) -> None:
    with user_error(message):
        runs.train(tmp_path, XL, flags)


def test_other_passages_do_not_continue_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    flags = [XL, "--max-update 3 --save-interval-updates 3"]
    runs.train(tmp_path, flags, "--passage-tokens 64")
    with user_error("--passage-tokens: the checkpoint is in the middle of an epoch"):
        runs.train(tmp_path, XL, "--max-update 5 --passage-tokens 128")


def test_the_settings_of_an_architecture_are_kept_in_its_checkpoint(trained: Path) -> None:
    args = checkpoint.load(trained)["args"]
    assert (args["n_layer"], args["mem_len"], args["cutoffs"], args["position_encoding"]) == (
        2,
        24,
        [100, 400],
        "relative",
    )
    assert json.loads(json.dumps(args["tie_projs"])) == "none"
