"""A position in an epoch is what was read: more or fewer processes go on there, or are refused."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mistakes import user_error

from fairseq.data.iterator import EpochDatasets, EpochIterator
from fairseq.data.position import FAIRSEQ, CheckpointOrigin
from fairseq.data.samplers import Batching, BlockSampler, Sampler, StreamSampler
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError


class Stream:
    """A corpus of one line: 0, 1, 2, …"""

    def __init__(self, length: int) -> None:
        self.tokens = np.arange(length).astype(np.uint16)
        self.sizes = np.array([length], np.int32)
        self.offsets = np.array([0, length])


def dataset(blocks: int, size: int = 5) -> TokenBlocks:
    return TokenBlocks(Stream(blocks * size), size, "none", pad=1, eos=2)


def shuffled(data: TokenBlocks, rows: int, rank: int, world: int, **how: Any) -> Sampler:
    settings: dict[str, Any] = {"by_size": False, "seed": 3} | how
    by_size = settings.pop("by_size")
    limits = (rows * int(data.sizes.max()), None) if settings.pop("tokens", False) else (None, rows)
    return BlockSampler(data.sizes, Batching(*limits, rank=rank, world_size=world, **settings), by_size=by_size)


CUT = {"by_size": True, "tokens": True}  # batches that are cut once, by tokens


def streams(data: TokenBlocks, rows: int, rank: int, world: int) -> Sampler:
    return StreamSampler(len(data), rows, block_size=int(data.sizes.max()), rank=rank, world_size=world)


def iterators(data: TokenBlocks, kind: Any, rows: int, world: int, **how: Any) -> list[EpochIterator]:
    return [
        EpochIterator(EpochDatasets.of_one(data, kind(data, rows, rank, world, **how)), prefetch=0)
        for rank in range(world)
    ]


def read(processes: list[EpochIterator], batches: int | None = None) -> list[int]:
    """The blocks that all *processes* read in so many batches, or until the epoch's end."""
    found: list[int] = []
    left = len(processes[0]) - processes[0].iterations_in_epoch
    running = [iter(process) for process in processes]
    for _ in range(left if batches is None else batches):
        for batch in running:
            sample = next(batch)
            found += [] if sample is None else sample["id"].tolist()
    return found


def resumed(before: list[EpochIterator], after: list[EpochIterator], state: dict[str, Any] | None = None) -> list[bool]:
    state = state or before[0].state_dict()
    return [process.load_state_dict(state) for process in after]


@pytest.mark.parametrize("worlds", [(4, 8), (4, 2), (4, 1), (1, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("how", [{}, {"by_size": True}, CUT])
def test_at_75_of_100_batches_the_remaining_blocks_are_read(worlds: tuple[int, int], how: dict[str, bool]) -> None:
    data = dataset(1200 if worlds[0] == 4 else 300 * worlds[0])
    before, after = (iterators(data, shuffled, 3, world, **how) for world in worlds)
    assert len(before[0]) == 100
    first = read(before, 75)
    resumed(before, after)
    rest = read(after)
    assert sorted(first + rest) == list(range(len(data)))
    assert after[0].epoch == 1 and after[0].end_of_epoch


@given(
    blocks=st.integers(1, 80), rows=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)), stop=st.integers(0, 80),
    how=st.sampled_from([{}, {"by_size": True}, CUT]),
)  # fmt: skip
def test_every_block_is_read_once_whatever_the_number_of_processes(
    blocks: int, rows: tuple[int, int], worlds: tuple[int, int], stop: int, how: dict[str, bool]
) -> None:
    data = dataset(blocks)
    rows = (rows[0], rows[0]) if how == CUT else rows  # batches that are cut must be the same
    before, after = (iterators(data, shuffled, r, w, **how) for r, w in zip(rows, worlds, strict=True))
    first = read(before, min(stop, len(before[0])))
    resumed(before, after)
    assert sorted((first if after[0].epoch == 1 else []) + read(after)) == list(range(blocks))


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=60), rows=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)), stop=st.integers(0, 60), by_size=st.booleans(),
)  # fmt: skip
def test_blocks_come_in_the_same_order_on_another_number_of_processes_with_other_rows(
    sizes: list[int], rows: tuple[int, int], worlds: tuple[int, int], stop: int, by_size: bool
) -> None:
    before, after, whole = (
        _of_sizes(np.array(sizes), r, w, by_size=by_size)
        for r, w in zip((*rows, rows[0]), (*worlds, worlds[0]), strict=True)
    )
    expected = read(whole) + read(whole)
    first = read(before, min(stop, len(before[0])))
    resumed(before, after)
    while len(first) < len(expected):
        first += read(after)
    assert first == expected


