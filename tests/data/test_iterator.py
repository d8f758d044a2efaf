"""Epochs of batches: prepared ahead or not, stopped and resumed, they are the same."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import user_error

from fairseq.data.iterator import EpochDatasets, EpochIterator
from fairseq.data.samplers import Batching, BlockSampler, Sampler, StreamSampler
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError


class Stream:
    """A corpus of one line: 0, 1, 2, …"""

    def __init__(self, length: int) -> None:
        self.tokens = np.arange(10, 10 + length).astype(np.uint16)
        self.sizes = np.array([length], np.int32)
        self.offsets = np.array([0, length])


BLOCKS = TokenBlocks(Stream(103), 5, "none", pad=1, eos=2)  # 21 blocks
SAMPLERS = ("shuffled", "streams")


def sampler(kind: str, rank: int = 0, world: int = 1) -> Sampler:
    if kind == "streams":
        return StreamSampler(len(BLOCKS), 2, rank=rank, world_size=world)
    return BlockSampler(BLOCKS.sizes, Batching(10, None, 1, 3, 1, rank=rank, world_size=world), by_size=False)


def ids(sample: dict[str, Any] | None) -> list[int]:
    return [] if sample is None else sample["id"].tolist()


def batches_threads() -> int:
    return sum(thread.name == "batches_0" for thread in threading.enumerate())


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_epochs_are_the_samplers_batches_with_their_tokens(kind: str, prefetch: int) -> None:
    iterator = EpochIterator(EpochDatasets.of_one(BLOCKS, sampler(kind)), prefetch=prefetch)
    expected = [BLOCKS.batch(indices) for epoch in (1, 2) for indices in sampler(kind).epoch(epoch)]
    found = [sample for _ in range(2) for sample in iterator]
    assert len(found) == 2 * len(iterator) == len(expected)
    for sample, right in zip(found, expected, strict=True):
        assert sample is not None
        assert sample["id"].tolist() == right["id"].tolist() and sample["ntokens"] == right["ntokens"]
        assert torch.equal(sample["target"], right["target"])
        assert torch.equal(sample["net_input"]["src_tokens"], right["net_input"]["src_tokens"])


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(SAMPLERS),
    stop=st.integers(0, 30),
    prefetch=st.sampled_from([0, 1, 4]),
    world=st.integers(1, 3),
    data=st.data(),
)
def test_stopping_anywhere_and_resuming_gives_the_remaining_batches(
    kind: str, stop: int, prefetch: int, world: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    whole = EpochIterator(EpochDatasets.of_one(BLOCKS, sampler(kind, rank, world)), prefetch=0)
    expected = [ids(sample) for _ in range(3) for sample in whole]
    stopped = EpochIterator(EpochDatasets.of_one(BLOCKS, sampler(kind, rank, world)), prefetch=prefetch)
    found: list[list[int]] = []
    while len(found) < stop:
        for sample in stopped:
            found.append(ids(sample))
            if len(found) == stop:
                break
    resumed = EpochIterator(EpochDatasets.of_one(BLOCKS, sampler(kind, rank, world)), prefetch=prefetch)
    resumed.load_state_dict(stopped.state_dict())
    while resumed.epoch <= 3:
        found += [ids(sample) for sample in resumed]
    if len(expected) >= stop:
        assert found == expected


@settings(deadline=None, max_examples=30)
@given(kind=st.sampled_from(SAMPLERS), world=st.integers(1, 13), epoch=st.integers(1, 3))
def test_every_block_once_an_epoch_over_all_ranks(kind: str, world: int, epoch: int) -> None:
    seen: list[int] = []
    lengths = set()
    for rank in range(world):
        iterator = EpochIterator(EpochDatasets.of_one(BLOCKS, sampler(kind, rank, world)), prefetch=0)
        iterator.load_state_dict({"epoch": epoch, "iterations_in_epoch": 0})
        batches = list(iterator)
        lengths.add(len(batches))
        seen += [block for sample in batches for block in ids(sample)]
    assert sorted(seen) == list(range(len(BLOCKS)))
    assert len(lengths) == 1


def test_the_place_counts_what_was_yielded_not_what_was_prepared() -> None:
    prepared: list[int] = []

    def prepare(sample: dict[str, Any], epoch: int) -> dict[str, Any]:
        prepared.append(sample["id"][0].item())
        return sample

    iterator = EpochIterator(EpochDatasets.of_one(BLOCKS, sampler("shuffled")), prepare=prepare, prefetch=4)
    batches = iter(iterator)
    next(batches)
    deadline = time.monotonic() + runs.TIMEOUT
    while len(prepared) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(prepared) >= 4
    state = iterator.state_dict()
    assert state.pop("read")["count"] == 2
    assert state == {"version": 2, "epoch": 1, "iterations_in_epoch": 1, "shuffle": True}


@pytest.mark.parametrize("prefetch", [1, 3])
def test_no_more_batches_are_prepared_than_asked_for(prefetch: int) -> None:
    most = 1 + prefetch + 1  # the one that was taken, those in the queue, and one that waits for room
    prepared: list[int] = []
    full, overrun = threading.Event(), threading.Event()

    def prepare(sample: dict[str, Any], epoch: int) -> dict[str, Any]:
        prepared.append(epoch)
        if len(prepared) == most:
            full.set()
        if len(prepared) > most:
            overrun.set()
        return sample

    batches = iter(EpochIterator(EpochDatasets.of_one(BLOCKS, sampler("streams")), prepare=prepare, prefetch=prefetch))
    next(batches)
    assert full.wait(runs.TIMEOUT)
    assert not overrun.wait(0.2), "the queue is full"
    batches.close()  # type: ignore[attr-defined]


def test_the_epoch_ends_when_more_is_asked_for() -> None:
    iterator = EpochIterator(EpochDatasets.of_one(BLOCKS, sampler("streams")))
    batches = iter(iterator)
    for _ in range(len(iterator)):
        assert not iterator.end_of_epoch
        next(batches)
    assert iterator.end_of_epoch and (iterator.epoch, iterator.iterations_in_epoch) == (1, 11)
    state = iterator.state_dict()
    with pytest.raises(StopIteration):
        next(batches)
    assert not iterator.end_of_epoch and (iterator.epoch, iterator.iterations_in_epoch) == (2, 0)
    resumed = EpochIterator(EpochDatasets.of_one(BLOCKS, sampler("streams")))
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.iterations_in_epoch) == (2, 0)


def test_a_place_behind_the_end_is_the_next_epochs_start() -> None:
    iterator = EpochIterator(EpochDatasets.of_one(BLOCKS, sampler("streams")))
    iterator.load_state_dict({"version": 1, "epoch": 4, "iterations_in_epoch": 131, "shuffle": True})
    assert (iterator.epoch, iterator.iterations_in_epoch) == (5, 0)


@pytest.mark.parametrize("state", [{}, {"epoch": "two"}, {"epoch": 2, "iterations_in_epoch": -1}, {"epoch": None}])
def test_a_state_that_is_no_place_is_refused(state: dict[str, Any]) -> None:
    with user_error("--reset-dataloader"):
        EpochIterator(EpochDatasets.of_one(BLOCKS, sampler("streams"))).load_state_dict(state)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_prepare_is_told_the_epoch_of_the_batch(prefetch: int) -> None:
    iterator = EpochIterator(
        EpochDatasets.of_one(BLOCKS, sampler("streams")),
        prepare=lambda sample, epoch: sample | {"epoch": epoch},
        prefetch=prefetch,
    )
    for epoch in (1, 2, 3):
        assert {sample["epoch"] for sample in iterator if sample is not None} == {epoch}


def test_an_empty_batch_is_none_and_not_prepared() -> None:
    last = StreamSampler(21, 2, rank=5, world_size=6)
    found = list(
        EpochIterator(EpochDatasets.of_one(BLOCKS, last), prepare=lambda sample, epoch: sample | {"seen": True})
    )
    assert [ids(sample) for sample in found] == [list(batch) for batch in last.epoch(1)]
    assert found[-1] is None


@pytest.mark.parametrize("prefetch", [0, 2])
def test_prepare_runs_in_the_background_only_when_prefetching(prefetch: int) -> None:
    def prepare(sample: dict[str, Any], epoch: int) -> dict[str, Any]:
        return sample | {"thread": threading.current_thread().name}

    iterator = EpochIterator(EpochDatasets.of_one(BLOCKS, sampler("streams")), prepare=prepare, prefetch=prefetch)
    names = {sample["thread"] for sample in iterator if sample}
    assert names == ({"batches_0"} if prefetch else {threading.current_thread().name})


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_exception_in_prepare_reaches_the_consumer_after_the_batches_before_it(prefetch: int) -> None:
    def prepare(sample: dict[str, Any], epoch: int) -> dict[str, Any]:
        if 4 in sample["id"]:
            raise UserError("broken")
        return sample

    before = []
    with pytest.raises(UserError, match="broken"):
        for sample in EpochIterator(
            EpochDatasets.of_one(BLOCKS, sampler("streams")), prepare=prepare, prefetch=prefetch
        ):
            before.append(ids(sample))
    assert before == [[0, 11], [1, 12], [2, 13], [3, 14]]
    assert batches_threads() == 0


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_the_thread_ends_when_the_consumer_stops_early(taken: int) -> None:
    batches = iter(EpochIterator(EpochDatasets.of_one(BLOCKS, sampler("streams")), prefetch=2))
    for _ in range(taken):
        next(batches)
    assert batches_threads() == (1 if taken else 0)
    batches.close()  # type: ignore[attr-defined]
    assert batches_threads() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_come_out_on_the_device_and_numbers_stay_numbers() -> None:
    iterator = EpochIterator(
        EpochDatasets.of_one(BLOCKS, sampler("streams")),
        prepare=lambda s, epoch: s | {"more": [s["id"] + 1]},
        device="cuda",
    )
    for sample, indices in zip(iterator, sampler("streams").epoch(1), strict=True):
        assert sample is not None
        right = BLOCKS.batch(indices)
        assert sample["target"].is_cuda and torch.equal(sample["target"].cpu(), right["target"])
        assert sample["net_input"]["src_tokens"].is_cuda and sample["more"][0].is_cuda
        assert type(sample["ntokens"]) is int
