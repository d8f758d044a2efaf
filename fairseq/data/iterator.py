"""Batches, epoch after epoch, prepared in the background and resumable at any of them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import logging
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from fairseq.data import position
from fairseq.data.dataset import Dataset, Sample
from fairseq.data.position import EpochLayout
from fairseq.data.samplers import Sampler
from fairseq.errors import UserError
from fairseq.modules import devices

logger = logging.getLogger(__name__)

VERSION = 2  # of the state, as fairseq numbers it


class EpochIterator:
    """The batches that samplers make of datasets.

    Its position: ``epoch`` (from 1) and ``read``, the units (see :mod:`fairseq.data.position`) of
    the batches *yielded* so far on all processes, whatever has been prepared ahead. Iterating goes
    from there to the end of the epoch; asking for more then moves it to the start of the next one.
    One iteration at a time.

    Args:
        datasets: dataset and sampler of each epoch; an epoch reads :meth:`Dataset.at_epoch`.
        prepare: last step on the host for a sample of an epoch: (sample, epoch) → sample. It runs
            in the background thread; anything random in it must depend on its arguments only, so
            that a resumed run repeats it.
        prefetch: batches prepared ahead in a background thread; 0: none, no thread.
        chunks: parts of its rows in which each batch is handed out; see :func:`chunks_of`.
        device: where the tensors go.

    Attributes:
        begin: called with the epoch before its batches, also where they are continued.
    """

    begin: Callable[[int], None] | None = None

    def __init__(
        self,
        datasets: EpochDatasets,
        *,
        prepare: Callable[[Sample, int], Sample] | None = None,
        prefetch: int = 1,
        chunks: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.datasets = datasets
        self.prepare = prepare
        self.prefetch = prefetch
        self.chunks = chunks
        self.device = torch.device(device)
        self.epoch = 1
        self.read = 0
        self._rest: Iterator[Sample | None] = iter(())  # of the present iteration
        self._fetched: list[Sample | None] = []  # at most one, before the rest

    def open(self) -> None:
        """Open the data of the epoch, where that is not done yet;
        UserError if they are missing or damaged."""
        self.datasets.of(self.epoch)

    def close(self) -> None:
        """Wait for data that are being opened in the background and drop them."""
        self.datasets.close()

    @property
    def changes_data(self) -> bool:
        """Return whether each epoch reads other data than the one before."""
        return len(self.datasets) > 1

    @property
    def dataset(self) -> Dataset:
        """The examples of the epoch."""
        return self.datasets.of(self.epoch)[0]

    @property
    def sampler(self) -> Sampler:
        """The batches of the epoch."""
        return self.datasets.of(self.epoch)[1]

    @property
    def iterations_in_epoch(self) -> int:
        """Batches of the epoch that are over."""
        # At 0 without the sampler: the data need not be open yet.
        return self.sampler.layout.batches_read(self.read) if self.read else 0

    def __len__(self) -> int:
        """Batches of the epoch, as many on every rank."""
        return len(self.sampler)

    def counts(self, epochs: int) -> list[int]:
        """The batches of each of the first *epochs* epochs, at most one for each dataset, opened
        unless it was before."""
        return self.datasets.counts(min(epochs, len(self.datasets)), self.epoch)

    def known_counts(self) -> list[int]:
        """The batches of an epoch of each dataset; where it was not opened yet, as many as now."""
        return [self.datasets.known.get(number, len(self)) for number in range(len(self.datasets))]

    @property
    def end_of_epoch(self) -> bool:
        """Return whether all batches of the epoch have been yielded."""
        return self.read > 0 and self.iterations_in_epoch >= len(self)

    def __iter__(self) -> Iterator[Sample | None]:
        """The batches from here to the end of the epoch,
        on the device; None where this rank's is empty."""
        if self.begin is not None:
            self.begin(self.epoch)
        self.open()
        self.datasets.open_next(self.epoch)
        samples = self._samples()
        if self.prefetch > 0:
            samples = _in_background(samples, self.prefetch)
        # An iteration that is left early must not leave its thread behind.
        with contextlib.closing(samples):
            layout = self.sampler.layout
            self._rest, self._fetched = (_to_device(sample, self.device) for sample in samples), []
            try:
                while self._fetched or self._fetch():
                    # Counted before it is handed out: a checkpoint of the update that reads it
                    # continues with the next.
                    self.read = min(self.read + layout.step, layout.units)
                    yield self._fetched.pop()
            finally:
                # What is left refers to this iterator, which would wait for the garbage collector.
                self._rest, self._fetched = iter(()), []
        self.epoch += 1
        self.read = 0

    def fetch(self) -> None:
        """Copy the next batch of an iteration to the accelerator, which computes meanwhile; the
        position stays where it is."""
        # A processor that computes has nothing to gain from waiting for the batch already.
        if devices.is_accelerator(self.device) and not self._fetched:
            self._fetch()

    def _fetch(self) -> bool:
        self._fetched = list(itertools.islice(self._rest, 1))
        return bool(self._fetched)

    def data_checksum(self) -> str | None:
        """Return one checksum of the files of the epoch, whatever folder they are in; None where
        the dataset has none."""
        checksums: Mapping[str, int] = getattr(self.dataset, "checksums", dict)()
        return f"{zlib.crc32(repr(sorted(checksums.items())).encode()):08x}" if checksums else None

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal on all processes, by name: the files' checksums, the layout, the
        position, the batch."""
        checksums: Mapping[str, int] = getattr(self.dataset, "checksums", dict)()  # not every dataset has them
        facts: dict[str, Any] = {f"checksum of {name}": f"{crc:08x}" for name, crc in checksums.items()}
        facts["batches an epoch"] = len(self)
        facts |= {f"{name} of the batches": value for name, value in dataclasses.asdict(self.sampler.layout).items()}
        facts |= {"epoch": self.epoch, "units read of the epoch": self.read}
        if hasattr(self.sampler, "rank"):  # not every sampler has it
            first: Any = copy.copy(self.sampler)
            # Ranks differ in their batches, but each can compute rank 0's.
            first.rank = 0
            batch = next(first.epoch(self.epoch, self.read), np.empty(0))
            facts["checksum of the next batch of rank 0"] = f"{zlib.crc32(batch.tobytes()):08x}"
        return facts

    def _sample(self, dataset: Dataset, indices: np.ndarray, epoch: int) -> Sample:
        sample = dataset.batch(indices)
        return sample if self.prepare is None else self.prepare(sample, epoch)

    def _samples(self) -> Generator[Sample | None, None, None]:
        """The prepared sample on the host; for a GPU in pinned memory,
        so that copies overlap with computation."""
        epoch = self.epoch
        dataset = self.dataset.at_epoch(epoch)
        for indices in self.sampler.epoch(epoch, self.read):
            if len(indices) == 0:
                yield None
                continue
            if self.chunks == 1:
                sample = self._sample(dataset, indices, epoch)
            else:
                sample = self._in_chunks(dataset, indices, epoch)
            yield _map_tensors(devices.pin, sample) if devices.is_accelerator(self.device) else sample

    def _in_chunks(self, dataset: Dataset, indices: np.ndarray, epoch: int) -> Sample:
        chunks: list[Sample | None] = []
        first = 0
        for rows in np.array_split(indices, self.chunks):
            place = {"first_row": first, "is_last": first + len(rows) == len(indices)}
            chunks.append({**self._sample(dataset, rows, epoch), **place} if len(rows) else None)
            first += len(rows)
        return {"nsentences": len(indices), "chunks": chunks}

    def state_dict(self) -> dict[str, Any]:
        """The position, in fairseq's layout, and ``read``,
        by which any number of processes finds it.

        The end of an epoch is the start of the next one.
        """
        ended = self.end_of_epoch
        return {
            "version": VERSION,
            "epoch": self.epoch + ended,
            "iterations_in_epoch": 0 if ended else self.iterations_in_epoch,
            "shuffle": self.sampler.shuffle,
            "read": {"count": 0 if ended else self.read, **dataclasses.asdict(self.sampler.layout)},
        }

    def load_state_dict(self, state: Mapping[str, Any], saved: position.CheckpointOrigin | None = None) -> bool:
        """Go to the position of *state*; a position at or behind the epoch's end is the start of
        the next epoch.

        The order stays that of the run that saved the state: of version 1.0, or of fairseq, which
        stores no ``read`` (:meth:`Sampler.continuing`).

        Args:
            state: of :meth:`state_dict`, or fairseq's ``train_iterator``.
            saved: the run that saved a state without ``read``; None: one with the same batches.

        Returns:
            True if rows continue where they stopped, so that their memory fits.

        Raises:
            UserError: *state* is not a position, or this run's batches have no such position.
        """
        epoch, iterations = state.get("epoch"), state.get("iterations_in_epoch", 0)
        if not isinstance(epoch, int) or not isinstance(iterations, int) or epoch < 0 or iterations < 0:
            raise UserError(
                f"checkpoint: epoch {epoch!r}, batch {iterations!r} is not a position in the data; "
                "give `reset_dataloader` to start at the first batch"
            )
        read = state.get("read")
        if read is not None or saved is not None:
            self.datasets.continuing(position.layout_of(read) if read else position.FAIRSEQ)
        self.epoch, self.read = max(1, epoch), 0
        if iterations == 0:
            return True
        layout = self.sampler.layout
        # Only in the middle of an epoch: at its start any layout fits.
        here = position.find(layout, iterations, read, saved)
        self.read = here.read
        if here.read >= layout.units:
            self.epoch, self.read = self.epoch + 1, 0
        if here.remark:
            logger.info("epoch %d, batch %d of %d: %s", self.epoch, self.iterations_in_epoch, len(self), here.remark)
        return here.same_rows


def chunks_of(sample: Sample | None, chunks: int) -> list[Sample | None]:
    """Return the parts of a batch that an iterator handed out in *chunks*: as many on every rank;
    None for empty ones.

    A part has ``first_row``, the number of its first row in the batch, and ``is_last``: no row
    comes after its rows.
    """
    if sample is None:
        return [None] * chunks
    return sample.get("chunks", [sample])


def _to_device(sample: Sample | None, device: torch.device) -> Sample | None:
    if sample is None or device.type == "cpu":
        return sample
    return _map_tensors(lambda tensor: devices.move(tensor, device), sample)


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: object) -> Any:
    """*value* with *function* applied to the tensors in it, through dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(function, item) for item in value)
    return value


