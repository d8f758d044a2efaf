"""The best validation metric has one owner, from which checkpoint_best.pt, patience and the log
follow."""

from __future__ import annotations

import math
import re
import shutil

import pytest
import runs
from small_runs import FIVE

from fairseq import checkpoint
from fairseq.training.best import Best, changes
from fairseq.training.callbacks.validation import Validation


@pytest.mark.parametrize("maximize, better, worse", [(False, 1.0, 3.0), (True, 3.0, 1.0)])
def test_a_better_metric_is_the_best_and_a_worse_one_counts_towards_patience(maximize, better, worse):
    best = Best(maximize).validated(2.0)
    assert (best.value, best.without_improvement) == (2.0, 0)
    assert (best.validated(worse).value, best.validated(worse).without_improvement) == (2.0, 1)
    assert (best.validated(better).value, best.validated(worse).validated(better).without_improvement) == (better, 0)
    assert best.validated(math.nan) == best.validated(2.0) == best.validated(worse)
    assert best.better(better) == better and best.better(worse) == 2.0


@pytest.mark.parametrize("maximize, better, worse", [(False, 1.0, 3.0), (True, 3.0, 1.0)])
def test_a_tie_is_worth_saving_and_no_improvement(maximize, better, worse):
    best = Best(maximize).validated(2.0)
    assert best.is_worth_saving(2.0) and best.is_worth_saving(better) and not best.is_worth_saving(worse)
    assert best.improved_by(better) and not best.improved_by(2.0) and not best.improved_by(worse)
    for nothing in (None, math.nan):
        assert not best.is_worth_saving(nothing) and not Best(maximize).improved_by(nothing)


def test_a_restored_value_is_the_one_that_was_stored():
    best = Best().validated(2.0).validated(1.0).validated(1.5)
    assert Best().restored(best.state_dict()) == best
    assert Best().restored({"best": 3.0}) == Best(value=3.0), "fairseq's checkpoints have one number"


@pytest.mark.parametrize("flags", ["--max-update 12", "--max-update 12 --save-interval-updates 5", "--max-epoch 2"])
def test_the_file_of_the_best_holds_the_best_that_the_run_announces(tmp_path, monkeypatch, caplog, flags):
    values = {3: 8.0, 6: 7.0, 9: 9.0}
    monkeypatch.setattr(Validation, "measure", lambda self, run: values.get(run.num_updates, 9.5))
    caplog.set_level("INFO")
    runs.train(tmp_path, FIVE, "--no-epoch-checkpoints --validate-interval-updates 3", flags)
    best = checkpoint.read(tmp_path / "checkpoint_best.pt")
    assert (best["extra_state"]["val_loss"], best["optimizer_history"][-1]["num_updates"]) == (7.0, 6)
    assert any(line.endswith("; best validation loss 7") for line in caplog.messages)
    assert checkpoint.read(tmp_path / "checkpoint_last.pt")["extra_state"]["best"] == 7.0


def test_each_validation_that_is_among_the_best_is_saved(tmp_path, monkeypatch):
    values = {3: 7.0, 6: 8.0, 9: 7.5}
    monkeypatch.setattr(Validation, "measure", lambda self, run: values.get(run.num_updates, 9.5))
    flags = "--max-update 12 --no-epoch-checkpoints --validate-interval-updates 3 --keep-best-checkpoints 2"
    runs.train(tmp_path, FIVE, flags)
    updates = {
        path.name: checkpoint.read(path)["optimizer_history"][-1]["num_updates"]
        for path in tmp_path.glob("checkpoint.best_*")
    }
    assert updates == {"checkpoint.best_loss_7.0000.pt": 3, "checkpoint.best_loss_7.5000.pt": 9}


# --- which validations are compared


def announced(caplog) -> list[str]:
    return [line for line in caplog.messages if line.startswith("best validation: starts anew")]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--valid-subset valid", {"valid_subset", "data"}),
        (
            "--sample-break-mode complete --skip-invalid-size-inputs-valid-test --reset-dataloader",
            {"sample_break_mode", "batch"},
        ),
        ("--max-valid-steps 2", {"max_valid_steps"}),
        ("--best-checkpoint-metric ppl", {"best_checkpoint_metric"}),
        ("--tokens-per-sample 8", {"tokens_per_sample", "batch"}),
        ("--bf16", {"precision"}),
        ("--maximize-best-checkpoint-metric", {"maximize_best_checkpoint_metric"}),
        ("DATA", {"data"}),
    ],
)
def test_validations_that_measure_something_else_begin_a_best_of_their_own(tmp_path, caplog, flags, names):
    """The run before saw 0.5 and was one validation from its end by patience."""
    caplog.set_level("INFO")
    base = [FIVE, "--no-epoch-checkpoints --patience 2"]
    data = tmp_path / "data"
    shutil.copytree(runs.DATA, data)
    runs.train(tmp_path / "run", *base, "--max-update 2", data=data)
    state = checkpoint.read(last := tmp_path / "run" / "checkpoint_last.pt")
    state["extra_state"] |= {"best": 0.5, "without_improvement": 1}
    checkpoint.save(last, state)
    if flags == "DATA":
        flags = ""
        for end in ("idx", "bin"):
            shutil.copy(data / f"valid.{end}", data / f"test.{end}")
    runs.train(tmp_path / "run", *base, "--max-update 3", flags, data=data)
    (line,) = announced(caplog)
    assert set(re.findall(r"`(\w+)` ", line)) == names
    extra = checkpoint.read(last)["extra_state"]
    assert extra["best"] > 0.5 and extra["without_improvement"] == 0
    best = checkpoint.read(tmp_path / "run" / "checkpoint_best.pt")
    assert best["optimizer_history"][-1]["num_updates"] == 3
    assert (tmp_path / "run" / "checkpoint_best1.pt").exists(), "what was the best is set aside"


