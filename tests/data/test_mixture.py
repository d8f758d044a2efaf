"""A mixture reads its corpora in proportion, in an order that follows from seed and epoch alone."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from mistakes import user_error
from small_runs import FIVE
from user_folders import user_folder

from fairseq.data.iterator import EpochDatasets, EpochIterator
from fairseq.data.mixture import Mixture
from fairseq.data.samplers import Batching
from fairseq.data.token_blocks import TokenBlocks

LENGTHS = {"books": 50, "news": 7, "songs": 33}  # blocks of 4 tokens, of which the last has 2
SHARES = [0.5, 0.3, 0.2]


class Numbers:
    """A corpus whose tokens are *first*, *first* + 1, …, in lines of four."""

    def __init__(self, first: int, length: int) -> None:
        self.tokens = np.arange(first, first + length)
        self.offsets = np.append(np.arange(0, length, 4), length)
        self.sizes = np.diff(self.offsets)


def mixture(seed: int | None = 3, lines: int | None = None) -> Mixture:
    corpora = {name: Numbers(1000 * n, 4 * blocks - 2) for n, (name, blocks) in enumerate(LENGTHS.items(), start=1)}
    sources = {
        name: TokenBlocks(each, 4, "none", pad=1, eos=2, shuffle_lines=lines)  # type: ignore[arg-type]
        for name, each in corpora.items()
    }
    return Mixture(sources, SHARES, seed)


def epochs(
    count: int, world: int = 1, rank: int = 0, rows: int = 12, state: Any = None
) -> tuple[list[list[list[int]]], list[Any]]:
    """The targets of each row, batch by batch of *count* epochs; and the position after each
    batch."""
    dataset = mixture()
    batching = Batching(None, rows // world, seed=3, rank=rank, world_size=world)
    iterator = EpochIterator(EpochDatasets.of_one(dataset, batching.blocks(dataset.sizes, by_size=False)), prefetch=0)
    if state is not None:
        iterator.load_state_dict(state)
    batches, states = [], []
    while iterator.epoch <= count:
        for sample in iterator:
            rows_of = [] if sample is None else sample["target"].tolist()
            batches.append([[token for token in row if token != 1] for row in rows_of])
            states.append(iterator.state_dict())
    return batches, states


def test_shares_are_of_the_tokens_and_no_block_comes_twice_before_all_came_once() -> None:
    batches, _ = epochs(6)
    assert len(batches) == 6 * 9  # 50 + 30 + 20 blocks, 12 a batch
    read = [[tuple(row) for batch in batches[9 * n : 9 * n + 9] for row in batch] for n in range(6)]
    for epoch, rows in enumerate(read, start=1):
        by_source = Counter(row[0] // 1000 for row in rows)
        assert by_source == {1: 50, 2: 30, 3: 20}
        so_far = Counter(row for each in read[:epoch] for row in each)
        for number, blocks in enumerate(LENGTHS.values(), start=1):
            times = [so_far[row] for row in _blocks(number, blocks)]
            assert max(times) - min(times) <= 1 and sum(times) == epoch * {1: 50, 2: 30, 3: 20}[number]
    assert read[0] != read[1], "each epoch has an order of its own"


def _blocks(number: int, count: int) -> list[tuple[int, ...]]:
    tokens = 1000 * number + np.arange(4 * count - 2)
    return [tuple(tokens[at : at + 4].tolist()) for at in range(0, len(tokens), 4)]


def test_a_resumed_mixture_and_one_on_several_processes_read_what_the_whole_one_reads() -> None:
    whole, states = epochs(3)
    for at in (4, 8, 13):
        assert epochs(3, state=states[at])[0] == whole[at + 1 :]
    ranks = [epochs(3, world=2, rank=rank)[0] for rank in (0, 1)]
    assert [one + other for one, other in zip(*ranks, strict=True)] == whole
    assert epochs(3, world=2, rank=1, state=states[4])[0] == ranks[1][5:], "resumed on another number of processes"


def test_lines_are_shuffled_anew_for_each_pass() -> None:
    blocks = mixture(lines=5)
    rows = [blocks.at_epoch(epoch).batch(np.arange(50, 80))["target"].tolist() for epoch in (1, 2)]
    tokens = [sorted(token for row in of_epoch[:28] for token in row if token != 1) for of_epoch in rows]
    # 30 blocks are four passes of 7 and two blocks more.
    assert tokens[0] == sorted(4 * list(range(2000, 2026)))
    assert rows[0] != rows[1]


def test_a_validation_reads_all_of_each_source_once_and_marks_it() -> None:
    blocks = mixture(seed=None)
    sample = blocks.batch(np.arange(len(blocks)))
    assert [row[0] // 1000 for row in sample["target"].tolist()] == [1] * 50 + [2] * 7 + [3] * 33
    marked = {name: mask.squeeze(1).nonzero().squeeze(1).tolist() for name, mask in sample["subsets"].items()}
    assert marked == {"books": [*range(50)], "news": [*range(50, 57)], "songs": [*range(57, 90)]}
    assert sample["ntokens"] == sum(4 * count - 2 for count in LENGTHS.values()) == int(blocks.sizes.sum())


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second data folder, whose two splits have changed places."""
    folder = tmp_path_factory.mktemp("other") / "tales"
    folder.mkdir()
    shutil.copy(runs.DATA / "dict.txt", folder)
    for split, source in (("valid", "test"), ("test", "valid")):
        for kind in ("bin", "idx"):
            shutil.copy(runs.DATA / f"{source}.{kind}", folder / f"{split}.{kind}")
    return folder