@given(
    blocks=st.integers(1, 80), rows=st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1)]),
    other=st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1)]), stop=st.integers(0, 20),
)  # fmt: skip
def test_rows_go_on_where_they_stopped_on_another_number_of_processes(
    blocks: int, rows: tuple[int, int], other: tuple[int, int], stop: int
) -> None:
    data = dataset(blocks)
    before, after, whole = (iterators(data, streams, r, w) for r, w in (rows, other, rows))
    first = read(before, min(stop, len(before[0])))
    assert all(resumed(before, after))
    assert (first if after[0].epoch == 1 else []) + read(after) == read(whole)


def test_rows_that_do_not_exist_in_the_new_run_are_refused_in_the_middle_of_an_epoch_only() -> None:
    data = dataset(800)
    before = iterators(data, streams, 2, 4)
    read(before, 75)
    with pytest.raises(UserError) as caught:
        resumed(before, iterators(data, streams, 2, 8))
    assert caught.value.with_flags == (
        "--batch-size, --max-tokens: the checkpoint is in the middle of an epoch (75 of 100 blocks of each row read) "
        "by 8 rows on all processes together, and 16 rows read other parts of the text; keep rows × processes, or give "
        "--reset-dataloader to start at the first batch"
    )
    read(before)
    after = iterators(data, streams, 2, 8)
    resumed(before, after)
    assert (after[0].epoch, after[0].iterations_in_epoch) == (2, 0)


def test_the_same_batches_need_no_line_and_others_one(caplog: pytest.LogCaptureFixture) -> None:
    data = dataset(1200)
    before = iterators(data, shuffled, 3, 4)
    read(before, 75)
    with caplog.at_level(logging.INFO):
        resumed(before, iterators(data, shuffled, 3, 4))
        assert caplog.messages == []
        resumed(before, iterators(data, shuffled, 3, 8)[:1])
    assert caplog.messages == [
        "epoch 1, batch 37 of 50: 900 of 1200 blocks read by 4 processes, 12 at once; continues with 8 processes, "
        "24 at once"
    ]


def test_blocks_of_another_size_go_on_after_the_same_share(caplog: pytest.LogCaptureFixture) -> None:
    before, after = iterators(dataset(1200, 5), shuffled, 3, 4), iterators(dataset(600, 10), shuffled, 3, 4)
    read(before, 75)
    with caplog.at_level(logging.INFO):
        assert not any(resumed(before, after[:1]))
    assert "batch 37 of 50: blocks have another size: continues after 75% of the epoch" in caplog.text


@pytest.mark.parametrize(
    "after, message",
    [
        (
            lambda data: streams(data, 3, 0, 1),
            "checkpoint: .* in the order of batches; these settings read streams",
        ),
        (lambda data: shuffled(data, 4, 0, 1, **CUT), "--max-tokens, --batch-size, .* cut otherwise"),
        (lambda data: shuffled(dataset(50), 3, 0, 1, **CUT), "cut otherwise"),
    ],
)
def test_batches_that_are_not_there_are_refused(after: Any, message: str) -> None:
    data = dataset(60)
    before = iterators(data, shuffled, 3, 1, **CUT)
    read(before, 5)
    with user_error(message):
        EpochIterator(EpochDatasets.of_one(data, after(data))).load_state_dict(before[0].state_dict())


def test_data_of_another_length_is_refused() -> None:
    before = iterators(dataset(60), shuffled, 3, 1)
    read(before, 5)
    with pytest.raises(UserError, match=r"15 of 60 blocks read\), and this run's has 50 blocks; keep the data"):
        resumed(before, iterators(dataset(50), shuffled, 3, 1))


def test_who_saved_a_checkpoint_is_seen_from_its_content() -> None:
    signature = {"batches": 9, "tokens_per_sample": 16, "memory_length": 0, "processes": 2}
    state: dict[str, Any] = {"args": {"distributed_world_size": 1}, "extra_state": {"batches": signature}}
    assert CheckpointOrigin.of(state, 16) == CheckpointOrigin(same_length=True)
    assert CheckpointOrigin.of(state, 32) == CheckpointOrigin(same_length=False)
    assert CheckpointOrigin.of(state, 16, 2) == CheckpointOrigin(same_length=True), "its stage is not known"
    state["extra_state"]["stage"] = {"number": 1}
    assert [CheckpointOrigin.of(state, 16, stage).same_length for stage in (None, 1, 2)] == [True, True, False]
    assert CheckpointOrigin.of({"args": {"distributed_world_size": 4}, "extra_state": {}}, 16) == CheckpointOrigin(
        processes=4
    )


