"""Progress of a loop: a bar, plain lines, JSON lines or nothing.

Lines of training and validation are fairseq's: ``DATE TIME | INFO | TAG | …``, on stdout.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, ClassVar, Generic, TypeVar

from fairseq.config.settings import CommonConfig
from fairseq.errors import SettingError
from fairseq.system.json_files import finite
from fairseq.system.terminal import LOG_DATES, WIDTH, duration

T = TypeVar("T")
Stats = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
Eta = Callable[[Mapping[str, Any]], float | None]
Progress = Callable[[Iterable[Any], int], Iterable[Any]]
"""A progress bar around an iterable of known length: (items, length) → items."""
POSITION = ("epoch", "update")  # metrics that lines of text replace by the number of the epoch
REFRESH = 1.0  # seconds between two values of the loss in a bar
# Metrics left out on a terminal, where a line has 80 columns;
# --metrics-file and the other formats have them.
OMITTED = {*POSITION, "stage", "tokens_per_sample", "wps", "ups", "wpb", "bsz", "num_updates", "gnorm"}
OMITTED |= {"clip", "train_wall", "wall"}


_to_loggers = contextvars.ContextVar("to_loggers", default=False)


@contextlib.contextmanager
def through_logging() -> Iterator[None]:
    """Lines of training and validation go to the loggers
    of their tags, not to stdout, inside a ``with`` statement."""
    token = _to_loggers.set(True)
    try:
        yield
    finally:
        _to_loggers.reset(token)


def no_progress(items: Iterable[object], length: int) -> Iterable[object]:
    """Return *items*, without a bar."""
    return items


@dataclass
class RunProgress:
    """Progress of a training run, over the bars of its epochs."""

    start: int  # updates before this process
    updates: int  # so far
    total: int | None = None  # updates of the whole run; None where no limit tells them
    shown: str = ""  # the metric next to the bar
    shown_at: float = 0.0  # when it was shown


def progress_bar(
    iterable: Iterable[T],
    *,
    log_format: str | None = None,  # tqdm, simple, json or none; None chooses *default*
    log_interval: int = 100,  # updates between two lines
    epoch: int | None = None,  # None outside training
    prefix: str | None = None,  # the beginning of each line, after the epoch
    total: int | None = None,  # length of the whole epoch (default: ``len(iterable)``)
    start: int | None = None,  # iterations of it already done (default: the iterable's ``iterations_in_epoch``, or 0)
    run: RunProgress | None = None,  # the training run that the epoch belongs to
    default: str = "tqdm",  # simple replaces tqdm where stderr is not a terminal
    stream: IO[str] | None = None,  # default: stdout, for tqdm stderr
) -> ProgressBar[T]:
    """Return *iterable* as a progress bar in a format
    of ``--log-format``; UserError if there is no such format.

    With *run* a bar counts its updates instead of the epoch's iterations, and lines also follow
    updates 1, 2, 5, 10, 20, 50, … below *log_interval*.
    """
    if log_format is None:
        # Lines of a bar are on stderr: they would not reach the file of `| tee`.
        shows_bar = sys.stderr.isatty() and (sys.stdout.isatty() or stream is not None)
        log_format = "simple" if default == "tqdm" and not shows_bar else default
    if log_format not in FORMATS:
        raise SettingError(f"`log_format` {log_format}: choose from {', '.join(FORMATS)}")
    if start is None:
        start = getattr(iterable, "iterations_in_epoch", 0)
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)  # type: ignore[arg-type]
    return FORMATS[log_format](iterable, log_interval, epoch, prefix, total, start, run, stream)


@dataclass(eq=False)
class ProgressBar(Generic[T]):
    """An iterable that reports its progress.
    This one shows nothing; subclasses override ``_show_…``."""

    iterable: Iterable[T]
    log_interval: int
    epoch: int | None
    name: str | None
    total: int | None
    done: int
    run: RunProgress | None
    stream: IO[str] | None
    for_people: ClassVar[bool] = False

    def __post_init__(self) -> None:
        parts = [] if self.epoch is None else [f"epoch {self.epoch:03d}"]
        self.prefix = " | ".join(parts + ([self.name] if self.name else []))

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("the iterable's length is not known")
        return self.total

    def __iter__(self) -> Iterator[T]:
        for item in self._items():
            self.done += 1
            yield item

    def __enter__(self) -> ProgressBar[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar from the screen."""

    def log(
        self, stats: Stats, tag: str | None = None, step: int | None = None, eta: Eta | None = None
    ) -> dict[str, Any] | None:
        """Show *stats* if a line is due after *step*; return them then, otherwise None.

        Args:
            stats: metrics by name, or a function that gives them, called only if they are shown.
            tag: the log that the line belongs to, e.g. ``train_inner``.
            step: number of the update (default: of the iteration).
            eta: from the metrics to the seconds that the run still takes, None if that is unknown;
                not in JSON.
        """
        count = self.done if step is None else step
        self._move_to(count)
        # By the number of the update alone: a resumed run has the lines of an uninterrupted one.
        early = self.run is not None and count < self.log_interval and str(count).rstrip("0") in ("1", "2", "5")
        due = count > 0 and (early or count % self.log_interval == 0)
        # A person who resumes a run sees its first update at once;
        # records stay as of an uninterrupted run.
        if not due and not (self.for_people and self.run is not None and count == self.run.start + 1):
            return None
        values = _plain(stats)
        seconds = eta(values) if eta is not None else None
        self._show_step(values, tag, "" if seconds is None else duration(seconds))
        return values if due else None

    def show_loss(self, loss: Callable[[], float]) -> None:
        """Show the present *loss*, a function that synchronises with the device."""

    def print(self, stats: Stats, tag: str | None = None, step: int | None = None) -> dict[str, object]:
        """Show *stats* at the end of an epoch or of a validation, which *tag* names; return them.

        *step* is fairseq's argument; the number of the update is among *stats*.
        """
        values = _plain(stats)
        self._show_end(values, tag)
        return values

    def _move_to(self, step: int) -> None:
        pass

    def _items(self) -> Iterable[T]:
        return self.iterable

    def _show_step(self, values: dict[str, object], tag: str | None, eta: str) -> None:
        pass

    def _show_end(self, values: dict[str, object], tag: str | None) -> None:
        pass

    def _metrics(self, values: Mapping[str, object], eta: str) -> str:
        """Metrics of a line; the epoch stands before them already."""
        texts = [f"{k}={short(v)}" for k, v in values.items() if k not in POSITION or self.epoch is None]
        if self.run is not None and self.run.total is not None:
            texts.append(f"total_updates={self.run.total}")
        return ", ".join(texts + ([f"eta={eta}"] if eta else []))

    def _write(self, line: str, tag: str | None) -> None:
        if tag is not None and _to_loggers.get():
            logging.getLogger(tag).info("%s", line)
            return
        start = "" if tag is None else f"{time.strftime(LOG_DATES)} | INFO | {tag} | "
        # Flushed: who follows the file sees the line, and a process that is killed has written it.
        print(start + line, file=self.stream or sys.stdout, flush=True)


