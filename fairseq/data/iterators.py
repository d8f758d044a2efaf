"""``fairseq.data.iterators``: batches of a dataset, epoch after epoch, in fairseq's order."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from fairseq.data.position import BATCHES, EpochLayout
from fairseq.data.samplers import Batching


class CountingIterator:
    """An iterator that counts its items: *n* so far, *start* included, of *total*.

    Raises:
        IndexError: the items end before *total*.
    """

    def __init__(self, iterable: Iterable[object], start: int | None = None, total: int | None = None) -> None:
        self.iterable = iterable
        # An iterator around another goes on counting where that one stands.
        self.n: int = getattr(iterable, "n", 0) if start is None else start
        items: Any = iterable
        self.total: int = self.n + len(items) if total is None else total
        self._items = iter(iterable)

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.has_next():
            raise StopIteration
        try:
            item = next(self._items)
        except StopIteration:
            raise IndexError(f"the items ended after {self.n}, expected {self.total}") from None
        self.n += 1
        return item

    def has_next(self) -> bool:
        return self.n < self.total

    def skip(self, num_to_skip: int) -> CountingIterator:
        for _ in itertools.islice(self, num_to_skip):
            pass
        return self

    def take(self, n: int) -> CountingIterator:
        """End after *n* items, those before this iterator's start included."""
        self.total = min(self.total, n)
        # Of items that are prepared ahead no more than are left are to be made.
        if hasattr(self.iterable, "take"):
            self.iterable.take(max(n - self.n, 0))
        return self


class BufferedIterator:
    """The items of *iterable*; none are prepared ahead, whatever the *size*."""

    def __init__(self, size: int, iterable: Iterable[object]) -> None:
        self._items, self.total = iter(iterable), len(iterable)  # type: ignore[arg-type]
        self.start, self.n = getattr(iterable, "n", 0), 0

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.n >= self.total:
            raise StopIteration
        self.n += 1
        return next(self._items)

    def take(self, n: int) -> BufferedIterator:
        self.total = min(self.total, n)
        return self


class GroupedIterator(CountingIterator):
    """Lists of *chunk_size* items; with *skip_remainder_batch* without a last shorter one."""

    def __init__(self, iterable: Any, chunk_size: int, skip_remainder_batch: bool = False) -> None:
        items, left = iter(iterable), len(iterable) - getattr(iterable, "n", 0)
        count = left // chunk_size if skip_remainder_batch else math.ceil(left / chunk_size)
        groups = (list(itertools.islice(items, chunk_size)) for _ in range(count))
        start = math.ceil(getattr(iterable, "n", 0) / chunk_size)
        super().__init__(groups, start, start + count)
        self.chunk_size = chunk_size


class ShardedIterator(CountingIterator):
    """Every *num_shards*-th item, from *shard_id* on; all shards are equally long, filled with
    *fill_value*.

    With *skip_remainder_batch* items are left out instead.
    """

    def __init__(
        self,
        iterable: Sequence[object],
        num_shards: int,
        shard_id: int,
        fill_value: object = None,
        skip_remainder_batch: bool = False,
    ) -> None:
        if not 0 <= shard_id < num_shards:
            raise ValueError("shard_id must be between 0 and num_shards")
        # Equally long, because every process takes part in the reduction of each update.
        extra = len(iterable) % num_shards
        items = [*iterable, *[fill_value] * (-len(iterable) % num_shards)]
        if skip_remainder_batch:
            items = items[: len(iterable) - extra]
        super().__init__(items[shard_id::num_shards], 0)


class EpochBatchIterating:
    """Base of iterators over epochs, for ``isinstance``."""


