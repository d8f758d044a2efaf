"""The examples of each batch, on each process.

Samplers hold numbers only. An epoch's batches follow from the epoch's number, so that any of them can be had again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fairseq.errors import UserError


class Sampler(Protocol):
    """The batches of one process (*rank*) of several; each has equally many, of which some may be empty.

    Attributes:
        shuffle: whether the order is random.
        rows: rows of a full batch on one rank, where rows continue from batch to batch; 0 where they are unrelated.
    """

    shuffle: bool
    rows: int

    def __len__(self) -> int:
        """Batches an epoch."""
        ...

    def epoch(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
        """The blocks of each batch of an epoch (numbered from 1), from batch *start* on."""
        ...


@dataclass(frozen=True)
class Batching:
    """Limits and order of the batches of a split, on one of several processes.

    Attributes:
        max_tokens, batch_size, multiple: see :func:`rows_per_batch`.
        seed, curriculum, shuffle: see :class:`BlockSampler`.
        rank, world_size: this process, of how many.
        limit: flag that *max_tokens* was given by, for error messages.
    """

    max_tokens: int | None
    batch_size: int | None
    multiple: int = 1
    seed: int = 1
    curriculum: int = 0
    shuffle: bool = True
    rank: int = 0
    world_size: int = 1
    limit: str = "--max-tokens"

    def blocks(self, sizes: np.ndarray, *, by_size: bool) -> BlockSampler:
        """Return the sampler of independent examples of *sizes* [n].

        Raises:
            UserError: an example has more tokens than a batch, or batches have no limit.
        """
        self._check(int(sizes.max(initial=0)))
        return BlockSampler(
            sizes,
            max_tokens=self.max_tokens,
            batch_size=self.batch_size,
            multiple=self.multiple,
            seed=self.seed,
            curriculum=self.curriculum,
            shuffle=self.shuffle,
            by_size=by_size,
            rank=self.rank,
            world_size=self.world_size,
        )

    def streams(self, num_blocks: int, block_size: int) -> StreamSampler:
        """Return the sampler of *num_blocks* blocks of *block_size* tokens whose rows continue from batch to batch.

        Raises:
            UserError: a block has more tokens than a batch, or batches have no limit.
        """
        self._check(block_size)
        rows = rows_per_batch(self.max_tokens, self.batch_size, block_size, self.multiple)
        return StreamSampler(num_blocks, rows, rank=self.rank, world_size=self.world_size)

    def _check(self, longest: int) -> None:
        if self.max_tokens is not None and longest > self.max_tokens:
            raise _too_long(longest, self.max_tokens, self.limit)


def rows_per_batch(max_tokens: int | None, batch_size: int | None, block_size: int, multiple: int = 1) -> int:
    """Rows of *block_size* tokens that fit in a batch.

    Args:
        max_tokens: most tokens, padding counted; None: no limit.
        batch_size: most rows; None: no limit.
        multiple: from this many rows on, the number is rounded down to a multiple of it.

    Raises:
        UserError: there is no limit at all, or not one row fits.
    """
    limits = [batch_size] if batch_size is not None else []
    if max_tokens is not None:
        if block_size > max_tokens:
            raise _too_long(block_size, max_tokens)
        limits.append(max_tokens // max(1, block_size))
    if not limits:
        raise UserError("--max-tokens or --batch-size: one of them is needed")
    rows = min(limits)
    return rows - rows % multiple if rows >= multiple else rows


def _too_long(size: int, max_tokens: int, limit: str = "--max-tokens") -> UserError:
    return UserError(f"{limit} {max_tokens}: a block has {size} tokens; raise {limit} or lower --tokens-per-sample")


class BlockSampler:
    """Batches of blocks that have nothing to do with one another.

    Blocks of one size (*by_size* false): they are put in an order, and the global batch of step t is the t-th run of
    ``rows × world_size`` of them, of which each rank takes its part. So N processes with B rows read what one reads
    with N·B rows, or with B rows and N batches an update.

    Blocks of many sizes (*by_size* true): they are sorted by size, ties in the order, and cut into batches that hold
    at most *max_tokens* with padding; rank k takes batch ``t × world_size + k``.

    Args:
        sizes: tokens of each block.
        max_tokens, batch_size, multiple: see :func:`rows_per_batch`.
        seed: of the order.
        curriculum: up to this epoch the order is the same in every epoch; with *by_size*, batches go by size.
        shuffle: whether the order is random; otherwise it is the corpus's.

    Raises:
        UserError: a block is longer than *max_tokens*, or there is no limit to a batch.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        *,
        max_tokens: int | None,
        batch_size: int | None,
        multiple: int,
        seed: int,
        curriculum: int,
        shuffle: bool,
        by_size: bool,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.shuffle = shuffle
        self.rows = 0
        self.seed = seed
        self.curriculum = curriculum
        self.rank = rank
        self.world_size = world_size
        self._blocks = len(sizes)
        self._rows = rows_per_batch(max_tokens, batch_size, int(sizes.max(initial=0)), multiple)
        self._sorted: np.ndarray | None = None
        self._cuts = np.zeros(1, np.int64)
        if by_size:
            order = self._permutation(self._blocks, epoch=0)
            self._sorted = order[np.argsort(sizes[order], kind="stable")]
            self._cuts = _cut_by_size(sizes[self._sorted], max_tokens, batch_size, multiple)

    def __len__(self) -> int:
        if self._sorted is not None:
            return -(-(len(self._cuts) - 1) // self.world_size)
        return -(-self._blocks // (self._rows * self.world_size))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
        """The blocks of each of this rank's batches of an epoch, from batch *start* on."""
        if self._sorted is not None:
            yield from self._batches_by_size(self._sorted, epoch, start)
            return
        order = self._permutation(self._blocks, epoch)
        for step in range(start, len(self)):
            first = (step * self.world_size + self.rank) * self._rows
            yield order[first : first + self._rows]

    def _batches_by_size(self, blocks: np.ndarray, epoch: int, start: int) -> Iterator[np.ndarray]:
        count = len(self._cuts) - 1
        order = self._permutation(count, epoch) if epoch > self.curriculum else np.arange(count)
        for number in range(start * self.world_size + self.rank, len(self) * self.world_size, self.world_size):
            first, last = self._cuts[order[number] :][:2] if number < count else (0, 0)
            yield blocks[first:last]

    def _permutation(self, count: int, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(count)
        seed = self.seed + epoch if epoch > self.curriculum else self.seed
        return np.random.RandomState(seed % 2**32).permutation(count)


def _cut_by_size(sizes: np.ndarray, max_tokens: int | None, batch_size: int | None, multiple: int) -> np.ndarray:
    """Where batches of blocks of rising *sizes* begin, and at the end the number of blocks.

    As many rows as fit, rounded down to a multiple (see :func:`rows_per_batch`) but for the last batch, which takes
    what is left.
    """
    cuts = [0]
    while cuts[-1] < len(sizes):
        first = cuts[-1]
        most = rows_per_batch(max_tokens, batch_size, int(sizes[first]))
        candidates = sizes[first : first + most]
        if max_tokens is not None:
            fitting = candidates * np.arange(1, len(candidates) + 1, dtype=np.int64) <= max_tokens
            candidates = candidates[: int(np.count_nonzero(fitting))]
        rows = len(candidates)
        if first + rows < len(sizes) and rows >= multiple:
            rows -= rows % multiple
        cuts.append(first + rows)
    return np.array(cuts, dtype=np.int64)


class StreamSampler:
    """Batches whose rows continue each other from step to step: what a model with memory reads.

    The corpus is divided among ``rows × world_size`` rows, m = ceil(blocks / that) blocks each: row r reads blocks
    r·m, r·m + 1, …, in order, and the batch of step t holds the t-th block of each row. Blocks run out from the last
    row on, so those present are always the first rows, on every rank; near the end of an epoch a rank may have none.

    Args:
        num_blocks: blocks of the corpus.
        rows: rows on one rank.
    """

    shuffle = False

    def __init__(self, num_blocks: int, rows: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.num_blocks = num_blocks
        self.rows = rows
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return -(-self.num_blocks // (self.rows * self.world_size))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
        """The blocks of this rank's rows at each step of an epoch, from step *start* on."""
        length = len(self)
        first = self.rank * self.rows
        for step in range(start, length):
            present = -(-(self.num_blocks - step) // length)  # rows of all ranks that have a block left
            yield np.arange(first, min(first + self.rows, present)) * length + step
