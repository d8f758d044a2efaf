"""State that a step hands to the next is taken over only when its update counts, whatever kind of
state it is."""

from __future__ import annotations

import pytest
import runs
import torch
from small_trainers import XL

from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.modules.memory import keep_rows
from fairseq.tasks import setup_task
from fairseq.tasks.carried import RowMemory
from fairseq.training.build import build_state
from fairseq.training.loop import groups
from fairseq.training.state import TrainingState
from fairseq.training.update import update
from fairseq.training.validation import evaluate


def a_trainer(*flags):
    args = runs.arguments(runs.SHORTFORMER, runs.NO_DROPOUT, *flags)
    torch.manual_seed(1)
    task = setup_task(args)
    return TrainingState(training_settings(args), task, task.build_model(args), task.build_criterion(args))


def a_run(base, flags):
    return build_state(training_settings(runs.arguments(base, flags)), World())


def batches(trainer, split="train", training=True):
    return iter(trainer.task.iterator("valid", trainer.model, trainer.criterion, training=training))


def test_memory_of_an_update_that_overflowed_is_dropped_with_it():
    trainer = a_trainer("--fp16")
    samples = batches(trainer)
    assert update(trainer, [next(samples)])
    before = [layer.clone() for layer in trainer.task.carried["memory"]]

    def overflow(module, args, output):
        hidden, extra = output
        return hidden * torch.inf, {**extra, "memory": [layer * torch.inf for layer in extra["memory"]]}

    hook = trainer.model.register_forward_hook(overflow)
    assert not update(trainer, [next(samples)])
    hook.remove()
    after = trainer.task.carried["memory"]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(update(trainer, [next(samples)]) for _ in range(3)), "one overflow costs one update"


@pytest.mark.parametrize("flags", ["--fp16", "--skip-nonfinite 1"])
def test_memory_goes_on_with_the_text_where_gradients_alone_are_not_finite(flags):
    trainer, other = a_trainer(flags), a_trainer(flags)
    samples = list(batches(trainer))[:3]
    assert update(trainer, [samples[0]])
    other.load_state_dict(trainer.state_dict(), "a run", rows=4)
    hook = trainer.parameters[0].register_hook(lambda gradient: gradient * torch.inf)
    assert not update(trainer, [samples[1]])
    hook.remove()
    with other.precision.autocast(other.world.device):  # the same weights read the same text, without an update
        _, carried = other.task.step(other.graph.train(), samples[1], other.task.carried, "cpu")
    pairs = list(zip(trainer.task.carried["memory"], carried["memory"], strict=True))
    assert pairs and all(torch.equal(one, another) for one, another in pairs)
    assert trainer.num_updates == 1 and update(trainer, [samples[2]])


def test_batches_of_one_update_read_the_memory_of_those_before_them():
    together, apart = a_trainer(), a_trainer("--lr 1e-30")
    samples = list(batches(together))[:4]
    update(together, samples)
    for sample in samples:
        update(apart, [sample])
    pairs = zip(together.task.carried["memory"], apart.task.carried["memory"], strict=True)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)


@pytest.mark.parametrize(
    "base", [f"{runs.SHORTFORMER} {runs.NO_DROPOUT}", f"{XL} --dropout 0 --dropatt 0 --mem-len 24"]
)
@pytest.mark.parametrize("chunks, frequency", [(3, 2)])
def test_a_batch_in_chunks_is_the_same_update_with_the_same_memory(base, chunks, frequency):
    """Over a whole epoch, at whose end rows run out; batches have 8 rows."""
    whole, parts = (
        a_run(f"{base} --max-tokens 128 --optimizer sgd --lr 0.01 --clip-norm 0", flags)
        for flags in ("", f"--batch-chunk {chunks}")
    )
    updates = zip(groups(whole.batches, frequency), groups(parts.batches, frequency), strict=True)
    for number, (one, several) in enumerate(updates):
        memories = [keep_rows(state.task.carried.get("memory"), one[0]["nsentences"]) or [] for state in (whole, parts)]
        for a, b in zip(*memories, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=2e-6 * float(a.abs().max())), number
        assert update(whole, one) and update(parts, several)
    assert number > 9 and one[-1]["nsentences"] == 7
    pairs = zip(whole.parameters, parts.parameters, strict=True)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs)
    reports = [state.meters["train"].report(state.figures) for state in (whole, parts)]
    assert reports[0] == pytest.approx(reports[1], rel=1e-6)


def test_the_last_block_may_be_a_chunk_of_its_own_however_short_it_is():
    base = f"{XL} --dropout 0 --dropatt 0 --mem-len 900 --tokens-per-sample 800 --max-tokens 4000"
    whole, parts = (a_run(f"{base} --optimizer sgd --lr 0.01", flags) for flags in ("", "--batch-chunk 4"))
    for state in (whole, parts):
        (samples,) = groups(state.batches, 1)
        assert samples[0]["nsentences"] == 4 and update(state, samples)
    pairs = zip(whole.parameters, parts.parameters, strict=True)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs)


def test_validation_leaves_the_state_of_training_as_it_is():
    trainer = a_trainer()
    samples = batches(trainer)
    update(trainer, [next(samples)])
    before = [layer.clone() for layer in trainer.task.carried["memory"]]
    evaluate(trainer, batches(trainer, training=False))
    assert all(torch.equal(one, other) for one, other in zip(before, trainer.task.carried["memory"], strict=True))


class CountedRows:
    """A kind of state that has nothing to do with rows: how many rows were read, over all
    epochs."""

    name = "counted"

    def check(self, model, criterion):
        pass

    def inputs(self, value, sample):
        return {}

    def advance(self, value, extra, sample):
        return (value or 0) + sample["nsentences"]

    def commit(self, before, after, model, world):
        return int(world.sum(torch.tensor(after or 0)))

    def skip(self, before, after):
        return before

    def restart(self, value):
        return value

    def save(self, value, world):
        return value

    def load(self, saved, rows, world):
        return saved


def test_a_new_kind_of_state_needs_a_class_and_nothing_else(monkeypatch):
    trainer = a_trainer()
    monkeypatch.setattr(type(trainer.task), "kinds", (RowMemory(), CountedRows()))
    samples = list(batches(trainer))
    update(trainer, samples[:2])
    trainer.task.restart()
    update(trainer, samples[2:3])
    rows = sum(sample["nsentences"] for sample in samples[:3])
    assert trainer.task.carried["counted"] == rows
    restored = a_trainer()
    restored.load_state_dict(trainer.state_dict(), "a run", rows=4)
    assert restored.task.carried["counted"] == rows
    assert restored.task.carried["memory"] is not None
