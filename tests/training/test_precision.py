"""Half precision: loss scaling, and losses that follow full precision."""

from __future__ import annotations

import math

import pytest
import runs
import torch

from fairseq import checkpoint
from fairseq.errors import UserError
from fairseq.training.trainer import Trainer


def test_fp16_lowers_the_loss_scale_on_overflow_and_recovers(tmp_path):
    flags = [runs.BASELINE, runs.NAG, "--max-update 40 --fp16 --fp16-init-scale 1e9 --fp16-scale-window 10 --no-save"]
    log = runs.updates(runs.train(tmp_path, *flags))
    assert [line["num_updates"] for line in log] == list(range(1, 41)), "every update happened in the end"
    scales = [line["loss_scale"] for line in log]
    assert scales[0] < 1e9 and max(scales) > scales[0], "down until nothing overflows, then up again"
    assert all(math.isfinite(line["gnorm"]) for line in log)
    assert log[-1]["loss"] < log[0]["loss"] - 1


def test_epoch_whose_last_batch_overflows_is_finished_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "train_step", lambda self, *args: False)
    log = runs.train(tmp_path, runs.BASELINE, "--max-epoch 1")
    assert len(runs.summaries(log, "train")) == len(runs.summaries(log, "test")) == 1
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [
        "checkpoint1.pt",
        "checkpoint_best.pt",
        "checkpoint_last.pt",
    ]


def test_loss_scale_below_its_minimum_ends_the_run_with_advice(tmp_path):
    with pytest.raises(UserError, match="--min-loss-scale .*--bf16"):
        runs.train(tmp_path, runs.BASELINE, "--max-update 9 --fp16 --fp16-init-scale 1e12 --min-loss-scale 1e11")


@pytest.mark.parametrize("flag, tolerance", [("--fp16", 2e-3), ("--bf16", 2e-2), ("--memory-efficient-fp16", 2e-2)])
@pytest.mark.parametrize("arch", [runs.BASELINE, runs.SHORTFORMER], ids=["baseline", "shortformer"])
def test_lower_precision_follows_full_precision(tmp_path, arch, flag, tolerance):
    flags = [arch, runs.NO_DROPOUT, runs.NAG, "--max-update 12 --no-save"]
    whole, half = runs.train(tmp_path, *flags), runs.train(tmp_path, *flags, flag)
    assert runs.losses(half) == pytest.approx(runs.losses(whole), rel=tolerance)
    assert runs.losses(half) != runs.losses(whole), "the flag is read"


def test_memory_efficient_fp16_keeps_half_parameters_and_full_optimizer_state(tmp_path):
    runs.train(tmp_path, runs.BASELINE, runs.ADAM, "--max-update 2 --memory-efficient-fp16")
    state = checkpoint.read(tmp_path / "checkpoint_last.pt")
    assert state["model"]["decoder.layers.0.fc1.weight"].dtype == torch.float16
    assert state["last_optimizer_state"]["state"]["decoder.layers.0.fc1.weight"]["exp_avg"].dtype == torch.float32
