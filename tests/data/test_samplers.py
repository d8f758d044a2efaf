"""Every block is read exactly once an epoch, whatever the number of processes, in the order
promised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mistakes import user_error

from fairseq.data.position import EpochLayout
from fairseq.data.samplers import Batching, BlockSampler, StreamSampler, rows_per_batch

worlds = st.integers(1, 5)
epochs = st.integers(1, 4)


def uniform(blocks: int, rows: int, **how: object) -> BlockSampler:
    return BlockSampler(np.full(blocks, 8, np.int32), Batching(None, rows, **how), by_size=False)  # type: ignore[arg-type]


def by_size(sizes: list[int], **how: object) -> BlockSampler:
    limits = Batching(**{"max_tokens": None, "batch_size": None} | how)  # type: ignore[arg-type]
    return BlockSampler(np.array(sizes, np.int32), limits, by_size=True)


def read(sampler: BlockSampler | StreamSampler, epoch: int = 1, after: int = 0) -> list[list[int]]:
    return [batch.tolist() for batch in sampler.epoch(epoch, after)]


@pytest.mark.parametrize(
    ("max_tokens", "batch_size", "block", "multiple", "rows"),
    [
        (9216, None, 128, 1, 72),
        (9216, None, 512, 8, 16),
        (3072, None, 3072, 8, 1),
        (None, 7, 100, 8, 7),
        (None, 17, 100, 8, 16),
        (1000, 4, 100, 1, 4),
        (1000, 40, 100, 1, 10),
        (1000, None, 100, 3, 9),
    ],
)
def test_rows_a_batch(max_tokens: int | None, batch_size: int | None, block: int, multiple: int, rows: int) -> None:
    assert rows_per_batch(max_tokens, batch_size, block, multiple) == rows


def test_a_block_that_does_not_fit_names_both_flags() -> None:
    with user_error("--max-tokens 100: a block has 128 tokens; .* --tokens-per-sample"):
        rows_per_batch(100, None, 128)
    with user_error("--max-tokens 100: a block has 128 tokens; .* --tokens-per-sample"):
        by_size([5, 128, 7], max_tokens=100)


def test_a_batch_without_limit_is_refused() -> None:
    with user_error("--max-tokens or --batch-size"):
        rows_per_batch(None, None, 128)


@given(blocks=st.integers(0, 60), rows=st.integers(1, 7), world=worlds, epoch=epochs, shuffle=st.booleans())
def test_every_block_is_read_once_over_all_ranks(blocks: int, rows: int, world: int, epoch: int, shuffle: bool) -> None:
    samplers = [uniform(blocks, rows, shuffle=shuffle, rank=rank, world_size=world) for rank in range(world)]
    batches = [read(sampler, epoch) for sampler in samplers]
    assert sorted(block for rank in batches for batch in rank for block in batch) == list(range(blocks))
    assert {len(rank) for rank in batches} == {len(samplers[0])}
    assert all(len(batch) <= rows for rank in batches for batch in rank)


@given(blocks=st.integers(0, 60), rows=st.integers(1, 5), world=worlds, epoch=epochs)
def test_processes_together_read_what_one_reads(blocks: int, rows: int, world: int, epoch: int) -> None:
    ranks = [read(uniform(blocks, rows, rank=rank, world_size=world), epoch) for rank in range(world)]
    together: list[list[int]] = [sum(step, []) for step in zip(*ranks, strict=True)]
    assert together == read(uniform(blocks, rows * world), epoch)
    single = read(uniform(blocks, rows), epoch)  # with `world` batches an update
    assert together == [sum(single[i : i + world], []) for i in range(0, len(single), world)]


def permutation(seed: int, epoch: int, count: int = 20) -> list[int]:
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    order: list[int] = np.random.RandomState(bits).permutation(count).tolist()
    return order


def test_order_is_that_of_seed_and_epoch_0_up_to_the_curriculum_then_of_seed_and_epoch() -> None:
    sampler = uniform(20, 20, seed=7, curriculum=2)
    assert read(sampler, 1) == read(sampler, 2) == [permutation(7, 0)]
    assert read(sampler, 3) == [permutation(7, 3)]
    assert read(sampler, 4) == [permutation(7, 4)]


def test_a_run_of_1_0_keeps_its_order() -> None:
    """It adds seed and epoch, and cuts blocks of many sizes into batches, which it permutes."""
    saved = EpochLayout("blocks", 20, 20, 1, 8, seed=7)
    sampler = uniform(20, 20, seed=7, curriculum=2).continuing(saved)
    former = [np.random.RandomState(seed).permutation(20).tolist() for seed in (7, 10, 11)]
    assert [read(sampler, epoch) for epoch in (2, 3, 4)] == [[order] for order in former]
    assert sampler.layout == saved
    cut = by_size(list(range(1, 21)), batch_size=4, seed=7).continuing(EpochLayout("batches", 5, 1, 1, 20, seed=7))
    order = np.random.RandomState(7 + 3).permutation(5)
    assert read(cut, 3) == [[4 * batch + row for row in range(4)] for batch in order]


@pytest.mark.parametrize(
    "order",
    [
        lambda seed, epoch: read(uniform(30, 30, seed=seed), epoch),
        lambda seed, epoch: read(by_size(list(range(1, 31)), batch_size=1, seed=seed), epoch),
        lambda seed, epoch: read(by_size(list(range(1, 31)), max_tokens=30, seed=seed), epoch),
        lambda seed, epoch: read(StreamSampler(30, 1, passage=1, seed=seed), epoch),
    ],
)
def test_each_seed_and_epoch_has_an_order_of_its_own(order: Any) -> None:
    """With sums of the two, epoch 3 of seed 1 is epoch 1 of seed 3."""
    orders = {str(order(seed, epoch)) for seed in range(1, 6) for epoch in range(1, 6)}
    assert len(orders) == 25


def test_without_shuffling_the_order_is_the_corpus() -> None:
    assert read(uniform(7, 3, shuffle=False), 5) == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_large_seed_is_no_problem() -> None:
    assert sorted(sum(read(uniform(9, 2, seed=2**32 - 1), 3), [])) == list(range(9))


sizes = st.lists(st.integers(1, 30), max_size=40)


@given(
    sizes=sizes,
    max_tokens=st.integers(30, 90),
    batch_size=st.none() | st.integers(1, 9),
    multiple=st.integers(1, 4),
    world=worlds,
    epoch=epochs,
    shuffle=st.booleans(),
)
def test_by_size_every_block_is_read_once_in_batches_that_fit(
    sizes: list[int], max_tokens: int, batch_size: int | None, multiple: int, world: int, epoch: int, shuffle: bool
) -> None:
    how = {"max_tokens": max_tokens, "batch_size": batch_size, "multiple": multiple, "shuffle": shuffle}
    samplers = [by_size(sizes, rank=rank, world_size=world, **how) for rank in range(world)]
    batches = [read(sampler, epoch) for sampler in samplers]
    assert sorted(block for rank in batches for batch in rank for block in batch) == list(range(len(sizes)))
    assert {len(rank) for rank in batches} == {len(samplers[0])}
    for batch in (batch for rank in batches for batch in rank if batch):
        assert len(batch) * max(sizes[block] for block in batch) <= max_tokens
        assert batch_size is None or len(batch) <= batch_size


@given(sizes=sizes, rows=st.integers(1, 5), world=worlds, epoch=epochs, more=st.sampled_from([1, 2]))
def test_by_size_processes_together_read_what_one_reads(
    sizes: list[int], rows: int, world: int, epoch: int, more: int
) -> None:
    """Where the size of batches is a number of rows, with *more* batches an update or not."""

    def updates(*ranks: BlockSampler) -> list[list[int]]:
        batches = [read(rank, epoch) for rank in ranks]
        together: list[list[int]] = [sum(step, []) for step in zip(*batches, strict=True)]
        each = ranks[0].batching.accumulated
        return [sum(together[i : i + each], []) for i in range(0, len(together), each)]

    ranks = [by_size(sizes, batch_size=rows, rank=rank, world_size=world, accumulated=more) for rank in range(world)]
    found = updates(*ranks)
    assert found == updates(by_size(sizes, batch_size=rows * world * more))
    assert found == updates(by_size(sizes, batch_size=rows, accumulated=world * more))
    # The blocks of an update are neighbours by size: they need little padding.
    assert [len(blocks) for blocks in found[:-1]] == [rows * world * more] * (len(found) - 1)
    assert sum(sorted(sorted(sizes[block] for block in blocks) for blocks in found), []) == sorted(sizes)


@given(sizes=sizes, world=worlds, epoch=epochs)
def test_by_size_rank_k_takes_every_kth_batch(sizes: list[int], world: int, epoch: int) -> None:
    one = read(by_size(sizes, max_tokens=60), epoch)
    ranks = [read(by_size(sizes, max_tokens=60, rank=rank, world_size=world), epoch) for rank in range(world)]
    together = [batch for step in zip(*ranks, strict=True) for batch in step]
    assert together[: len(one)] == one and not any(together[len(one) :])


def test_by_size_batches_are_full_and_of_neighbouring_sizes() -> None:
    sampler = by_size([9, 1, 5, 1, 9, 5, 1, 5], max_tokens=15, shuffle=False)
    assert read(sampler) == [[1, 3, 6], [2, 5, 7], [0], [4]]
    assert read(by_size([1] * 7, max_tokens=5, multiple=2, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6]]


def test_by_size_blocks_of_one_size_come_in_a_random_order() -> None:
    first, *others = (read(by_size([5] * 20 + [3] * 20, max_tokens=15, seed=seed, curriculum=1)) for seed in (1, 1, 2))
    assert [other == first for other in others] == [True, False]
    assert {block for batch in first[:4] for block in batch} == set(range(20, 40))


def test_by_size_batches_are_shuffled_after_the_curriculum_only() -> None:
    sampler = by_size(list(range(1, 31)), max_tokens=30, curriculum=2)
    first, second, third, fourth = (read(sampler, epoch) for epoch in (1, 2, 3, 4))
    assert first == second and first == sorted(first)
    assert third != first and fourth not in (first, third)
    assert sorted(third) == sorted(fourth) == first


@given(blocks=st.integers(0, 80), rows=st.integers(1, 6), world=worlds)
def test_stream_every_block_is_read_once_over_all_ranks(blocks: int, rows: int, world: int) -> None:
    samplers = [StreamSampler(blocks, rows, rank=rank, world_size=world) for rank in range(world)]
    batches = [read(sampler) for sampler in samplers]
    assert sorted(block for rank in batches for batch in rank for block in batch) == list(range(blocks))
    assert {len(rank) for rank in batches} == {len(samplers[0])}


@given(blocks=st.integers(1, 80), rows=st.integers(1, 6), world=worlds)
def test_stream_rows_continue_each_other(blocks: int, rows: int, world: int) -> None:
    for rank in range(world):
        batches = read(StreamSampler(blocks, rows, rank=rank, world_size=world))
        for before, after in zip(batches, batches[1:], strict=False):
            assert len(after) <= len(before)
            assert after == [block + 1 for block in before[: len(after)]]


@given(blocks=st.integers(1, 80), rows=st.integers(1, 6), world=worlds)
def test_stream_ranks_read_one_after_the_other_what_one_process_reads(blocks: int, rows: int, world: int) -> None:
    ranks = [read(StreamSampler(blocks, rows, rank=rank, world_size=world)) for rank in range(world)]
    assert [sum(step, []) for step in zip(*ranks, strict=True)] == read(StreamSampler(blocks, rows * world))


def test_stream_rows_divide_the_corpus() -> None:
    assert read(StreamSampler(10, 3)) == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert read(StreamSampler(10, 1, rank=2, world_size=3)) == [[8], [9], [], []]
    assert read(StreamSampler(2, 3)) == [[0, 1]]


@given(blocks=st.integers(1, 80), rows=st.integers(1, 6), world=worlds, passage=st.integers(1, 9), epoch=epochs)
def test_stream_passages_are_the_corpus_in_another_order(
    blocks: int, rows: int, world: int, passage: int, epoch: int
) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        """What one row reads."""
        return sum(read(StreamSampler(blocks, 1, passage=passage, seed=seed), epoch), [])

    whole = blocks // passage
    row = order(5, epoch)
    parts = [row[first : first + passage] for first in range(0, blocks, passage)]
    assert sorted(map(min, parts)) == list(range(0, blocks, passage))
    assert all(part == list(range(part[0], part[0] + len(part))) for part in parts)
    assert not blocks % passage or parts[-1] == list(range(whole * passage, blocks))
    assert read(StreamSampler(blocks, 1, passage=passage, seed=5, curriculum=3), 1) == read(
        StreamSampler(blocks, 1, passage=passage, seed=5, curriculum=3), 3
    )
    assert whole < 20 or len({tuple(order(seed, number)) for seed, number in ((5, 1), (5, 2), (9, 1))}) == 3
    ranks = [StreamSampler(blocks, rows, rank=rank, world_size=world, passage=passage, seed=5) for rank in range(world)]
    plain = StreamSampler(blocks, rows * world)
    expected = [[row[place] for place in step] for step in read(plain)]
    assert [sum(step, []) for step in zip(*(read(rank, epoch) for rank in ranks), strict=True)] == expected


@given(start=st.integers(0, 12), epoch=epochs)
def test_starting_later_skips_batches(start: int, epoch: int) -> None:
    for sampler in (
        uniform(31, 3, rank=1, world_size=2),
        by_size(list(range(1, 31)), max_tokens=60, rank=1, world_size=2),
        StreamSampler(31, 3, rank=1, world_size=2),
        StreamSampler(31, 3, rank=1, world_size=2, passage=4, seed=3),
    ):
        assert read(sampler, epoch, start * sampler.layout.step) == read(sampler, epoch)[start:]


@pytest.mark.parametrize("count", [1, 2, 1000, 70001])
def test_the_permutation_is_numpys(count: int) -> None:
    order = np.concatenate(list(uniform(count, 16, seed=5).epoch(3)))
    assert order.dtype == np.int64
    assert order.tolist() == permutation(5, 3, count)
