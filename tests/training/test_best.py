"""The best validation figure has one owner, from which checkpoint_best.pt, patience and the log follow."""

from __future__ import annotations

import math

import pytest
import runs

from fairseq import checkpoint
from fairseq.training.best import Best
from fairseq.training.run import Run


@pytest.mark.parametrize("maximize, better, worse", [(False, 1.0, 3.0), (True, 3.0, 1.0)])
def test_a_better_figure_is_seen_and_a_worse_one_counts_towards_patience(maximize, better, worse):
    best = Best(maximize).validated(2.0)
    assert (best.seen, best.without_improvement) == (2.0, 0)
    assert (best.validated(worse).seen, best.validated(worse).without_improvement) == (2.0, 1)
    assert (best.validated(better).seen, best.validated(worse).validated(better).without_improvement) == (better, 0)
    assert best.validated(math.nan) == best.validated(2.0) == best.validated(worse)


@pytest.mark.parametrize("maximize, better, worse", [(False, 1.0, 3.0), (True, 3.0, 1.0)])
def test_what_is_saved_is_compared_with_what_was_saved_not_with_what_was_seen(maximize, better, worse):
    best = Best(maximize).validated(2.0).after_saving(2.0).validated(better)
    assert best.saved == 2.0, "the better figure was seen between two checkpoints"
    assert best.is_worth_saving(2.0) and best.is_worth_saving(better) and not best.is_worth_saving(worse)
    assert not best.is_worth_saving(None) and not best.is_worth_saving(math.nan)
    assert best.after_saving(worse).saved == 2.0


def test_a_restored_value_is_the_one_that_was_stored():
    best = Best().validated(2.0).after_saving(2.0).validated(1.0).validated(1.5)
    assert Best().restored(best.state_dict()) == best
    assert Best().restored({"best": 3.0}) == Best(seen=3.0, saved=3.0), "fairseq's checkpoints have one figure"
    assert Best().restored(best.state_dict(), forget=True) == Best(without_improvement=1)


def test_best_checkpoint_of_stages_in_one_run_is_that_of_one_command_a_stage(tmp_path, monkeypatch):
    """The first stage sees 1.0 between two checkpoints and saves 3.0; the 2.0 at the end of the second is better."""
    figures = {7: 1.0, 14: 2.0, 20: 3.0, 40: 2.0}
    monkeypatch.setattr(Run, "validate", lambda self, epoch: figures.get(self.trainer.num_updates, 9.0))
    flags = [runs.SHORTFORMER, "--validate-interval-updates 7 --max-tokens-valid 64 --tokens-from-prev 16"]
    one, two = tmp_path / "one", tmp_path / "two"
    runs.train(one, flags, "--stages 16:20,32:40")
    runs.train(two, flags, "--tokens-per-sample 16 --max-update 20")
    runs.train(two, flags, "--tokens-per-sample 32 --tokens-from-prev 32 --max-update 40")
    for folder in (one, two):
        best = checkpoint.read(folder / "checkpoint_best.pt")
        assert (best["extra_state"]["val_loss"], best["optimizer_history"][-1]["num_updates"]) == (2.0, 40)
