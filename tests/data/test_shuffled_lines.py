"""--shuffle-lines: each epoch reads every line whole and once, in an order of its own that can be
had again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from hypothesis import given
from hypothesis import strategies as st
from mistakes import user_error

from fairseq import checkpoint
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.data.iterator import EpochDatasets, EpochIterator
from fairseq.data.position import SEQUENCE, EpochLayout, order_generator
from fairseq.data.samplers import Batching, BlockSampler, Sampler, StreamSampler
from fairseq.data.token_blocks import ShuffledLines, TokenBlocks
from fairseq.tasks import setup_task

PAD, EOS = 1, 2
KINDS = ("streams", "blocks")


@dataclasses.dataclass
class Lines:
    """A corpus in memory, of *count* lines of 1 to 9 tokens; all tokens but the last of a line are
    different."""

    count: int = 60

    def __post_init__(self) -> None:
        self.sizes = np.random.RandomState(5).randint(1, 10, self.count).astype(np.int32)
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        self.tokens = np.arange(10, 10 + self.offsets[-1]).astype(np.uint16)
        self.tokens[self.offsets[1:] - 1] = EOS

    def lines(self) -> list[tuple[int, ...]]:
        return [tuple(self.tokens[a:b].tolist()) for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)]


CORPUS = Lines()


def iterator(kind: str, *, seed: int | None = 3, rank: int = 0, world: int = 1, rows: int = 4) -> EpochIterator:
    blocks = TokenBlocks(CORPUS, 7, "none", pad=PAD, eos=EOS, shuffle_lines=seed)
    sampler: Sampler
    if kind == "streams":
        sampler = StreamSampler(len(blocks), rows, rank=rank, world_size=world)
    else:
        sampler = BlockSampler(blocks.sizes, Batching(None, rows, rank=rank, world_size=world), by_size=False)
    return EpochIterator(EpochDatasets.of_one(blocks, sampler), prefetch=0)


def rows_of(samples: list[Any]) -> dict[int, tuple[list[int], list[int]]]:
    """The source and target of each block of *samples*, without padding."""
    found = {}
    for sample in filter(None, samples):
        rows = (sample["id"], sample["net_input"]["src_tokens"], sample["target"])
        for number, source, target in zip(*(tensor.tolist() for tensor in rows), strict=True):
            length = len(target) - target.count(PAD)
            found[number] = (source[:length], target[:length])
    return found


def text(samples: list[Any]) -> list[int]:
    """All that *samples* score, block after block."""
    return [token for _, (_, target) in sorted(rows_of(samples).items()) for token in target]


def lines_of(tokens: list[int]) -> list[tuple[int, ...]]:
    lines, line = [], []
    for token in tokens:
        line.append(token)
        if token == EOS:
            lines.append(tuple(line))
            line = []
    assert line == []
    return lines


@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=40).filter(any), seed=st.integers(0, 2**40))
def test_the_lines_are_a_permutation_of_whole_lines(sizes: list[int], seed: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    total = int(offsets[-1])
    places = (
        ShuffledLines(np.array(sizes, np.int32), order_generator(SEQUENCE, seed, 1))
        .positions(np.arange(total))
        .tolist()
    )
    lines = {int(a): list(range(a, b)) for a, b in zip(offsets[:-1], offsets[1:], strict=True) if b > a}
    read = []
    while places:
        line = lines.pop(places[0])
        read.append(line)
        assert places[: len(line)] == line
        del places[: len(line)]
    assert lines == {}


def test_places_keep_their_shape() -> None:
    lines = ShuffledLines(CORPUS.sizes, order_generator(SEQUENCE, 1, 1))
    flat = lines.positions(np.arange(24))
    assert np.array_equal(lines.positions(np.arange(24).reshape(4, 6)), flat.reshape(4, 6))


def test_sixteen_bytes_a_line_are_kept() -> None:
    lines = ShuffledLines(np.full(10_000, 25, np.int32), order_generator(SEQUENCE, 1, 1))
    assert sum(array.nbytes for array in vars(lines).values()) == 16 * 10_000


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_is_read_once_an_epoch_and_whole_and_epochs_differ(kind: str) -> None:
    batches = iterator(kind)
    epochs = [lines_of(text(list(batches))) for _ in range(3)]
    for lines in epochs:
        assert sorted(lines) == sorted(CORPUS.lines())
        assert lines != CORPUS.lines()
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_source_is_the_shuffled_text_shifted_by_one(kind: str) -> None:
    samples = list(iterator(kind))
    sources = [token for _, (source, _) in sorted(rows_of(samples).items()) for token in source]
    assert sources == [EOS, *text(samples)[:-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_gives_another_order_and_none_gives_the_corpus(kind: str) -> None:
    assert text(list(iterator(kind, seed=3))) != text(list(iterator(kind, seed=40)))
    assert text(list(iterator(kind, seed=None))) == CORPUS.tokens.tolist()


def test_each_seed_and_epoch_has_an_order_of_its_own() -> None:
    """With sums of the two, epoch 3 of seed 1 is epoch 1 of seed 3."""
    blocks = [TokenBlocks(CORPUS, 7, "none", pad=PAD, eos=EOS, shuffle_lines=seed) for seed in range(4)]
    orders = {
        b.at_epoch(epoch).batch(np.arange(len(b)))["target"].numpy().tobytes() for b in blocks for epoch in range(4)
    }
    assert len(orders) == 16


def test_a_run_of_1_0_keeps_its_order() -> None:
    """Its lines are permuted by the sum of seed and epoch."""
    blocks = TokenBlocks(CORPUS, 7, "none", pad=PAD, eos=EOS, shuffle_lines=3).continuing(
        EpochLayout("streams", 1, 1, 1, 7)
    )
    found = lines_of(text([blocks.at_epoch(2).batch(np.arange(len(blocks)))]))
    assert found == [CORPUS.lines()[line] for line in np.random.RandomState(3 + 2).permutation(60)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [1, 5, 14, 20])
def test_a_resumed_iterator_reads_what_an_uninterrupted_one_reads(kind: str, stop: int) -> None:
    whole = iterator(kind)
    expected = [rows_of([sample]) for _ in range(3) for sample in whole]
    stopped, found = iterator(kind), []
    while len(found) < stop:
        for sample in stopped:
            found.append(rows_of([sample]))
            if len(found) == stop:
                break
    resumed = iterator(kind)
    resumed.load_state_dict(stopped.state_dict())
    while resumed.epoch <= 3:
        found += [rows_of([sample]) for sample in resumed]
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_read_what_one_reads(kind: str, world: int) -> None:
    one = iterator(kind)
    ranks = [iterator(kind, rank=rank, world=world, rows=4 // world) for rank in range(world)]
    for _ in range(2):
        for alone, *together in zip(one, *ranks, strict=True):
            assert rows_of(together) == rows_of([alone])


@pytest.mark.parametrize("mode", ["complete", "complete_doc", "eos"])
def test_blocks_of_whole_lines_are_refused_before_training(mode: str, tmp_path: Path) -> None:
    with user_error(f"--shuffle-lines: with --sample-break-mode {mode} .*; use"):
        runs.train(tmp_path / "run", runs.BASELINE, f"--shuffle-lines --sample-break-mode {mode} --max-update 1")
    assert not (tmp_path / "run").exists() or list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("flags", [runs.BASELINE, runs.SHORTFORMER])
def test_only_training_reads_shuffled_lines(flags: str) -> None:
    args = runs.arguments(flags, "--shuffle-lines")
    task = setup_task(args)
    model, criterion = task.build_model(args), task.build_criterion(args)
    corpus = IndexedCorpus(str(runs.DATA / "valid")).tokens[:].tolist()
    training, validation = (task.iterator("valid", model, criterion, training=flag) for flag in (True, False))
    assert text(list(validation)) == corpus
    first = text(list(training))
    assert first != corpus and sorted(lines_of(first)) == sorted(lines_of(corpus))


@pytest.mark.parametrize("flags", [runs.BASELINE, runs.SHORTFORMER])
def test_a_resumed_run_equals_an_uninterrupted_one(flags: str, tmp_path: Path) -> None:
    settings = f"{flags} --max-tokens 256 --shuffle-lines --disable-validation --no-epoch-checkpoints"
    whole = runs.losses(runs.train(tmp_path / "whole", settings, "--max-update 15 --no-save"))
    first = runs.losses(runs.train(tmp_path / "parts", settings, "--max-update 13"))
    assert checkpoint.read(tmp_path / "parts" / "checkpoint_last.pt")["extra_state"]["train_iterator"]["epoch"] == 2
    assert first + runs.losses(runs.train(tmp_path / "parts", settings, "--max-update 15")) == whole
