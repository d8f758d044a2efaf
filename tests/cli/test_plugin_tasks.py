"""Tasks of a user's own that override fairseq's methods: called where the signature fits, else
refused by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from user_folders import user_folder

from fairseq.config import options
from fairseq.errors import UserError
from fairseq_cli.common import get_training_parser

PLUGIN = '''
import numpy as np
import torch

from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

CALLS = []


class Rows:
    """A dataset of fairseq's kind over the blocks of ours, in which every target is one symbol."""

    def __init__(self, blocks, symbol):
        self.blocks, self.symbol = blocks, symbol

    def __getitem__(self, index):
        return index

    def __len__(self):
        return len(self.blocks)

    def num_tokens(self, index):
        return int(self.blocks.sizes[index])

    def collater(self, samples):
        sample = self.blocks.batch(np.array(samples))
        target = torch.full_like(sample["target"], self.symbol)
        net_input = {**sample["net_input"], "src_lengths": torch.tensor([len(row) for row in target])}
        return {**sample, "net_input": net_input, "target": target}


@register_task("one_symbol")
class OneSymbol(LanguageModelingTask):
    def load_dataset(self, split, combine=False, **kwargs):
        super().load_dataset(split, combine=combine)
        self.datasets[split] = Rows(self.datasets[split], 7)


@register_task("doubled")
class Doubled(LanguageModelingTask):
    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        CALLS.append(update_num)
        loss, size, log = criterion(model, sample)
        optimizer.backward(loss)
        optimizer.backward(loss)
        return loss, size, log

    def valid_step(self, sample, model, criterion):
        loss, size, log = super().valid_step(sample, model, criterion)
        return loss, size, {**log, "loss": log["loss"] * 0 + size}


@register_task("described")
class Described(LanguageModelingTask):
    @staticmethod
    def add_args(parser):
        parser.add_argument("data", help="path to data")
        parser.add_argument("--tokens-per-sample", type=int, default=8)


@register_task("old_step")
class OldStep(LanguageModelingTask):
    def train_step(self, sample, model, criterion, optimizer, ignore_grad=False):
        return super().train_step(sample, model, criterion, optimizer, ignore_grad=ignore_grad)


@register_task("silent")
class Silent(LanguageModelingTask):
    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        return criterion(model, sample)


@register_task("strange_step")
class StrangeStep(LanguageModelingTask):
    def train_step(self, batch, everything):
        pass


@register_task("strange_data")
class StrangeData(LanguageModelingTask):
    def load_dataset(self, split):
        pass


@register_task("empty_data")
class EmptyData(LanguageModelingTask):
    def load_dataset(self, split, combine=False, **kwargs):
        self.datasets[split] = [1, 2]


@register_task("own_batches")
class OwnBatches(LanguageModelingTask):
    def get_batch_iterator(self, dataset, max_tokens=None, max_sentences=None, **kwargs):
        pass
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with user_folder(tmp_path_factory.mktemp("home"), "my_tasks", PLUGIN) as flags:
        yield flags


def train(folder: Path, plugin: list[Any], task: str, *flags: Any) -> list[dict[str, Any]]:
    return runs.train(folder, plugin, runs.BASELINE, runs.NO_DROPOUT, "--max-update 3 --no-save --task", task, *flags)


def test_load_dataset_fills_the_data_that_are_read(plugin: list[Any], tmp_path: Path) -> None:
    flags = "--optimizer adam --lr 0.01 --max-update 30"
    ours, theirs = (runs.losses(train(tmp_path, plugin, task, flags)) for task in ("language_modeling", "one_symbol"))
    assert theirs[-1] < 1 < ours[-1], "one symbol is learned at once"


def test_train_step_decides_the_gradient_and_valid_step_the_validation(plugin: list[Any], tmp_path: Path) -> None:
    flags = "--optimizer sgd --clip-norm 0 --validate-interval-updates 3"
    ours, theirs = (train(tmp_path, plugin, task, flags) for task in ("language_modeling", "doubled"))
    twice = train(tmp_path, plugin, "language_modeling", flags, "--lr 0.1")
    assert runs.losses(theirs) == pytest.approx(runs.losses(twice), rel=1e-6)
    assert runs.losses(theirs) != runs.losses(ours)
    assert sys.modules["my_tasks"].CALLS == [0, 1, 2]
    bits = 1 / torch.log(torch.tensor(2.0)).item()
    assert runs.summaries(theirs, "test")[-1]["loss"] == pytest.approx(bits, abs=2e-3)


def test_a_task_names_the_data_folder_itself(plugin: list[Any], tmp_path: Path) -> None:
    logs = [train(tmp_path, plugin, task, "--tokens-per-sample 8") for task in ("language_modeling", "described")]
    assert runs.losses(logs[0]) == runs.losses(logs[1])
    with pytest.raises(UserError, match="are required: DATA"):
        options.parse_args_and_arch(get_training_parser(), [*map(str, plugin), "--task", "described"])


def test_a_step_of_older_versions_without_the_update_number_is_called(plugin: list[Any], tmp_path: Path) -> None:
    logs = [train(tmp_path, plugin, task) for task in ("language_modeling", "old_step")]
    assert runs.losses(logs[0]) == runs.losses(logs[1])


@pytest.mark.parametrize(
    "task, line",
    [
        (
            "strange_step",
            r"--task strange_step: train_step must take \(sample, model, criterion, optimizer",
        ),
        ("silent", r"--task silent: train_step must call optimizer.backward\(loss\)"),
        ("strange_data", r"--task strange_data: load_dataset must take \(split, combine=False, \*\*kwargs\)"),
        (
            "empty_data",
            r"--task empty_data: load_dataset left list in self.datasets\['valid'\]; expected",
        ),
        ("own_batches", "--task own_batches: get_batch_iterator returned NoneType; expected .*EpochBatchIterator"),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(plugin: list[Any], task: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=line):
        train(tmp_path, plugin, task)


def test_a_step_that_cannot_carry_memory_is_refused_beside_a_cache(plugin: list[Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--task doubled: its train_step cannot carry the model's memory"):
        runs.train(tmp_path, plugin, runs.SHORTFORMER, "--max-update 1 --no-save --task doubled")
