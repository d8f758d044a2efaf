"""A run of ``fairseq-train``: it goes on exactly, saves what it should, and ends when it should."""

from __future__ import annotations

import math
import shutil

import pytest
import runs

from fairseq import checkpoint

# --- going on exactly


@pytest.mark.parametrize(
    "flags",
    [
        [runs.SHORTFORMER, runs.ADAM, runs.DROPOUT, "--update-freq 2,1 --max-tokens 128"],
        [runs.BASELINE, runs.ADAM, runs.DROPOUT, "--update-freq 2 --max-tokens 128 --fp16 --fp16-scale-window 5"],
        [runs.BASELINE, runs.ADAM, runs.DROPOUT, runs.LINES, "--max-tokens 400"],
        [runs.SHORTFORMER, runs.NAG, runs.DROPOUT, "--decoder-layerdrop 0.3 --num-workers 0"],
        [runs.BASELINE, "--lr 2 --clip-norm 0.5 --validate-interval-updates 3 --patience 100"],
        [
            runs.SHORTFORMER,
            runs.DROPOUT,
            "--optimizer muon --lr-scheduler wsd --lr 0.01 --muon-lr 0.02 --bf16",
            "--ngram-notes 999 --average-weights-from 3",
        ],
    ],
    ids=[
        "shortformer-adam-freq2",
        "baseline-adam-freq2-fp16",
        "lines",
        "layerdrop",
        "better-unsaved",
        "muon-wsd-bf16-notes",
    ],
)
def test_run_resumed_in_the_middle_of_an_epoch_is_bit_identical_to_the_uninterrupted_one(tmp_path, flags):
    flags = [flags[0], "--max-tokens 256", *flags[1:], "--max-update 13 --save-interval-updates 8 --log-interval 3"]
    whole = runs.train(tmp_path / "whole", *flags)
    middle = next(path for path in (tmp_path / "whole").iterdir() if path.name.endswith("_8.pt"))
    place = checkpoint.read(middle)["extra_state"]["train_iterator"]
    assert place["iterations_in_epoch"] > 0, "the test is about the middle of an epoch"
    assert runs.updates(whole)[-1]["epoch"] > place["epoch"], "and about its end"
    (tmp_path / "resumed").mkdir()
    shutil.copy(middle, tmp_path / "resumed" / "checkpoint_last.pt")
    resumed = runs.train(tmp_path / "resumed", *flags)
    last = [runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "resumed")]
    assert runs.difference(*last) is None
    assert runs.updates(resumed) == [line for line in runs.updates(whole) if line["num_updates"] > 8]
    for kind in ("train", "test"):
        rest = runs.summaries(resumed, kind)
        assert rest and rest == runs.summaries(whole, kind)[-len(rest) :]


def test_two_runs_with_one_seed_are_identical_and_another_seed_is_not(tmp_path):
    flags = [runs.BASELINE, runs.DROPOUT, "--max-update 3 --no-save --disable-validation"]
    one, same, other = (runs.losses(runs.train(tmp_path, *flags, f"--seed {seed}")) for seed in (3, 3, 4))
    assert one == same
    assert all(x != y for x, y in zip(one, other, strict=True))


# --- batches


@pytest.mark.parametrize("arch", [runs.BASELINE, runs.SHORTFORMER], ids=["baseline", "shortformer"])
@pytest.mark.parametrize("length", [1, 7, 5000])
def test_blocks_of_any_length_train(tmp_path, arch, length):
    flags = (
        f"--tokens-per-sample {length} --max-tokens {max(length, 40)} --max-tokens-valid 5000 --max-update 2 --no-save"
    )
    if length < 7:
        flags += " --disable-validation"
    log = runs.train(tmp_path, arch, flags)
    assert all(math.isfinite(loss) for loss in runs.losses(log)) and len(runs.losses(log)) == 2
    assert runs.updates(log)[0]["wpb"] == min(max(length, 40) // length * length, 2670)


def test_every_token_of_an_epoch_is_read_once(tmp_path):
    for arch in (runs.BASELINE, runs.SHORTFORMER):
        log = runs.train(tmp_path, arch, "--max-epoch 1 --max-tokens 320 --no-save --disable-validation")
        assert sum(line["wpb"] for line in runs.updates(log)) == 2670


def test_sentence_avg_divides_by_rows(tmp_path):
    flags = [runs.BASELINE, runs.NO_DROPOUT, "--max-update 1 --no-save --disable-validation"]
    by_tokens, by_rows = (runs.train(tmp_path, *flags, flag) for flag in ("", "--sentence-avg"))
    ratio = runs.updates(by_rows)[0]["gnorm"] / runs.updates(by_tokens)[0]["gnorm"]
    assert ratio == pytest.approx(16, rel=1e-4)


# --- what is reported


def test_json_log_has_fairseqs_fields_at_full_precision(tmp_path):
    log = runs.train(tmp_path, runs.BASELINE, "--max-epoch 1 --max-tokens 320 --fp16 --no-save")
    fields = ["epoch", "update", "loss", "nll_loss", "ppl", "wps", "ups", "wpb", "bsz", "num_updates"]
    fields += ["lr", "gnorm", "clip", "loss_scale", "train_wall", "wall"]
    assert list(log[0]) == fields
    assert len(repr(log[0]["loss"])) > 10
    assert log[0]["ppl"] == pytest.approx(2 ** log[0]["nll_loss"], rel=1e-9)
    assert log[0]["update"] == pytest.approx(1 / 9) and log[0]["epoch"] == 1
    train, valid = log[-2:]
    assert list(train) == ["epoch", *(f"train_{name}" for name in fields[1:])]
    assert {"epoch", "valid_loss", "valid_ppl", "valid_num_updates", "valid_best_loss"} <= {
        name.replace("test_", "valid_") for name in valid
    }


@pytest.mark.parametrize("log_format", ["simple", "tqdm", "none"])
def test_other_log_formats_run(tmp_path, capsys, log_format):
    assert runs.train(tmp_path, runs.BASELINE, f"--max-update 2 --no-save --log-format {log_format}") == []


def test_tensorboard_gets_every_kind_of_figure(tmp_path):
    pytest.importorskip("tensorboard")
    board = tmp_path / "board"
    runs.train(
        tmp_path / "c", runs.BASELINE, "--max-epoch 1 --max-tokens 640 --no-save --tensorboard-logdir", [str(board)]
    )
    assert {path.parent.name for path in board.rglob("events*")} == {"train", "train_inner", "test"}


@pytest.mark.parametrize("first, then", [("--fp16", ""), ("--bf16", ""), ("", "--memory-efficient-fp16")])
def test_shortformer_goes_on_in_another_precision(tmp_path, first, then):
    flags = [runs.SHORTFORMER, runs.NAG]
    runs.train(tmp_path, *flags, first, "--max-update 2 --disable-validation")
    log = runs.train(tmp_path, *flags, then, "--max-update 4 --disable-validation")
    assert [line["num_updates"] for line in runs.updates(log)] == [3, 4]