@pytest.mark.parametrize(
    ("base", "flags", "name"),
    [
        ("--criterion label_smoothed_cross_entropy --label-smoothing 0.1", "--label-smoothing 0.2", "label_smoothing"),
        ("--task masked_lm --arch bert_tiny --criterion masked_lm", "--seed 2", "seed"),
        ("--task masked_lm --arch bert_tiny --criterion masked_lm", "--leave-unmasked-prob 0.9", "leave_unmasked_prob"),
        ("--criterion cross_entropy", "--add-bos-token", "add_bos_token"),
        ("--arch transformer_xl_tiny --n-layer 1 --mem-len 16", "--mem-len 8", "mem_len"),
        (
            "--task masked_lm --arch electra_tiny --criterion electra",
            "--discriminator-weight 2",
            "discriminator_weight",
        ),
    ],
)
def test_settings_of_the_loss_and_the_masks_decide_what_is_measured(tmp_path, caplog, base, flags, name):
    caplog.set_level("INFO")
    base = f"""{base} --cpu --train-subset valid --valid-subset test --tokens-per-sample 16 --max-tokens 64
        --optimizer adam --lr 0.001 --no-epoch-checkpoints"""
    if "--arch" not in base:
        base += " --arch transformer_lm_tiny --decoder-layers 1"
    base += " --encoder-layers 1" if "masked" in base else ""
    runs.train(tmp_path, base, "--max-update 2 --max-epoch 1")
    runs.train(tmp_path, base, "--max-update 3 --max-epoch 1 --reset-dataloader")
    assert announced(caplog) == []
    runs.train(tmp_path, base, "--max-update 4 --max-epoch 1 --reset-dataloader", flags)
    (line,) = announced(caplog)
    assert set(re.findall(r"`(\w+)` ", line)) == {name}


def test_a_setting_that_is_left_out_now_has_changed():
    now = {"best_checkpoint_metric": "loss", "valid_subset": "valid"}
    assert changes(now, now, {"init_token": 0}) == "`init_token` none (was 0)"
    assert not changes(now, None, {"init_token": 0}), "fairseq's checkpoints have settings of other parts"


def test_the_same_text_elsewhere_and_other_batches_of_it_are_compared(tmp_path, caplog):
    caplog.set_level("INFO")
    shutil.copytree(runs.DATA, tmp_path / "moved")
    base = [f"{runs.BASELINE} --decoder-layers 1 --no-epoch-checkpoints"]
    runs.train(tmp_path / "run", *base, "--max-update 2")
    flags = "--max-update 3 --max-tokens-valid 320 --reset-dataloader"
    runs.train(tmp_path / "run", *base, flags, data=tmp_path / "moved")
    assert announced(caplog) == []


def test_another_optimizer_has_all_the_patience(tmp_path, caplog):
    caplog.set_level("INFO")
    base = [FIVE, "--no-epoch-checkpoints --patience 1 --max-update 2"]
    runs.train(tmp_path, *base)
    state = checkpoint.read(last := tmp_path / "checkpoint_last.pt")
    state["extra_state"] |= {"best": 0.5, "without_improvement": 1}
    checkpoint.save(last, state)
    assert len(runs.updates(runs.train(tmp_path, *base, "--reset-optimizer"))) == 2


def test_best_checkpoint_of_stages_in_one_run_is_that_of_one_command_a_stage(tmp_path, monkeypatch):
    """The first stage ends with 3.0 after 1.0; the 2.0 at the end of the second, of other blocks,
    is its best."""
    figures = {7: 1.0, 14: 2.0, 20: 3.0, 40: 2.0}
    monkeypatch.setattr(Validation, "measure", lambda self, run: figures.get(run.num_updates, 9.0))
    flags = [runs.SHORTFORMER, "--validate-interval-updates 7 --max-tokens-valid 64 --tokens-from-prev 16"]
    one, two = tmp_path / "one", tmp_path / "two"
    runs.train(one, flags, "--stages 16:20,32:40")
    runs.train(two, flags, "--tokens-per-sample 16 --max-update 20")
    runs.train(two, flags, "--tokens-per-sample 32 --tokens-from-prev 32 --max-update 40")
    for folder in (one, two):
        best = checkpoint.read(folder / "checkpoint_best.pt")
        assert (best["extra_state"]["val_loss"], best["optimizer_history"][-1]["num_updates"]) == (2.0, 40)
