"""The examples of each batch, on each process.

Samplers hold numbers only. An epoch's batches follow from the epoch's number, so that any of them
can be had again. Every block is read once an epoch. Positions in it are counted over all processes,
see :mod:`fairseq.data.position`.
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fairseq.data.position import BATCHES, BLOCKS, NUMPY, SEQUENCE, STREAMS, SUM, EpochLayout, order_generator
from fairseq.errors import UserError


class Sampler(Protocol):
    """The batches of one process (*rank*) of several. Every rank has the same number of batches;
    some may be empty.

    Attributes:
        shuffle: whether the order is random.
        rows: rows of a full batch on one rank, where rows continue from batch to batch; 0 where
            they are unrelated.
    """

    shuffle: bool
    rows: int

    @property
    def layout(self) -> EpochLayout:
        """Units of an epoch, to find positions in it."""

    def __len__(self) -> int:
        """Batches an epoch."""

    def epoch(self, epoch: int, read: int = 0) -> Iterator[np.ndarray]:
        """The blocks of each batch of an epoch (numbered
        from 1), once *read* units of it were read."""

    def continuing(self, saved: EpochLayout) -> Sampler:
        """Return the sampler in whose order a run goes on that stored the layout *saved*."""


@dataclass(frozen=True)
class Batching:
    """Limits and order of the batches of a split, on one of several processes."""

    # See :func:`rows_per_batch`, for *multiple* and *limit*, too.
    max_tokens: int | None
    batch_size: int | None
    multiple: int = 1
    seed: int = 1  # of the order
    curriculum: int = 0  # up to this epoch the order is the same in every epoch; batches that are cut once go by size
    shuffle: bool = True  # whether the order is random; otherwise it is the corpus's
    # This process, of how many.
    rank: int = 0
    world_size: int = 1
    limit: str = "`max_tokens`"
    accumulated: int = 1  # most batches of an update on one process

    def blocks(self, sizes: np.ndarray, *, by_size: bool, selection: np.ndarray | None = None) -> BlockSampler:
        """Return the sampler of independent examples of *sizes* [n], see :class:`BlockSampler`."""
        return BlockSampler(sizes, self, by_size=by_size, selection=selection)

    def streams(self, num_blocks: int, block_size: int, passage: int = 0) -> StreamSampler:
        """Return the sampler of *num_blocks* blocks of *block_size* tokens whose rows continue from
        batch to batch; if the order is random, in passages of so many blocks."""
        ranks = {"rank": self.rank, "world_size": self.world_size}
        passage = passage if self.shuffle else 0
        rows = self.rows(block_size)
        order = {"passage": passage, "seed": self.seed, "curriculum": self.curriculum}
        return StreamSampler(num_blocks, rows, block_size=block_size, **ranks, **order)

    def rows(self, block_size: int) -> int:
        """Rows of *block_size* tokens that fit in a batch; see :func:`rows_per_batch`."""
        return rows_per_batch(self.max_tokens, self.batch_size, block_size, self.multiple, self.limit)


def rows_per_batch(
    max_tokens: int | None, batch_size: int | None, block_size: int, multiple: int = 1, limit: str = "`max_tokens`"
) -> int:
    """Rows of *block_size* tokens that fit in a batch.

    Args:
        max_tokens: most tokens, padding counted; None: no limit.
        batch_size: most rows; None: no limit.
        multiple: from this many rows on, the number is rounded down to a multiple of it.
        limit: flag that *max_tokens* was given by.

    Raises:
        UserError: no limit is given, or a single row does not fit.
    """
    limits = [batch_size] if batch_size is not None else []
    if max_tokens is not None:
        if block_size > max_tokens:
            raise UserError(
                f"{limit} {max_tokens}: a block has {block_size} tokens; raise {limit} or lower `tokens_per_sample`"
            )
        limits.append(max_tokens // max(1, block_size))
    if not limits:
        raise UserError("`max_tokens` or `batch_size`: one of them is needed")
    rows = min(limits)
    return rows - rows % multiple if rows >= multiple else rows


class BlockSampler:
    """Batches of independent blocks.

    They are put in an order, a new one each epoch, and a step's global batch is a run of
    ``rows × world_size`` of them, divided among the ranks. So N processes with B rows read the same
    as one process with N·B rows, or with B rows and N batches per update.

    Blocks of many sizes (*by_size* true) are sorted by size first, ties in a random order, and put
    in order in groups of as many as an update reads, so that they need little padding. A group that
    is not full comes last.

    That is so in training where the size of batches is a number of rows. Where *max_tokens* limits
    it, and in validation, blocks of many sizes are cut once into batches that hold at most
    *max_tokens* with padding. Each epoch takes the batches in a new order, and rank k every
    *world_size*-th of them, from the k-th on. So N processes read the same as one with N batches
    per update. A run that version 1.0 began goes on so with rows, too.

    A run whose checkpoint has no layout continues in *NumPy's order*, so that its next losses are
    fairseq's: one permutation of all blocks, drawn from the seed; too long ones leave it; sorting
    by size, ties by the permutation's values; batches are cut once, whether blocks have one size or
    not, and shuffled with seed + epoch (not up to ``--curriculum``).

    Args:
        sizes: tokens of each block.
        batching: limits and order.
        by_size: whether they are sorted by size.
        selection: bool [blocks before too long ones were left out]:
            which of them *sizes* are; None: all.
        saved: the layout of a checkpoint, whose order is kept; None: that of a new run.

    Raises:
        UserError: a block is longer than *max_tokens*, or batches have no limit.
    """

    rows = 0

    def __init__(
        self,
        sizes: np.ndarray,
        batching: Batching,
        *,
        by_size: bool,
        selection: np.ndarray | None = None,
        saved: EpochLayout | None = None,
    ) -> None:
        longest = int(sizes.max(initial=0))
        self.batching = batching
        self.by_size = by_size
        self.shuffle = batching.shuffle
        self.rank = batching.rank
        self._sizes = sizes
        self._selection = selection
        self._rows = batching.rows(longest)
        self._sorted: np.ndarray | None = None
        self._cuts: np.ndarray | None = None
        step = self._rows * batching.world_size
        self.layout = EpochLayout(
            BLOCKS,
            units=len(sizes),
            step=step,
            processes=batching.world_size,
            block_size=longest,
            seed=batching.seed if batching.shuffle else 0,
            rule=SEQUENCE if saved is None else saved.rule,
        )
        most, tokens = batching.batch_size, batching.max_tokens
        limited_by_rows = most is not None and (tokens is None or most * longest <= tokens)
        if saved is not None and saved.order == NUMPY:
            self._cut(NUMPY, self._sorted_as_numpy())
        elif by_size:
            order = self._permutation(len(sizes), epoch=0)
            self._sorted = order[np.argsort(sizes[order], kind="stable")]
            if limited_by_rows and self.shuffle and self.layout.rule != SUM:
                # The group stays when a run goes on with another number of processes.
                group = saved.cut if saved is not None and saved.order == BLOCKS else 0
                self.layout = dataclasses.replace(self.layout, cut=group or step * batching.accumulated)
            else:
                self._cut(BATCHES, self._sorted)

    def __len__(self) -> int:
        return self.layout.batches

    def epoch(self, epoch: int, read: int = 0) -> Iterator[np.ndarray]:
        """The blocks of each of this rank's batches of an epoch,
        once *read* blocks or batches were read."""
        if self._cuts is None:
            order = self._order(epoch)
            for first in range(read, len(order), self._rows * self.batching.world_size):
                # The ranks' parts of one global batch lie side by side: rank order is the order of
                # one large batch.
                first += self.rank * self._rows
                yield order[first : first + self._rows].astype(np.int64)
            return
        assert self._sorted is not None
        count = len(self._cuts) - 1
        order = self._permutation(count, epoch) if epoch > self.batching.curriculum else np.arange(count)
        for start in range(read, count, self.batching.world_size):
            number = start + self.rank
            first, last = self._cuts[order[number] :][:2] if number < count else (0, 0)
            yield self._sorted[first:last].astype(np.int64)

    def continuing(self, saved: EpochLayout) -> BlockSampler:
        """Return a sampler with the same limits in the order of a run that stored *saved*."""
        if dataclasses.replace(saved, step=self.layout.step, processes=self.layout.processes) == self.layout:
            return self
        return BlockSampler(self._sizes, self.batching, by_size=self.by_size, selection=self._selection, saved=saved)

    def _sorted_as_numpy(self) -> np.ndarray:
        """All blocks as fairseq sorts them."""
        selection = np.ones(len(self._sizes), bool) if self._selection is None else self._selection
        values = np.arange(len(selection))
        if self.shuffle:
            # NumPy's old generator, whose permutations are fairseq's; it takes seeds of 32 bits.
            values = np.random.RandomState(self.batching.seed % 2**32).permutation(len(selection))
        return np.lexsort((values[selection], self._sizes))

    def _cut(self, order: str, blocks: np.ndarray) -> None:
        """Cut *blocks*, in an order of rising sizes, into batches."""
        self._sorted = blocks
        self._cuts = _cut_by_size(self._sizes, blocks, self.batching)
        self.layout = dataclasses.replace(
            self.layout,
            order=order,
            units=len(self._cuts) - 1,
            step=self.batching.world_size,
            # By this number a resumed run knows whether its batches are cut as the saved ones were.
            cut=zlib.crc32(self._cuts.tobytes()),
        )

    def _order(self, epoch: int) -> np.ndarray:
        """All blocks in the order of *epoch*."""
        if self._sorted is None:
            return self._permutation(len(self._sizes), epoch)
        groups, rest = divmod(len(self._sorted), self.layout.cut)
        numbers = self._permutation(groups + 1, epoch) if epoch > self.batching.curriculum else np.arange(groups + 1)
        # The group that is not full comes last, so that groups begin where updates do. Which blocks
        # it has is random: it is the one at place *short* of the sizes.
        short = int(numbers[-1])
        shorter = slice(short * self.layout.cut, short * self.layout.cut + rest)
        full = np.delete(self._sorted, shorter).reshape(groups, self.layout.cut)
        return np.concatenate([full[numbers[:-1] - (numbers[:-1] > short)].ravel(), self._sorted[shorter]])

    def _permutation(self, count: int, epoch: int) -> np.ndarray:
        # 4 bytes a block where they suffice: large corpora have many millions.
        order = np.arange(count, dtype=np.int32 if count <= np.iinfo(np.int32).max else np.int64)
        if self.shuffle:
            epoch = epoch if epoch > self.batching.curriculum else 0
            # `shuffle` in place gives the same order
            # as `permutation(count)`, without a second array.
            order_generator(self.layout.rule, self.batching.seed, epoch).shuffle(order)
        return order


def _cut_by_size(sizes: np.ndarray, blocks: np.ndarray, batching: Batching) -> np.ndarray:
    """Return where each batch begins in *blocks*, which are in an order of rising *sizes*, and at
    the end their number.

    As many rows as fit, rounded down to a multiple (see :func:`rows_per_batch`) except in the last
    batch, which takes the rest.
    """
    cuts = [0]
    while cuts[-1] < len(blocks):
        first = cuts[-1]
        most = rows_per_batch(batching.max_tokens, batching.batch_size, int(sizes[blocks[first]]))
        candidates = sizes[blocks[first : first + most]]
        rows = len(candidates)
        if batching.max_tokens is not None:
            # Sizes rise, so that n rows take n times the size of the last of them, padding counted.
            fitting = candidates * np.arange(1, rows + 1, dtype=np.int64) <= batching.max_tokens
            rows = int(np.count_nonzero(fitting))
        if first + rows < len(blocks) and rows >= batching.multiple:
            rows -= rows % batching.multiple
        cuts.append(first + rows)
    return np.array(cuts, dtype=np.int64)


class StreamSampler:
    """Batches whose rows continue each other from step to step: what a model with memory reads.

    The blocks are divided among ``rows × world_size`` rows, m = ceil(blocks
    / that) each: row r reads blocks r·m, r·m + 1, …, in order,
    and the batch of step t holds the t-th block of each row. Exhausted rows are dropped
    from the end of the batch; near the end of an epoch a rank may have none.

    With *passage*, blocks are numbered in another order than the corpus's: passages of so many
    blocks come in a random one, a new one each epoch; what fills no passage comes last.

    Args:
        num_blocks: blocks of the corpus.
        rows: rows on one rank.
        block_size: tokens a block.
        passage: blocks; 0: all.
        seed: of the order of passages.
        curriculum: up to this epoch their order is the same.
    """

    def __init__(
        self,
        num_blocks: int,
        rows: int,
        *,
        block_size: int = 0,
        rank: int = 0,
        world_size: int = 1,
        passage: int = 0,
        seed: int = 0,
        curriculum: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.rows = rows
        self.rank = rank
        self.world_size = world_size
        self.passage = passage
        self.seed = seed
        self.curriculum = curriculum
        self.shuffle = passage > 0
        # Processes may share the rows in another way, but there must be as many in all.
        self.layout = EpochLayout(
            STREAMS,
            units=len(self),
            step=1,
            processes=world_size,
            block_size=block_size,
            cut=rows * world_size,
            seed=seed if self.shuffle else 0,
            passage=passage,
            rule=SEQUENCE,
        )

    def __len__(self) -> int:
        # Rounded up: the last row may be shorter, but no block is left out.
        return -(-self.num_blocks // (self.rows * self.world_size))

    def continuing(self, saved: EpochLayout) -> StreamSampler:
        """Return a sampler of the same rows in the order of a run that stored *saved*."""
        sampler = copy.copy(self)
        sampler.layout = dataclasses.replace(self.layout, rule=saved.rule)
        return sampler

    def epoch(self, epoch: int, read: int = 0) -> Iterator[np.ndarray]:
        """The blocks of this rank's rows at each step of an epoch, once *read* steps were made."""
        length = len(self)
        first = self.rank * self.rows
        passages = self._passages(epoch)
        for step in range(read, length):
            present = -(-(self.num_blocks - step) // length)  # rows of all ranks that have a block left
            blocks = np.arange(first, min(first + self.rows, present)) * length + step
            if self.passage:
                number, offset = np.divmod(blocks, self.passage)
                blocks = passages[number] * self.passage + offset
            yield blocks

    def _passages(self, epoch: int) -> np.ndarray:
        """The numbers of the passages in the order of *epoch*, an incomplete one last."""
        count = self.num_blocks // self.passage if self.passage else 0
        epoch = epoch if epoch > self.curriculum else 0
        return np.append(order_generator(self.layout.rule, self.seed, epoch).permutation(count), count)