_END = object()


def _in_background(items: Iterator[Any], ahead: int) -> Generator[Any, None, None]:
    """*items*, made by a thread up to *ahead* of them early; closing the generator ends it."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="batches")
    try:
        pending = deque(executor.submit(next, items, _END) for _ in range(ahead + 1))
        while (item := pending.popleft().result()) is not _END:
            pending.append(executor.submit(next, items, _END))
            yield item
    finally:
        executor.shutdown(cancel_futures=True)


EpochData = tuple[Dataset, Sampler]


class EpochDatasets:
    """The dataset and sampler of each epoch; at most two are in memory, the epoch's and the next.

    Args:
        openers: functions that open them, all taken in turn. Each may run in a thread of its own.
    """

    def __init__(self, openers: Sequence[Callable[[], EpochData]]) -> None:
        self._openers = openers
        self._current: tuple[int, EpochData] | None = None
        self._next: tuple[int, ThreadPoolExecutor, Future[EpochData | None]] | None = None
        self._saved: EpochLayout | None = None
        self.known: dict[int, int] = {}  # batches an epoch, of the datasets that were opened

    @classmethod
    def of_one(cls, dataset: Dataset, sampler: Sampler) -> EpochDatasets:
        """Return those of epochs that all read one dataset."""
        return cls([lambda: (dataset, sampler)])

    def __len__(self) -> int:
        """Datasets that are read in turn."""
        return len(self._openers)

    def of(self, epoch: int) -> EpochData:
        """Return dataset and sampler of *epoch* (from 1),
        opened now if not before; UserError if damaged."""
        # fairseq's rule: folder (epoch − 1) mod n.
        number = (epoch - 1) % len(self._openers)
        if self._current is None or self._current[0] != number:
            # Its memory is free before the next one is opened.
            self._current = None
            opened = self._take(number) or self._openers[number]()
            self._current = number, self._ordered(opened)
            self.known[number] = len(self._current[1][1])
        return self._current[1]

    def counts(self, size: int, epoch: int) -> list[int]:
        """The batches of each of the first *size* datasets. The one of *epoch* is opened last,
        because it is read next."""
        last = (epoch - 1) % len(self._openers)
        for number in sorted(range(size), key=lambda number: number == last):
            if number not in self.known:
                self.of(number + 1)
        return [self.known[number] for number in range(size)]

    def open_next(self, epoch: int) -> None:
        """Open the dataset of the epoch after *epoch*
        in the background, unless it is also *epoch*'s."""
        number = epoch % len(self._openers)
        if len(self._openers) > 1 and (self._next is None or self._next[0] != number):
            executor = ThreadPoolExecutor(1, thread_name_prefix="next data folder")
            self._next = number, executor, executor.submit(_try_to_open, self._openers[number])

    def close(self) -> None:
        """Wait for what is being opened and drop it; the openers may refer to a model."""
        self._take(-1)

    def continuing(self, saved: EpochLayout) -> None:
        """Read all of them in the order of a run that stored *saved*."""
        # What is open is in another order, unless this process stored it.
        if self._current is None or self._current[1][1].layout != saved:
            self._current, self.known = None, {}
        self._saved = saved

    def _take(self, number: int) -> EpochData | None:
        """What was opened in the background, if it is *number*;
        None if that failed: the caller tries again."""
        if self._next is None:
            return None
        (opening, executor, future), self._next = self._next, None
        executor.shutdown()
        return future.result() if opening == number else None

    def _ordered(self, opened: EpochData) -> EpochData:
        if self._saved is None:
            return opened
        dataset, sampler = opened
        # Few datasets have an order of their own.
        if hasattr(dataset, "continuing"):
            dataset = dataset.continuing(self._saved)
        return dataset, sampler.continuing(self._saved)


def _try_to_open(opener: Callable[[], EpochData]) -> EpochData | None:
    """Return what *opener* opens; None if that fails, which a warning says at once: the data are
    read after hours only."""
    try:
        return opener()
    except Exception as error:
        text = error.args[0] if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        logger.warning("the next epoch's data cannot be read yet: %s", text)
        return None
