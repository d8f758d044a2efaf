"""Progress of a loop: a bar, plain lines, JSON lines or nothing."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import IO, Any

from fairseq.errors import UserError

Stats = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
Eta = Callable[[Mapping[str, Any]], float | None]
PLACE = ("epoch", "update")  # figures that lines of text replace by the number of the epoch


def progress_bar(
    iterable: Iterable[Any],
    *,
    log_format: str | None = None,
    log_interval: int = 100,
    epoch: int | None = None,
    prefix: str | None = None,
    total: int | None = None,
    start: int | None = None,
    default: str = "tqdm",
    stream: IO[str] | None = None,
) -> ProgressBar:
    """Return *iterable* as a progress bar in one of the formats of ``--log-format``.

    Args:
        iterable: the items.
        log_format: tqdm, simple, json or none; None chooses *default*.
        log_interval: updates between two lines.
        epoch: number of the epoch, None outside training.
        prefix: the beginning of each line, after the epoch.
        total: length of the whole epoch (default: ``len(iterable)``).
        start: iterations of it already done (default: the iterable's ``iterations_in_epoch``, or 0).
        default: format where none is given; simple replaces tqdm where stderr is not a terminal.
        stream: file to write to (default: stdout, for tqdm stderr).

    Raises:
        UserError: the format does not exist.
    """
    if log_format is None:
        log_format = "simple" if default == "tqdm" and not sys.stderr.isatty() else default
    if log_format not in FORMATS:
        raise UserError(f"--log-format {log_format}: choose from {', '.join(FORMATS)}")
    if start is None:
        start = getattr(iterable, "iterations_in_epoch", 0)
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)  # type: ignore[arg-type]
    return FORMATS[log_format](
        iterable,
        log_interval=log_interval,
        epoch=epoch,
        prefix=prefix,
        total=total,
        start=start,
        stream=stream,
    )


class ProgressBar:
    """An iterable that reports its progress. This one shows nothing; subclasses override ``_show_…``."""

    def __init__(
        self,
        iterable: Iterable[Any],
        *,
        log_interval: int,
        epoch: int | None,
        prefix: str | None,
        total: int | None,
        start: int,
        stream: IO[str] | None,
    ) -> None:
        self.iterable = iterable
        self.log_interval = log_interval
        self.epoch = epoch
        self.total = total
        self.done = start
        self.stream = stream
        parts = ([] if epoch is None else [f"epoch {epoch:03d}"]) + ([prefix] if prefix else [])
        self.prefix = " | ".join(parts)

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("the iterable's length is not known")
        return self.total

    def __iter__(self) -> Iterator[Any]:
        for item in self._items():
            self.done += 1
            yield item

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar from the screen."""

    def log(self, stats: Stats, step: int | None = None, eta: Eta | None = None) -> dict[str, Any] | None:
        """Show *stats* every ``log_interval`` steps; return them then, otherwise None.

        Args:
            stats: figures by name, or a function that gives them, called only if they are shown.
            step: number of the update (default: of the iteration).
            eta: from the figures to the seconds that the run still takes, None if that is unknown; not in JSON.
        """
        count = self.done if step is None else step
        if count == 0 or count % self.log_interval:
            return None
        values = _plain(stats)
        seconds = eta(values) if eta is not None else None
        self._show_step(values, "" if seconds is None else f"eta={timedelta(seconds=round(seconds))}")
        return values

    def print(self, stats: Stats, tag: str | None = None) -> dict[str, Any]:
        """Show *stats* at the end of an epoch or of a validation, which *tag* names; return them."""
        values = _plain(stats)
        self._show_end(values, tag)
        return values

    def _items(self) -> Iterable[Any]:
        return self.iterable

    def _show_step(self, values: dict[str, Any], eta: str) -> None:
        pass

    def _show_end(self, values: dict[str, Any], tag: str | None) -> None:
        pass

    def _figures(self, values: Mapping[str, Any], eta: str) -> str:
        """Figures of a line; the epoch stands before them already."""
        shown = [f"{k}={short(v)}" for k, v in values.items() if k not in PLACE or self.epoch is None]
        return ", ".join(shown + ([eta] if eta else []))

    def _summary(self, values: Mapping[str, Any]) -> str:
        shown = [f"{k} {short(v)}" for k, v in values.items() if k not in PLACE or self.epoch is None]
        return " | ".join(([self.prefix] if self.prefix else []) + shown)

    def _write(self, line: str) -> None:
        print(line, file=self.stream or sys.stdout, flush=True)


class SimpleBar(ProgressBar):
    """Plain lines."""

    def _show_step(self, values: dict[str, Any], eta: str) -> None:
        total = "?" if self.total is None else self.total
        place = f"{self.prefix}: " if self.prefix else ""
        self._write(f"{place}{self.done:6d} / {total} " + self._figures(values, eta))

    def _show_end(self, values: dict[str, Any], tag: str | None) -> None:
        self._write(self._summary(values))


class JsonBar(ProgressBar):
    """One JSON object a line, with every digit; null for a number that is not finite."""

    def _show_step(self, values: dict[str, Any], eta: str) -> None:
        place: dict[str, Any] = {}
        if self.epoch is not None:
            place["epoch"] = self.epoch
            if self.total:
                place["update"] = self.epoch - 1 + self.done / self.total
        self._write_object({**place, **values})

    def _show_end(self, values: dict[str, Any], tag: str | None) -> None:
        place = {} if self.epoch is None else {"epoch": self.epoch}
        named = {k if tag is None or k == "epoch" else f"{tag}_{k}": v for k, v in values.items()}
        self._write_object({**place, **named})

    def _write_object(self, values: dict[str, Any]) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._write(json.dumps(finite, allow_nan=False, ensure_ascii=False))


class TqdmBar(ProgressBar):
    """A bar with the remaining time, on stderr."""

    def _items(self) -> Iterable[Any]:
        from tqdm import tqdm

        self.bar = tqdm(
            self.iterable,
            desc=self.prefix or None,
            total=self.total,
            initial=self.done,
            leave=False,
            file=self.stream or sys.stderr,
            dynamic_ncols=True,
        )
        return self.bar

    def close(self) -> None:
        if hasattr(self, "bar"):
            self.bar.close()

    def _show_step(self, values: dict[str, Any], eta: str) -> None:
        if hasattr(self, "bar"):
            self.bar.set_postfix_str(self._figures(values, eta), refresh=False)

    def _show_end(self, values: dict[str, Any], tag: str | None) -> None:
        from tqdm import tqdm

        tqdm.write(self._summary(values), file=self.stream or sys.stderr)


FORMATS: dict[str, type[ProgressBar]] = {"tqdm": TqdmBar, "simple": SimpleBar, "json": JsonBar, "none": ProgressBar}


def _plain(stats: Stats) -> dict[str, Any]:
    """*stats* with tensors' and numpy's numbers as Python's."""
    values = stats() if callable(stats) else stats
    return {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}


def short(value: Any) -> str:
    """A number as people read it: four significant digits, large ones whole."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