class SimpleBar(ProgressBar[T]):
    """Plain lines."""

    for_people = True

    def _show_step(self, values: dict[str, object], tag: str | None, eta: str) -> None:
        total = "?" if self.total is None else self.total
        prefix = f"{self.prefix}: " if self.prefix else ""
        self._write(f"{prefix}{self.done:6d} / {total} " + self._metrics(values, eta), tag)

    def _show_end(self, values: dict[str, object], tag: str | None) -> None:
        texts = [f"{k} {short(v)}" for k, v in values.items() if k not in POSITION or self.epoch is None]
        self._write(" | ".join(([self.prefix] if self.prefix else []) + texts), tag)


class JsonBar(ProgressBar[T]):
    """One JSON object a line, with every digit; null for a number that is not finite."""

    def _show_step(self, values: dict[str, object], tag: str | None, eta: str) -> None:
        position: dict[str, object] = {} if self.epoch is None else {"epoch": self.epoch}
        if self.epoch is not None and self.total:
            position["update"] = self.epoch - 1 + self.done / self.total
        self._write(json_line({**position, **values}), tag)

    def _show_end(self, values: dict[str, object], tag: str | None) -> None:
        position = {} if self.epoch is None else {"epoch": self.epoch}
        tagged = {k if tag is None or k == "epoch" else f"{tag}_{k}": v for k, v in values.items()}
        self._write(json_line({**position, **tagged}), tag)


