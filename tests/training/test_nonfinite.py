"""Losses and gradients that are infinite or NaN end a run with their place, or are skipped as often
as allowed."""

from __future__ import annotations

import logging

import pytest
import runs
import torch

from fairseq import checkpoint
from fairseq.errors import UserError
from fairseq.training import loop
from fairseq.training.state import TrainingState

FLAGS = [runs.BASELINE, runs.NO_DROPOUT, "--max-update 6 --disable-validation"]


@pytest.fixture
def poisoned(monkeypatch):
    """Make the output of a module infinite in the updates whose batch holds some examples."""

    def poison(examples, name="decoder.layers.1.fc1"):
        seen = {"bad": False}
        step = loop.update
        made = TrainingState.__init__

        def watch(state, samples, *ask):
            seen["bad"] = any(number in examples for sample in samples for number in sample["id"].tolist())
            return step(state, samples, *ask)

        def init(self, *args):
            made(self, *args)

            def spoil(module, inputs, output):
                return output * torch.inf if seen["bad"] else output

            self.model.get_submodule(name).register_forward_hook(spoil)

        monkeypatch.setattr(loop, "update", watch)
        monkeypatch.setattr(TrainingState, "__init__", init)

    return poison


def examples_of(tmp_path, update):
    """The examples of an update of a run with ``FLAGS``."""
    seen = []
    step = loop.update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loop, "update", lambda state, samples, ask: seen.append(samples[0]["id"].tolist()) or step(state, samples)
        )
        runs.train(tmp_path / "look", FLAGS, "--no-save")
    return seen[update - 1]


def test_the_error_names_update_examples_and_first_module_and_the_state_before_is_saved(tmp_path, poisoned):
    bad = examples_of(tmp_path, 4)
    poisoned(bad)
    with pytest.raises(UserError) as error:
        runs.train(tmp_path / "run", FLAGS)
    assert str(error.value).startswith(
        "update 4: loss or gradients are infinite or NaN, first in the output of model.decoder.layers.1.fc1; "
        f"examples {' '.join(map(str, bad))}; lower --lr"
    )
    saved = checkpoint.load(tmp_path / "run" / "nonfinite.pt")
    assert saved["optimizer_history"][-1]["num_updates"] == 3
    assert saved["extra_state"]["nonfinite"]["ids"] == bad
    assert not list((tmp_path / "run").glob("checkpoint*")), "nothing to resume from by mistake"


def test_weights_that_overflowed_end_the_run(tmp_path):
    with pytest.raises(UserError, match="loss or gradients are infinite or NaN, first in the"):
        runs.train(tmp_path, runs.BASELINE, "--max-update 30 --lr 1e30 --clip-norm 0")
    assert not (tmp_path / "checkpoint_last.pt").exists()


@pytest.mark.parametrize("precision", ["", "--fp16 --threshold-loss-scale 128"])
def test_weights_that_are_not_finite_replace_no_checkpoint(precision, tmp_path):
    flags = [runs.BASELINE, runs.NO_DROPOUT, precision, "--disable-validation --no-epoch-checkpoints"]
    flags.append("--optimizer sgd --weight-decay 10")  # times the highest rate it takes norms beyond float32
    runs.train(tmp_path, flags, "--max-update 2")
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    with pytest.raises(
        UserError, match=r"update 3: the weights \S+ are infinite or NaN, so they are not saved; resume"
    ):
        runs.train(tmp_path, flags, "--max-update 3 --lr 3e38 --clip-norm 0")
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before
    assert [path.name for path in tmp_path.glob("*.pt")] == ["checkpoint_last.pt"]


def test_skipped_updates_are_counted_across_a_resumption(tmp_path, poisoned, caplog):
    poisoned([*examples_of(tmp_path, 3), *examples_of(tmp_path, 6)])  # one before the resumption, one after it
    for allowed in (1, 2):
        runs.train(tmp_path / f"{allowed}", FLAGS, f"--skip-nonfinite {allowed} --max-update 3")
    with pytest.raises(UserError, match=r"update 5: .*\(1 were skipped before\)"):
        runs.train(tmp_path / "1", FLAGS, "--skip-nonfinite 1")
    with caplog.at_level(logging.WARNING):
        log = runs.train(tmp_path / "2", FLAGS, "--skip-nonfinite 2")
    assert [line["num_updates"] for line in runs.updates(log)] == [4, 5, 6] and "skipped 2 of 2" in caplog.text
