"""``fairseq.data.iterators``: batches of a dataset, epoch after epoch, for scripts with a loop of their own."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from fairseq.data.position import BATCHES, Layout
from fairseq.data.samplers import Batching


class CountingIterator:
    """An iterator that counts its items: *n* so far, *start* included, of *total*."""

    def __init__(self, iterable: Iterable[Any], start: int | None = None, total: int | None = None) -> None:
        # An iterator around another goes on counting where that one stands.
        self.n = getattr(iterable, "n", 0) if start is None else start
        self.total = self.n + len(iterable) if total is None else total  # type: ignore[arg-type, operator]
        self._items = iter(iterable)

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self.n += 1
        return item

    def has_next(self) -> bool:
        return self.n < self.total

    def skip(self, num_to_skip: int) -> CountingIterator:
        for _ in itertools.islice(self, num_to_skip):
            pass
        return self


class GroupedIterator(CountingIterator):
    """Lists of *chunk_size* items."""

    def __init__(self, iterable: Any, chunk_size: int) -> None:
        items = iter(iterable)
        # An empty list ends them: `iter` with a second argument stops at that value.
        groups = iter(lambda: list(itertools.islice(items, chunk_size)), [])
        super().__init__(groups, -(-getattr(iterable, "n", 0) // chunk_size), -(-len(iterable) // chunk_size))


class ShardedIterator(CountingIterator):
    """Every *num_shards*-th item, from *shard_id* on; all shards are equally long, filled with *fill_value*."""

    def __init__(self, iterable: Sequence[Any], num_shards: int, shard_id: int, fill_value: Any = None) -> None:
        # Equally long, because every process takes part in the reduction of each update.
        filled = [*iterable, *[fill_value] * (-len(iterable) % num_shards)]
        super().__init__(filled[shard_id::num_shards], 0)


class EpochBatchIterator:
    """The batches of *batch_sampler*, in a new order each epoch, for one of *num_shards* processes."""

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
        **unused: Any,
    ) -> None:
        self.dataset, self.collate_fn, self.seed, self.epoch = dataset, collate_fn, seed, max(epoch, 1)
        self.batches = list(batch_sampler(dataset, epoch) if callable(batch_sampler) else batch_sampler)
        self.num_shards, self.shard_id, self.shuffle = num_shards, shard_id, True
        self._current: CountingIterator | None = None
        # Batches to leave out in the next epoch: set by a saved state, and used once.
        self._start = 0

    def __len__(self) -> int:
        return -(-len(self.batches) // self.num_shards)

    @property
    def next_epoch_idx(self) -> int:
        """The number of the epoch that :meth:`next_epoch_itr` reads."""
        return self.epoch + self.end_of_epoch()

    @property
    def iterations_in_epoch(self) -> int:
        """Batches of the epoch that were read."""
        return self._current.n if self._current is not None else self._start

    def next_epoch_itr(self, shuffle: bool = True, **unused: Any) -> CountingIterator:
        """The batches of the next epoch; after :meth:`load_state_dict` the rest of the one that was saved."""
        self.epoch, self.shuffle = self.next_epoch_idx, shuffle
        start, self._start = self._start, 0
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        shard = list(ShardedIterator(self.ordered(self.epoch, shuffle), self.num_shards, self.shard_id, fill_value=[]))
        samples = (self.collate_fn([self.dataset[i] for i in batch]) if len(batch) else {} for batch in shard[start:])
        self._current = CountingIterator(samples, start, len(shard))
        return self._current

    def ordered(self, epoch: int, shuffle: bool) -> list[Any]:
        """The batches of an epoch, for all processes."""
        batches = list(self.batches)
        if shuffle:
            # numpy's former generator: the order must be fairseq's for the same seed.
            np.random.RandomState((self.seed + epoch) % 2**32).shuffle(batches)
        return batches

    def end_of_epoch(self) -> bool:
        return self._current is not None and not self._current.has_next()

    def state_dict(self) -> dict[str, Any]:
        # At the end of an epoch the state is the beginning of the next: a resumed run would otherwise begin with no
        # batch.
        read = 0 if self.end_of_epoch() else self.iterations_in_epoch
        return {"version": 2, "epoch": self.next_epoch_idx, "iterations_in_epoch": read, "shuffle": self.shuffle}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the position of *state_dict*."""
        self.epoch, self._start = state_dict["epoch"], state_dict.get("iterations_in_epoch", 0)
        self._current = None


class IteratorSampler:
    """The batches of *iterator*, of a task's ``get_batch_iterator``, as a :class:`~fairseq.data.samplers.Sampler`.

    *numbers*, int [n], are the examples of the iterator that the run reads.
    """

    rows = 0

    def __init__(self, iterator: EpochBatchIterator, numbers: np.ndarray, batching: Batching) -> None:
        positions = {int(number): position for position, number in enumerate(numbers)}
        batches = ([positions[int(i)] for i in batch if int(i) in positions] for batch in iterator.batches)
        # A copy: a task may return the same iterator again for the same dataset.
        self.iterator, self.batching, self.shuffle = copy.copy(iterator), batching, batching.shuffle
        self.iterator.batches = [np.array(batch, np.int64) for batch in batches if batch]
        ends = np.cumsum([len(batch) for batch in self.iterator.batches])
        # A checksum of the batches: a resumed run must not take others for those that it has read.
        world, seed = batching.world_size, iterator.seed if self.shuffle else 0
        self.layout = Layout(BATCHES, len(ends), world, world, 0, zlib.crc32(ends.tobytes()), seed)

    def __len__(self) -> int:
        return self.layout.batches

    def in_fairseq_order(self) -> IteratorSampler:
        """Return this sampler: its order is fairseq's."""
        return self

    def epoch(self, epoch: int, read: int = 0) -> Iterator[np.ndarray]:
        """The examples of each of this rank's batches of an epoch, once *read* batches were read."""
        batching = self.batching
        batches = self.iterator.ordered(epoch, self.shuffle and epoch > batching.curriculum)
        for number in range(read + batching.rank, len(self) * batching.world_size, batching.world_size):
            # A process whose share is one batch shorter takes part in the last reduction with an empty one.
            yield batches[number] if number < len(batches) else np.empty(0, np.int64)