class TqdmBar(ProgressBar[T]):
    """A bar on stderr; of a training run also lines above it, which stay on the screen."""

    for_people = True

    def _items(self) -> Iterable[T]:
        # Imported here: logs without a bar need no tqdm.
        from tqdm import tqdm

        common: dict[str, Any] = {"desc": self.prefix or None, "leave": False, "dynamic_ncols": True}
        common["file"] = self.stream or sys.stderr
        if self.run is None:
            self.bar = tqdm(self.iterable, total=self.total, initial=self.done, **common)
            return self.bar
        # A short layout: tqdm shrinks the bar itself to nothing
        # where the text beside it fills the line.
        layout = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]"
        if self.run.total is None:
            layout = "{desc}: {n_fmt} updates [{rate_fmt}{postfix}]"
        self.bar = tqdm(total=self.run.total, initial=self.run.updates, unit=" updates", bar_format=layout, **common)
        self.bar.set_postfix_str(self.run.shown)
        return self.iterable

    def close(self) -> None:
        if hasattr(self, "bar"):
            self.bar.close()

    def show_loss(self, loss: Callable[[], float]) -> None:
        now = time.monotonic()
        if self.run is not None and hasattr(self, "bar") and now - self.run.shown_at >= REFRESH:
            self.run.shown, self.run.shown_at = f"loss {short(loss())}", now
            self.bar.set_postfix_str(self.run.shown)

    def _move_to(self, step: int) -> None:
        if self.run is not None and hasattr(self, "bar"):
            self.bar.update(step - self.bar.n)
            self.run.updates = step

    def _show_step(self, values: dict[str, object], tag: str | None, eta: str) -> None:
        # The bar is there from the first item on; a line may come before.
        if not hasattr(self, "bar"):
            return
        if self.run is None:
            self.bar.set_postfix_str(self._metrics(values, eta), refresh=False)
            return
        updates, total = values["num_updates"], self.run.total
        position = f"update {updates}" if total is None else f"{updates}/{total}"
        speed = [f"{values['wps']:,.0f} tok/s"] if "wps" in values else []
        self._write_above(_fitted(position, _few(values), [*speed, *([f"{eta} left"] if eta else [])]))

    def _show_end(self, values: dict[str, object], tag: str | None) -> None:
        position = [self.name] if self.name else [f"epoch {self.epoch:03d}"] * (self.epoch is not None)
        position += [f"update {values['num_updates']}"] if "num_updates" in values else []
        self._write_above(_fitted(" | ".join(position), _few(values)))

    def _write_above(self, line: str) -> None:
        from tqdm import tqdm

        # print would leave a part of the bar in the line.
        tqdm.write(line, file=self.stream or sys.stderr)


FORMATS: dict[str, type[ProgressBar[Any]]] = {
    "tqdm": TqdmBar,
    "simple": SimpleBar,
    "json": JsonBar,
    "none": ProgressBar,
}


def _fitted(position: str, metrics: Sequence[str], end: Sequence[str] = ()) -> str:
    """A line of at most 80 columns, without the last ones of *metrics* where they do not fit; the
    first one stays."""
    for count in range(len(metrics), 0, -1):
        line = " | ".join([position, *metrics[:count], *end])
        if len(line) <= WIDTH:
            break
    return line if metrics else " | ".join([position, *end])


def _few(values: Mapping[str, object]) -> list[str]:
    """The metrics of a line on a terminal."""
    texts = {name: short(value) for name, value in values.items() if name not in OMITTED}
    # They differ only where the criterion adds a term.
    if texts.get("nll_loss") == texts.get("loss"):
        texts.pop("nll_loss", None)
    return [f"{name} {value}" for name, value in texts.items()]


def _plain(stats: Stats) -> dict[str, object]:
    """*stats* with tensors' and numpy's numbers as Python's."""
    values = stats() if callable(stats) else stats
    return {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}


def json_line(values: Mapping[str, object]) -> str:
    """*values* as one line of JSON, with null for NaN and infinities."""
    return json.dumps(finite(values), allow_nan=False, ensure_ascii=False)


def short(value: object) -> str:
    """A number as people read it: four significant digits, large ones whole."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def show_progress(common: CommonConfig, name: str, is_shown: bool = True) -> Progress:
    """Return a function that shows the progress of *name*
    on stderr: a bar on a terminal, lines elsewhere.

    Lines are printed every ``log_interval`` items, with items a second and the remaining seconds.
    """
    if not is_shown:
        return no_progress
    otherwise = "tqdm" if sys.stderr.isatty() and not common.no_progress_bar else "simple"
    log_format, interval = common.log_format or otherwise, common.log_interval

    def show(items: Iterable[object], length: int) -> Iterable[Any]:
        start = time.perf_counter()

        def pace() -> dict[str, object]:
            rate = bar.done / (time.perf_counter() - start)
            if log_format != "json":
                return {"per_second": round(rate, 1)}
            position = {"work": name, "done": bar.done, "total": length}
            return {**position, "per_second": round(rate, 1), "seconds_left": round(seconds_left())}

        def seconds_left(line: Mapping[str, object] | None = None) -> float:
            return (length - bar.done) * (time.perf_counter() - start) / bar.done

        with progress_bar(
            items, log_format=log_format, log_interval=interval, prefix=name, total=length, stream=sys.stderr
        ) as bar:
            for item in bar:
                yield item
                if log_format != "tqdm":  # tqdm shows the rate already
                    bar.log(pace, eta=seconds_left)

    return show
