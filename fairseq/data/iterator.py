"""Batches, epoch after epoch, prepared in the background and resumable at any of them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch

from fairseq.data.dataset import Dataset, Sample
from fairseq.data.samplers import Sampler
from fairseq.errors import UserError

VERSION = 2  # of the state, as fairseq numbers it


class EpochIterator:
    """The batches that a sampler makes of a dataset.

    It stands at a place: ``epoch`` (from 1) and ``iterations_in_epoch``, the batches *yielded* so far, whatever has
    been prepared ahead. Iterating goes from there to the end of the epoch; asking for more then moves it to the start
    of the next one. One iteration at a time.

    Args:
        dataset: the examples; each epoch reads :meth:`Dataset.at_epoch`.
        sampler: the examples of each batch.
        prepare: last work on the host on a sample of an epoch: (sample, epoch) → sample. It runs in the background
            thread; anything random in it must depend on its arguments only, so that a resumed run repeats it.
        prefetch: batches prepared ahead in a background thread; 0: none, no thread.
        device: where the tensors go.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: Sampler,
        *,
        prepare: Callable[[Sample, int], Sample] | None = None,
        prefetch: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.prepare = prepare
        self.prefetch = prefetch
        self.device = torch.device(device)
        self.epoch = 1
        self.iterations_in_epoch = 0

    def __len__(self) -> int:
        """Batches an epoch, the same on every rank."""
        return len(self.sampler)

    @property
    def end_of_epoch(self) -> bool:
        """Whether all of the epoch's batches have been yielded."""
        return self.iterations_in_epoch >= len(self)

    def __iter__(self) -> Iterator[Sample | None]:
        """The batches from here to the end of the epoch, on the device; None where this rank's is empty."""
        samples = self._samples()
        if self.prefetch > 0:
            samples = _in_background(samples, self.prefetch)
        with contextlib.closing(samples):
            for sample in samples:
                self.iterations_in_epoch += 1
                yield _to_device(sample, self.device)
        self.epoch += 1
        self.iterations_in_epoch = 0

    def _samples(self) -> Generator[Sample | None, None, None]:
        """The same on the host; for a GPU in pinned memory, from where copies run beside the arithmetic."""
        epoch = self.epoch
        dataset = self.dataset.at_epoch(epoch)
        for indices in self.sampler.epoch(epoch, self.iterations_in_epoch):
            if len(indices) == 0:
                yield None
                continue
            sample = dataset.batch(indices)
            if self.prepare is not None:
                sample = self.prepare(sample, epoch)
            yield _map_tensors(torch.Tensor.pin_memory, sample) if self.device.type == "cuda" else sample

    def state_dict(self) -> dict[str, Any]:
        """The place, in fairseq's layout."""
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "iterations_in_epoch": self.iterations_in_epoch,
            "shuffle": self.sampler.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place of *state*; a place at or behind the epoch's end is the start of the next epoch.

        Raises:
            UserError: *state* does not say a place.
        """
        epoch, iterations = state.get("epoch"), state.get("iterations_in_epoch", 0)
        if not isinstance(epoch, int) or not isinstance(iterations, int) or epoch < 0 or iterations < 0:
            raise UserError(
                f"--restore-file: epoch {epoch!r}, batch {iterations!r} is no place in the data; "
                "give --reset-dataloader to start at the first batch"
            )
        self.epoch, self.iterations_in_epoch = max(1, epoch), iterations
        if iterations > 0 and self.end_of_epoch:
            self.epoch, self.iterations_in_epoch = self.epoch + 1, 0


def _to_device(sample: Sample | None, device: torch.device) -> Sample | None:
    if sample is None or device.type == "cpu":
        return sample
    return _map_tensors(lambda tensor: tensor.to(device, non_blocking=True), sample)


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """*value* with *function* applied to the tensors in it, through dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(function, item) for item in value)
    return value


class _Failure:
    """An exception on its way from the background thread to the consumer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


_END = object()


def _in_background(items: Iterator[Any], ahead: int) -> Generator[Any, None, None]:
    """*items*, made by a thread up to *ahead* of them early; the thread is gone when the generator is closed."""
    ready: queue.Queue[Any] = queue.Queue(maxsize=ahead)
    stop = threading.Event()

    def produce() -> None:
        try:
            for item in items:
                ready.put(item)
                if stop.is_set():
                    return
            ready.put(_END)
        except BaseException as error:
            ready.put(_Failure(error))

    thread = threading.Thread(target=produce, name="batches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        stop.set()
        while thread.is_alive():  # it may wait for room in the queue
            with contextlib.suppress(queue.Empty):
                ready.get_nowait()
            thread.join(timeout=0.01)
