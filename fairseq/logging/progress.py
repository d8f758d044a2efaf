"""Progress bars: a bar, plain lines, JSON lines or nothing, and TensorBoard beside any of them."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from fairseq.errors import UserError

Stats = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


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
    tensorboard_logdir: str | None = None,
    stream: IO[str] | None = None,
) -> ProgressBar:
    """*iterable*, shown in one of the formats of ``--log-format``.

    Args:
        iterable: what is iterated over.
        log_format: tqdm, simple, json or none; None chooses *default*.
        log_interval: updates between two lines.
        epoch: number of the epoch, None outside training.
        prefix: what lines begin with, after the epoch.
        total: length of the whole epoch (default: ``len(iterable)``).
        start: iterations of it already done (default: the iterable's ``iterations_in_epoch``, or 0).
        default: format where none is given; in the place of tqdm comes simple where stderr is no terminal.
        tensorboard_logdir: folder for TensorBoard's logs.
        stream: where to write (default: stdout, for tqdm stderr).

    Raises:
        UserError: the format does not exist, or TensorBoard is asked for and not installed.
    """
    if log_format is None:
        log_format = "simple" if default == "tqdm" and not sys.stderr.isatty() else default
    if log_format not in FORMATS:
        raise UserError(f"--log-format {log_format}: choose from {', '.join(FORMATS)}")
    if start is None:
        start = getattr(iterable, "iterations_in_epoch", 0)
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)  # type: ignore[arg-type]
    board = TensorBoard(tensorboard_logdir) if tensorboard_logdir else None
    return FORMATS[log_format](
        iterable,
        log_interval=log_interval,
        epoch=epoch,
        prefix=prefix,
        total=total,
        start=start,
        board=board,
        stream=stream,
    )


class ProgressBar:
    """An iterable that shows how far it is; this one shows nothing, and subclasses define ``_show…``."""

    def __init__(
        self,
        iterable: Iterable[Any],
        *,
        log_interval: int,
        epoch: int | None,
        prefix: str | None,
        total: int | None,
        start: int,
        board: TensorBoard | None,
        stream: IO[str] | None,
    ) -> None:
        self.iterable = iterable
        self.log_interval = log_interval
        self.epoch = epoch
        self.total = total
        self.done = start
        self.board = board
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
        """Take the bar off the screen."""

    def log(self, stats: Stats, tag: str | None = None, step: int | None = None) -> None:
        """Show *stats* if it is time to: every ``log_interval`` steps.

        Args:
            stats: figures by name, or a function that gives them, called only if they are shown.
            tag: which of TensorBoard's logs they go to.
            step: number of the update (default: of the iteration).
        """
        count = self.done if step is None else step
        if count > 0 and count % self.log_interval == 0:
            values = _plain(stats)
            self._show_step(values)
            if self.board is not None:
                self.board.write(values, tag, count)

    def print(self, stats: Stats, tag: str | None = None, step: int | None = None) -> None:
        """Show *stats* at the end of an epoch or of a validation, which *tag* names."""
        values = _plain(stats)
        self._show_end(values, tag)
        if self.board is not None:
            self.board.write(values, tag, self.done if step is None else step)
            self.board.flush()

    def _items(self) -> Iterable[Any]:
        return self.iterable

    def _show_step(self, values: dict[str, Any]) -> None:
        pass

    def _show_end(self, values: dict[str, Any], tag: str | None) -> None:
        pass

    def _write(self, line: str) -> None:
        print(line, file=self.stream or sys.stdout, flush=True)


class SimpleBar(ProgressBar):
    """Lines to read."""

    def _show_step(self, values: dict[str, Any]) -> None:
        total = "?" if self.total is None else self.total
        place = f"{self.prefix}: " if self.prefix else ""
        self._write(f"{place}{self.done:6d} / {total} " + ", ".join(f"{k}={_short(v)}" for k, v in values.items()))

    def _show_end(self, values: dict[str, Any], tag: str | None) -> None:
        self._write(_summary(self.prefix, values))


class JsonBar(ProgressBar):
    """One JSON object a line, with every digit; what is not a finite number is null."""

    def _show_step(self, values: dict[str, Any]) -> None:
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
    """A bar with the time that is left, on stderr."""

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

    def _show_step(self, values: dict[str, Any]) -> None:
        if hasattr(self, "bar"):
            self.bar.set_postfix_str(", ".join(f"{k}={_short(v)}" for k, v in values.items()), refresh=False)

    def _show_end(self, values: dict[str, Any], tag: str | None) -> None:
        from tqdm import tqdm

        tqdm.write(_summary(self.prefix, values), file=self.stream or sys.stderr)


FORMATS: dict[str, type[ProgressBar]] = {"tqdm": TqdmBar, "simple": SimpleBar, "json": JsonBar, "none": ProgressBar}


class TensorBoard:
    """Figures over steps in *folder*, one log a tag.

    Raises:
        UserError: tensorboard is not installed, or the folder cannot be made.
    """

    def __init__(self, folder: str) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            raise UserError(
                "--tensorboard-logdir: tensorboard is not installed; install the [tensorboard] extra or drop the flag"
            ) from None
        self.folder = Path(folder)
        self._tags: set[str] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--tensorboard-logdir {folder}: cannot be made ({error.strerror})") from None

    def write(self, values: Mapping[str, Any], tag: str | None, step: int) -> None:
        """Add the numbers among *values* at *step*."""
        self._tags.add(tag or "")
        for name, value in values.items():
            if isinstance(value, int | float) and name != "num_updates":
                _writer(self.folder / (tag or "")).add_scalar(name, value, step)

    def flush(self) -> None:
        for tag in self._tags:
            _writer(self.folder / tag).flush()


@functools.cache
def _writer(folder: Path) -> Any:
    """The one writer of a folder, whatever the number of bars: each writer is a file."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def _plain(stats: Stats) -> dict[str, Any]:
    """*stats* with tensors' and numpy's numbers as Python's."""
    values = stats() if callable(stats) else stats
    return {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}


def _summary(prefix: str, values: Mapping[str, Any]) -> str:
    return " | ".join(([prefix] if prefix else []) + [f"{k} {_short(v)}" for k, v in values.items()])


def _short(value: Any) -> str:
    """A number as people read it: four significant digits, large ones whole."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
