"""A task says what its examples are; batches, limits and resuming come from the protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch

from fairseq.criterions.fairseq_criterion import FairseqCriterion
from fairseq.data.dataset import Dataset, Sample
from fairseq.errors import UserError
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.dictionary import Dictionary

PAD = 1


class Pairs:
    """Sentence pairs in memory; one token of each row is masked at random, by seed, epoch and
    number."""

    def __init__(self, rows: list[list[int]], numbers: np.ndarray | None = None, epoch: int = 0) -> None:
        self.rows = rows
        self.numbers = np.arange(len(rows)) if numbers is None else numbers
        self.epoch = epoch

    @property
    def sizes(self) -> np.ndarray:
        return np.array([len(self.rows[number]) for number in self.numbers])

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, indices: np.ndarray) -> Sample:
        rows = [self.rows[number] for number in self.numbers[indices]]
        tokens = torch.full((len(rows), max(map(len, rows))), PAD)
        for row, words in enumerate(rows):
            tokens[row, : len(words)] = torch.tensor(words)
        masked = [
            np.random.RandomState((7, self.epoch, int(n))).randint(len(self.rows[n])) for n in self.numbers[indices]
        ]
        return {
            "id": torch.from_numpy(indices),
            "nsentences": len(rows),
            "ntokens": len(rows),
            "net_input": {"src_tokens": tokens},
            "target": torch.tensor(masked),
        }

    def at_epoch(self, epoch: int) -> Pairs:
        return Pairs(self.rows, self.numbers, epoch)

    def select(self, keep: np.ndarray) -> Pairs:
        return Pairs(self.rows, self.numbers[keep], self.epoch)


class PairTask(FairseqTask):
    """A task that overrides only what its data are."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        random = np.random.RandomState(3)
        self.rows = [random.randint(4, 90, size=size).tolist() for size in random.randint(1, 20, size=60)]

    @property
    def source_dictionary(self) -> Dictionary:
        return Dictionary()

    def dataset(self, split: str, *, training: bool = False, folder: str | Path | None = None) -> Dataset:
        return Pairs(self.rows)


class Model:
    """What the iterator asks of a model."""

    memory_length = 0

    def __init__(self, positions: int | None = None) -> None:
        self.positions = positions

    def max_positions(self) -> int | None:
        return self.positions


class Criterion(FairseqCriterion):
    """One that prepares nothing."""

    def __init__(self) -> None:
        pass

    def prepare(self, model: Any, sample: Sample) -> Sample:
        return sample


def batches(flags: str, model: Model, **how: Any) -> Any:
    task = PairTask(runs.arguments(runs.BASELINE, flags))
    return task.iterator("train", model, Criterion(), **{"training": True, **how})  # type: ignore[arg-type]


def test_a_task_with_its_own_examples_gets_batches_by_size_within_the_limit() -> None:
    found = [sample for sample in batches("--max-tokens 40", Model()) if sample is not None]
    read = sorted(index for sample in found for index in sample["id"].tolist())
    assert read == list(range(60))
    assert all(sample["net_input"]["src_tokens"].numel() <= 40 for sample in found)
    padding = sum(int((sample["net_input"]["src_tokens"] == PAD).sum()) for sample in found)
    assert padding < 0.1 * sum(sample["net_input"]["src_tokens"].numel() for sample in found)


def test_examples_longer_than_the_model_are_left_out_in_training_and_refused_in_validation() -> None:
    found = [sample for sample in batches("--max-tokens 40", Model(10)) if sample is not None]
    assert max(sample["net_input"]["src_tokens"].size(1) for sample in found) == 10
    with pytest.raises(UserError, match="longer than the model's 10 positions"):
        batches("--max-tokens 40", Model(10), training=False)


def test_what_is_random_follows_from_epoch_and_example_on_any_number_of_processes() -> None:
    def masked(ranks: list[Any], epoch: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for iterator in ranks:
            iterator.load_state_dict({"epoch": epoch, "iterations_in_epoch": 0})
            for sample in iterator:
                if sample is not None:
                    found |= dict(zip(sample["id"].tolist(), sample["target"].tolist(), strict=True))
        return found

    one = [batches("--max-tokens 40", Model())]
    two = [batches("--max-tokens 40", Model(), rank=rank, world_size=2) for rank in range(2)]
    assert masked(one, 2) == masked(two, 2) != masked(one, 3)
