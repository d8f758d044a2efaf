"""fairseq-validate: the figures that training logs."""

from __future__ import annotations

import json
import sys

import pytest
import runs
import warm

from fairseq import checkpoint
from fairseq.config import options
from fairseq.errors import UserError
from fairseq_cli import validate
from fairseq_cli.validate import get_validation_parser

BASELINE, SHORTFORMER = runs.GOLDEN / "baseline.pt", runs.GOLDEN / "shortformer_stage2.pt"


def run(*flags):
    """Run the command in this process; returns its figures."""
    parser = get_validation_parser()
    words = [str(runs.DATA), "--cpu", *runs.words(*flags)]
    return validate.main(options.parse_args_and_arch(parser, words, task_defaults=False))


@pytest.mark.parametrize("path, name", [(BASELINE, "baseline"), (SHORTFORMER, "shortformer")])
def test_loss_of_the_originals_checkpoints(path, name):
    expected = json.loads((runs.GOLDEN / "expected" / "perplexity.json").read_text())
    found = run("--valid-subset valid,test", ["--path", str(path)])[str(path)]
    for split in ("valid", "test"):
        assert found[split]["nll_loss"] == pytest.approx(expected[f"{name}.{split}.nonoverlap"]["loss_base2"], abs=1e-5)
        assert found[split]["ntokens"] == expected[f"{name}.{split}.nonoverlap"]["tokens"]


@pytest.mark.parametrize("kind", [runs.BASELINE, runs.SHORTFORMER])
def test_figures_are_those_that_training_logged(kind, tmp_path):
    log = runs.train(tmp_path, kind, "--max-update 20 --max-epoch 1")
    logged = runs.summaries(log, "test")[-1] if runs.summaries(log, "test") else runs.summaries(log, "valid")[-1]
    (figures,) = run("--valid-subset test", ["--path", str(tmp_path / "checkpoint_last.pt")]).values()
    for name in ("loss", "nll_loss", "ppl", "wpb", "bsz"):
        assert figures["test"][name] == pytest.approx(logged[name], rel=1e-6)


def test_the_tokens_of_a_masked_model_are_those_that_training_validated(tmp_path):
    flags = """--cpu --task masked_lm --arch bert_tiny --encoder-layers 1 --criterion masked_lm --optimizer adam
        --seed 5 --train-subset valid --valid-subset test --tokens-per-sample 16 --max-tokens 640 --lr 0.001
        --max-update 2"""
    (logged,) = runs.summaries(runs.train(tmp_path, flags, "--log-format json"), "test")
    path = ["--path", str(tmp_path / "checkpoint_last.pt")]
    (figures,) = run("--valid-subset test", path).values()
    assert figures["test"]["loss"] == pytest.approx(logged["loss"], rel=1e-6)
    for others in ("--seed 1", "--seed 6"):
        (figures,) = run("--valid-subset test", others, path).values()
        assert figures["test"]["loss"] != pytest.approx(logged["loss"], rel=1e-4)
    # Of several models the same tokens are chosen.
    state = checkpoint.load(tmp_path / "checkpoint_last.pt")
    state["args"]["seed"] = 6
    checkpoint.save(tmp_path / "other.pt", state)
    first, second = run("--valid-subset test", ["--path", f"{path[1]}:{tmp_path / 'other.pt'}"]).values()
    assert first == second
    both = ["--path", f"{path[1]}:{tmp_path / 'other.pt'}", "--model-overrides", "{'seed':5}"]
    assert list(run("--valid-subset test", both).values()) == [first, first]


def test_a_seed_that_no_flag_can_give_is_left_out(tmp_path):
    state = checkpoint.load(BASELINE)
    for seed in (3735928559, -1, None):  # of fairseq's checkpoints
        state["args"]["seed"] = seed
        checkpoint.save(tmp_path / "other.pt", state)
        assert run("--valid-subset test", ["--path", str(tmp_path / "other.pt")])


def test_a_script_that_parses_the_command_line_has_all_settings():
    args = options.parse_args_and_arch(get_validation_parser(), [str(runs.DATA), "--path", str(BASELINE)])
    assert (args.task, args.seed) == ("language_modeling", 1)


def test_the_task_of_an_encoder_may_be_given(tmp_path):
    flags = """--cpu --task masked_lm --arch bert_tiny --encoder-layers 1 --criterion masked_lm --optimizer adam
        --train-subset valid --tokens-per-sample 16 --max-tokens 640 --lr 0.001 --max-update 1 --disable-validation"""
    runs.train(tmp_path, flags)
    path = ["--valid-subset test --path", str(tmp_path / "checkpoint_last.pt")]
    assert run(path) == run("--task masked_lm", path) == run("--task language_modeling", path)
    with pytest.raises(UserError, match="neither train.tsv nor input0"):
        run("--task sentence_prediction", path)


@pytest.mark.parametrize("flags, given", [("", set()), ("--task language_modeling --seed 1", {"task", "seed"})])
def test_task_and_seed_are_the_checkpoints_unless_they_are_given(flags, given):
    words = [str(runs.DATA), *runs.words(flags)]
    args = options.parse_args_and_arch(get_validation_parser(), words, task_defaults=False)
    assert {"task", "seed"} & vars(args).keys() == given


def test_batches_can_be_chosen_and_do_not_change_a_baseline():
    (one,), (other,) = (
        [f["valid"] for f in run(flags, ["--path", str(BASELINE)]).values()] for flags in ("", "--batch-size 7")
    )
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-6) and one["bsz"] == 2 and other["bsz"] > 6


def test_another_criterion_than_the_checkpoints_can_be_chosen_with_its_settings():
    flags = ["--criterion", "label_smoothed_cross_entropy", "--path", str(BASELINE), "--model-overrides"]
    plain, some, twice = (run([*flags, f"{{'label_smoothing':{e}}}"])[str(BASELINE)]["valid"] for e in (0, 0.1, 0.2))
    assert plain["loss"] == pytest.approx(run(["--path", str(BASELINE)])[str(BASELINE)]["valid"]["loss"], abs=1e-6)
    assert {figures["nll_loss"] for figures in (plain, some, twice)} == {plain["nll_loss"]}
    assert twice["loss"] - plain["loss"] == pytest.approx(2 * (some["loss"] - plain["loss"]), abs=1e-5)
    assert some["loss"] > plain["loss"] + 0.01


def test_several_checkpoints_are_a_line_each(capsys):
    run("--log-format json", ["--path", f"{BASELINE}:{SHORTFORMER}"])
    losses = [line["valid_loss"] for line in runs.records(capsys.readouterr().out)]
    assert losses == pytest.approx([7.29437, 7.12061], abs=1e-4)


def test_command_in_a_process_of_its_own():
    result = warm.command("validate.py", runs.DATA, "--cpu --log-format simple", "--path", SHORTFORMER)
    assert result.returncode == 0, result.stderr
    assert " | INFO | valid | valid on 'valid' subset | loss 7.121 | nll_loss 7.121 | ppl 139.2" in result.stdout


@pytest.mark.parametrize(
    "flags, line",
    [
        ([], "--path: name a checkpoint"),
        (["--path", "missing.pt"], "missing.pt: file not found"),
        (["--path", str(BASELINE), "--valid-subset", "nothing"], "nothing.idx: file not found"),
        (["--path", str(BASELINE), "--max-tokens", "63"], "a block"),
    ],
)
def test_mistakes_are_one_line(flags, line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["validate.py", str(runs.DATA), "--cpu", *flags])
    with pytest.raises(SystemExit) as end:
        validate.cli_main()
    stderr = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(stderr) == 1 and line in stderr[0]