def fairseq_order(sizes: list[int], kept: list[int], seed: int, most: int) -> list[list[int]]:
    """Batches of fairseq's order, one rule at a time: numbers among *kept*."""
    values = np.random.RandomState(seed).permutation(len(sizes)).tolist()
    order = sorted(kept, key=lambda block: (sizes[block], values[block]))
    batches: list[list[int]] = [[]]
    for block in order:
        if batches[-1] and (len(batches[-1]) + 1) * sizes[block] > most:
            batches.append([])
        batches[-1].append(kept.index(block))
    return batches


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=40), seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(1, 4), world=st.integers(1, 3), curriculum=st.integers(0, 2), data=st.data(),
)  # fmt: skip
def test_fairseqs_order_is_that_of_its_rules(
    sizes: list[int], seed: int, epoch: int, world: int, curriculum: int, data: st.DataObject
) -> None:
    longest = data.draw(st.integers(min(sizes), 12))
    kept = [block for block, size in enumerate(sizes) if size <= longest]
    batches = fairseq_order(sizes, kept, seed, 24)
    if epoch > curriculum:
        np.random.RandomState((seed + epoch) % 2**32).shuffle(batches)
    ours = [
        BlockSampler(
            np.array(sizes)[kept],
            Batching(24, None, 1, seed, curriculum, rank=rank, world_size=world),
            by_size=data.draw(st.booleans()),
            selection=np.array(sizes) <= longest,
        ).continuing(FAIRSEQ)
        for rank in range(world)
    ]
    for rank, sampler in enumerate(ours):
        assert [batch.tolist() for batch in sampler.epoch(epoch) if len(batch)] == batches[rank::world]


def test_a_run_of_fairseq_is_continued_after_the_batches_of_its_processes() -> None:
    iterator = EpochIterator(EpochDatasets.of_one(dataset(1200), shuffled(dataset(1200), 3, 0, 4)))
    iterator.load_state_dict({"epoch": 1, "iterations_in_epoch": 20}, CheckpointOrigin(processes=4))
    assert (iterator.epoch, iterator.read) == (1, 80)


def test_a_run_that_fairseq_began_keeps_its_order_in_its_own_checkpoints() -> None:
    data = dataset(60)
    began = EpochIterator(EpochDatasets.of_one(data, shuffled(data, 3, 0, 1)))
    began.load_state_dict({"epoch": 1, "iterations_in_epoch": 4}, CheckpointOrigin())
    state = began.state_dict()
    assert state["read"]["order"] == "fairseq"
    again = EpochIterator(EpochDatasets.of_one(data, shuffled(data, 3, 0, 1)))
    again.load_state_dict(state, CheckpointOrigin())
    expected = fairseq_order([5] * 60, list(range(60)), 3, 15)
    np.random.RandomState(4).shuffle(expected)
    assert read([again]) == read([began]) == sum(expected[4:], [])


def test_lines_that_are_cut_at_another_length_go_on_after_the_same_share() -> None:
    """The longest line, which no length cuts, is the longest block before and after: the length
    alone tells."""
    sizes = {16: [4] * 30 + [9], 32: [8] * 15 + [9]}
    runs_of = {length: _of_sizes(np.array(blocks), 2, 1, **CUT) for length, blocks in sizes.items()}
    read(runs_of[16], 6)
    state = runs_of[16][0].state_dict()
    assert state["read"]["block_size"] == 9
    with pytest.raises(UserError, match="its batches were cut otherwise"):
        runs_of[32][0].load_state_dict(state, CheckpointOrigin(same_length=True))
    runs_of[32][0].load_state_dict(state, CheckpointOrigin(same_length=False))
    share = 6 / len(runs_of[16][0])
    assert runs_of[32][0].iterations_in_epoch == int(share * len(runs_of[32][0]))


def _of_sizes(sizes: np.ndarray, rows: int, world: int, **how: bool) -> list[EpochIterator]:
    class Lines:
        def __init__(self) -> None:
            self.sizes = sizes

        def __len__(self) -> int:
            return len(sizes)

        def batch(self, indices: np.ndarray) -> Any:
            return {"id": indices}

        def at_epoch(self, epoch: int) -> Any:
            return self

        def select(self, keep: np.ndarray) -> Any:
            return self

    data: Any = Lines()
    return iterators(data, shuffled, rows, world, **how)