def test_a_run_in_parts_is_the_whole_run_and_validates_each_source(tmp_path: Path, other: Path) -> None:
    # 7 updates an epoch.
    flags = [FIVE, runs.ADAM, runs.DROPOUT, f"--mixture {other}=0.4 --max-valid-steps 99 --no-epoch-checkpoints"]
    whole = runs.train(tmp_path / "whole", *flags, "--max-update 9")
    parts = [line for count in (4, 9) for line in runs.train(tmp_path / "parts", *flags, f"--max-update {count}")]
    one, rest = (runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "parts"))
    for part in ("model", "last_optimizer_state"):
        assert runs.difference(one[part], rest[part]) is None
    assert runs.losses(whole) == runs.losses(parts)
    last = runs.summaries(whole, "test")[-1]
    low, high = sorted(last[name] for name in ("data-bin_loss", "tales_loss"))
    assert low < last["loss"] < high


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mixture {other}", "--mixture {other}: '{other}' is not DIR=SHARE with a share between 0 and 1"),
        ("--mixture {other}=1", "--mixture {other}=1: .* is not DIR=SHARE"),
        ("--mixture {other}=0.5,{other}=0.1", "--mixture .*: {other} is named twice; add its shares"),
        ("--mixture {other}=0.6,more=0.4", "--mixture .*: the shares leave nothing for DATA; .* below 1"),
        ("--mixture {data}=0.4", "--mixture: a folder is named twice, or is DATA {data}, which has the rest"),
        ("--mixture {other}=0.0001", "--mixture: the share of tales is less than one block an epoch; raise it"),
        ("--mixture missing=0.5", "missing: folder not found; make it with fairseq-preprocess --destdir missing"),
        ("--mixture {other}=0.4 --streams", "--streams: rows of a --mixture do not continue; leave one of them out"),
        (
            "--mixture {other}=0.4 --sample-break-mode eos",
            "--sample-break-mode eos: --mixture needs blocks of one size",
        ),
        ("--mixture {other}=0.4 --arch shortformer_tiny", "--mixture: a model with memory reads one text in order"),
        ("--mixture {other}=0.4 --save-interval-tokens 100", "--save-interval-tokens: cannot be used with --mixture"),
    ],
)
def test_what_a_mixture_cannot_be_is_one_line(flags: str, message: str, other: Path, tmp_path: Path) -> None:
    places = {"other": other, "data": runs.DATA}
    with user_error(message.format(**places)):
        runs.train(tmp_path, runs.SHORT, flags.format(**places))


def test_a_folder_is_not_called_as_a_figure_of_the_criterion(other: Path, tmp_path: Path) -> None:
    shutil.copytree(other, tmp_path / "nll")
    with user_error("--mixture: nll_loss is a figure of the criterion; rename the folder nll"):
        runs.train(tmp_path / "run", runs.SHORT, f"--mixture {tmp_path / 'nll'}=0.4")


OWN_DATA = """
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

@register_task("own_data")
class OwnData(LanguageModelingTask):
    def load_dataset(self, split, **options):
        super().load_dataset(split, **options)
"""


def test_a_task_with_datasets_of_its_own_reads_no_mixture(other: Path, tmp_path: Path) -> None:
    refused = user_error("--mixture: the task own_data makes its own datasets; leave it out")
    with user_folder(tmp_path, "own_data", OWN_DATA) as plugin, refused:
        runs.train(tmp_path / "run", runs.SHORT, plugin, f"--task own_data --mixture {other}=0.4")