class EpochBatchIterator(EpochBatchIterating):
    """The batches of *batch_sampler*, in a new order each epoch, for one of *num_shards* processes.

    Batches are made when they are asked for: *num_workers*, *buffer_size* and *timeout* have no
    effect.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Sequence[Any]], Any],
        batch_sampler: Sequence[Sequence[int]] | Callable[..., Any],
        seed: int = 1,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        buffer_size: int = 0,
        timeout: int = 0,
        disable_shuffling: bool = False,
        skip_remainder_batch: bool = False,
        grouped_shuffling: bool = False,
        reuse_dataloader: bool = False,
    ) -> None:
        self.dataset, self.collate_fn, self.seed, self.epoch = dataset, collate_fn, seed, max(epoch, 1)
        self.batch_sampler = batch_sampler
        self._batches = None if callable(batch_sampler) else tuple(batch_sampler)
        self.num_shards, self.shard_id, self.num_workers = num_shards, shard_id, num_workers
        self.shuffle = self.shuffles = not disable_shuffling
        self.skip_remainder_batch, self.grouped_shuffling = skip_remainder_batch, grouped_shuffling
        self._current: CountingIterator | None = None
        # Batches to leave out in the next epoch: set by a saved state, and used once.
        self._start = 0

    @property
    def frozen_batches(self) -> tuple[Sequence[int], ...]:
        """The batches of all processes, in the order in which they were made."""
        if self._batches is None:
            self._batches = tuple(self.batch_sampler(self.dataset, self.epoch))  # type: ignore[operator]
        return self._batches

    @property
    def first_batch(self) -> Any:
        if not self.frozen_batches:
            raise ValueError("the dataset is empty, or all examples are longer than the model's positions")
        return self.collate_fn([self.dataset[i] for i in self.frozen_batches[0]])

    def __len__(self) -> int:
        return math.ceil(len(self.frozen_batches) / self.num_shards)

    @property
    def n(self) -> int:
        return self.iterations_in_epoch

    @property
    def next_epoch_idx(self) -> int:
        """The number of the epoch that :meth:`next_epoch_itr` reads."""
        return self.epoch + self.end_of_epoch()

    @property
    def iterations_in_epoch(self) -> int:
        """Batches of the epoch that were read."""
        return self._current.n if self._current is not None else self._start

    def next_epoch_itr(
        self, shuffle: bool = True, fix_batches_to_gpus: bool = False, set_dataset_epoch: bool = True
    ) -> CountingIterator:
        """The batches of the next epoch; after :meth:`load_state_dict` the rest of the one that was
        saved."""
        shuffle = shuffle and self.shuffles
        self.epoch, self.shuffle = self.next_epoch_idx, shuffle
        start, self._start = self._start, 0
        if set_dataset_epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        if callable(self.batch_sampler):
            # Such a dataset makes other batches in every epoch.
            self._batches = None
        ordered, skip = self.ordered(self.epoch, shuffle), self.skip_remainder_batch
        shard = list(ShardedIterator(ordered, self.num_shards, self.shard_id, fill_value=[]))
        if skip:
            # As in fairseq, the last batch is left out whether it is shorter or not.
            shard = shard[:-1]
        samples = (self.collate_fn([self.dataset[i] for i in batch]) if len(batch) else {} for batch in shard[start:])
        self._current = CountingIterator(samples, start, len(shard))
        return self._current

    def ordered(self, epoch: int, shuffle: bool) -> list[Sequence[int]]:
        """The batches of an epoch, for all processes."""
        batches = list(self.frozen_batches)
        if shuffle and self.shuffles:
            # numpy's former generator: the order must be fairseq's for the same seed.
            np.random.RandomState((self.seed + epoch) % 2**32).shuffle(batches)
        return batches

    def end_of_epoch(self) -> bool:
        return self._current is not None and not self._current.has_next()

    def state_dict(self) -> dict[str, object]:
        # At the end of an epoch the state is the beginning of the next: a resumed run would
        # otherwise begin with no batch.
        read = 0 if self.end_of_epoch() else self.iterations_in_epoch
        return {"version": 2, "epoch": self.next_epoch_idx, "iterations_in_epoch": read, "shuffle": self.shuffle}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the position of *state_dict*; one at the end of its epoch is the beginning of the
        next."""
        self.epoch, start = state_dict["epoch"], state_dict.get("iterations_in_epoch", 0)
        self._current, self._start = None, start
        if start >= len(self) > 0:
            self.epoch, self._start = self.epoch + (state_dict.get("version", 1) == 1), 0


class IteratorSampler:
    """The batches of *iterator*, of a task's ``get_batch_iterator``, as a
    :class:`~fairseq.data.samplers.Sampler`."""

    rows = 0

    def __init__(self, iterator: EpochBatchIterator, batching: Batching) -> None:
        self.iterator, self.batching, self.shuffle = iterator, batching, batching.shuffle
        batches = iterator.frozen_batches
        ends = np.cumsum([len(batch) for batch in batches])
        # A checksum of the batches: a resumed run must not take others for those that it has read.
        world, seed = batching.world_size, iterator.seed if self.shuffle else 0
        count = max(-(-len(ends) // world) - 1, 0) * world if iterator.skip_remainder_batch else len(ends)
        self.layout = EpochLayout(BATCHES, count, world, world, 0, zlib.crc32(ends.tobytes()), seed)

    def __len__(self) -> int:
        return self.layout.batches

    def continuing(self, saved: EpochLayout) -> IteratorSampler:
        """Return this sampler: its order is fairseq's in every run."""
        return self

    def epoch(self, epoch: int, read: int = 0) -> Iterator[np.ndarray]:
        """The examples of each of this rank's batches of an epoch, once *read* batches were
        read."""
        batching = self.batching
        batches = self.iterator.ordered(epoch, self.shuffle and epoch > batching.curriculum)
        for number in range(read + batching.rank, len(self) * batching.world_size, batching.world_size):
            # A process whose share is one batch shorter takes part in the last reduction with an
            # empty one.
            yield np.asarray(batches[number] if number < len(batches) else [], np.int64)
