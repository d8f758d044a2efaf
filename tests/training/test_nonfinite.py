"""Losses and gradients that are infinite or NaN end a run with their place, or are skipped as often
as allowed."""

from __future__ import annotations

import logging

import pytest
import runs
import torch

from fairseq import checkpoint
from fairseq.errors import UserError
from fairseq.training import loop, nonfinite
from fairseq.training.state import TrainingState

FLAGS = [runs.BASELINE, runs.NO_DROPOUT, "--max-update 6 --disable-validation"]


class Poison(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.nan


@pytest.fixture
def poisoned(monkeypatch):
    """Make the output of a module infinite, or its gradient NaN, in the updates whose batch holds
    some examples."""

    def poison(examples, name="decoder.layers.1.fc1", gradient=False):
        seen = {"bad": False}
        step = loop.update
        made = TrainingState.__init__

        def watch(state, samples, *ask):
            seen["bad"] = any(number in examples for sample in samples for number in sample["id"].tolist())
            return step(state, samples, *ask)

        def init(self, *args):
            made(self, *args)

            def spoil(module, inputs, output):
                if not seen["bad"]:
                    return output
                return Poison.apply(output) if gradient else output * torch.inf

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


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_the_error_names_update_examples_and_first_module_and_the_state_before_is_saved(tmp_path, poisoned, precision):
    bad = examples_of(tmp_path, 4)
    poisoned(bad)
    with pytest.raises(UserError) as error:
        runs.train(tmp_path / "run", FLAGS, precision)
    assert str(error.value).startswith(
        "update 4: loss or gradients are infinite or NaN, first in the output of model.decoder.layers.1.fc1; "
        f"examples {' '.join(map(str, bad))}; lower --lr"
    )
    saved = checkpoint.load(tmp_path / "run" / "nonfinite.pt")
    assert saved["optimizer_history"][-1]["num_updates"] == 3
    assert saved["extra_state"]["nonfinite"]["ids"] == bad
    assert not list((tmp_path / "run").glob("checkpoint*")), "nothing to resume from by mistake"


def test_a_gradient_alone_is_found_where_the_backward_pass_meets_it_first(tmp_path, poisoned):
    poisoned(examples_of(tmp_path, 2), gradient=True)
    with pytest.raises(UserError, match=r"update 2: .* first in the gradient of .*layers.1.fc1.(bias|weight);"):
        runs.train(tmp_path / "run", FLAGS)


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


def test_skipped_updates_leave_no_trace(tmp_path, poisoned, caplog, monkeypatch):
    bad = examples_of(tmp_path, 3)
    with monkeypatch.context() as patch:  # a run that never reads the third batch
        groups = loop.groups
        without = lambda *args: (group for number, group in enumerate(groups(*args), start=1) if number != 3)  # noqa: E731
        patch.setattr(loop, "groups", without)
        plain = runs.train(tmp_path / "plain", FLAGS)
    poisoned(bad)
    with caplog.at_level(logging.WARNING):
        log = runs.train(tmp_path / "run", FLAGS, "--skip-nonfinite 1")
    assert "update 3: loss or gradients are infinite or NaN" in caplog.text and "skipped 1 of 1" in caplog.text
    assert [line["num_updates"] for line in runs.updates(log)] == [1, 2, 3, 4, 5, 6]
    assert runs.losses(log) == runs.losses(plain)
    skipped, expected = (runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("run", "plain"))
    assert skipped["extra_state"].pop("skipped_nonfinite") == 1
    assert runs.difference(skipped, expected) is None


def test_the_second_pass_leaves_no_hooks_behind(tmp_path, poisoned, monkeypatch):
    poisoned(examples_of(tmp_path, 2))
    counts = []
    find = nonfinite.find

    def hooks(graph):
        return sum(len(module._forward_hooks) for module in graph.modules())

    def watched(graph, *others):
        before = hooks(graph)
        finding = find(graph, *others)
        counts.append((before, hooks(graph)))
        return finding

    monkeypatch.setattr(nonfinite, "find", watched)
    runs.train(tmp_path, FLAGS, "--skip-nonfinite 1 --no-save --max-update 3")
    assert counts == [(1, 1)], "the one of this test"


def test_skipped_updates_are_counted_across_a_resumption(tmp_path, poisoned, caplog):
    poisoned([*examples_of(tmp_path, 3), *examples_of(tmp_path, 6)])  # one before the resumption, one after it
    for allowed in (1, 2):
        runs.train(tmp_path / f"{allowed}", FLAGS, f"--skip-nonfinite {allowed} --max-update 3")
    with pytest.raises(UserError, match=r"update 5: .*\(1 were skipped before\)"):
        runs.train(tmp_path / "1", FLAGS, "--skip-nonfinite 1")
    with caplog.at_level(logging.WARNING):
        log = runs.train(tmp_path / "2", FLAGS, "--skip-nonfinite 2")
    assert [line["num_updates"] for line in runs.updates(log)] == [4, 5, 6] and "skipped 2 of 2" in caplog.text


# --- out of memory


@pytest.fixture
def little_memory(monkeypatch):
    """Let a forward pass of more than some rows run out of memory, in its middle."""

    def limit(most):
        step = TrainingState.__init__

        def init(self, *args, **parts):
            step(self, *args, **parts)

            def check(module, inputs, keywords, output):
                if keywords["src_tokens"].size(0) > most:
                    raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

            self.model.register_forward_hook(check, with_kwargs=True)

        monkeypatch.setattr(TrainingState, "__init__", init)

    return limit


def test_out_of_memory_names_the_batch(tmp_path, little_memory):
    little_memory(3)
    with pytest.raises(
        UserError, match="out of GPU memory in update 1 on a batch of 4 rows × 16 tokens: raise --batch-c"
    ):
        runs.train(tmp_path, FLAGS)
