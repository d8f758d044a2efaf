"""Curves of training runs: a metric of the log over updates,
tokens or time, from the files of ``--metrics-file``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fairseq.errors import UserError
from fairseq.logging.recorders import read_entries
from fairseq.system.opening import read_named

AXES = {"updates": "updates", "tokens": "tokens read", "hours": "time of training (hours)"}
BITS = "bits per target"
UNITS = {
    **dict.fromkeys(("loss", "nll_loss", "best_loss", "rare_loss", "near_loss", "far_loss"), BITS),
    **dict.fromkeys(("generator_loss", "discriminator_loss"), "bits per token"),
    "wps": "tokens per second",
    "ups": "updates per second",
    "clip": "% of updates",
    "wpb": "tokens",
    "bsz": "rows",
    **dict.fromkeys(("train_wall", "wall"), "seconds"),
}
TRAINING = ("train_inner", "train")  # tags; the others are validation splits
Entry = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """A metric of a run, or the mean of several runs that differ in their seeds only."""

    name: str
    x: np.ndarray  # positions, ascending, [n]
    values: np.ndarray  # metric of each run at each x, [runs, n]
    stages: tuple[float, ...] = ()  # positions at which a stage of staged training began, without the first
    is_training: bool = False  # not of a validation

    @property
    def mean(self) -> np.ndarray:
        """Mean of the runs at each x, [n]."""
        return self.values.mean(0)

    @property
    def lowest(self) -> np.ndarray:
        """Lowest value of each run, [runs]."""
        return self.values.min(1)

    def reaches(self, value: float) -> np.ndarray:
        """The x at which each run first falls to *value*,
        interpolated linearly; NaN where it does not, [runs]."""
        return np.array([_crossing(self.x, run, value) for run in self.values])


def read_curve(name: str, paths: Sequence[str], split: str, metric: str, axis: str) -> Curve:
    """Read a curve.

    Args:
        name: its label (default: the name of the first file).
        paths: files of ``--metrics-file``, one per seed.
        split: tag of the entries: a validation split,
            ``train_inner`` for intervals or ``train`` for epochs.
        axis: one of :data:`AXES`. Of several runs, the mean x of each entry is taken.

    Raises:
        UserError: a file is missing or damaged, or has no such metric.
    """
    runs = [_read_run(path, split, metric, axis) for path in paths]
    updates = runs[0][0]
    # The longest common beginning: an interrupted run has fewer entries.
    for run in runs[1:]:
        updates = updates[: len(run[0])]
        if not np.array_equal(run[0][: len(updates)], updates):
            raise UserError(f"{','.join(paths)}: figures are from different updates; draw these runs separately")
    length = len(updates)
    positions = np.mean([positions[:length] for _, positions, _, _ in runs], axis=0)
    values = np.stack([values[:length] for _, _, values, _ in runs])
    label = (name or Path(paths[0]).stem).encode("utf-8", "backslashreplace").decode()  # fonts have no lone surrogates
    return Curve(label, positions, values, runs[0][3], split in TRAINING)


def tags_of(path: str) -> set[str]:
    """The tags in a file of metrics: splits of validations, ``train_inner`` and ``train``."""
    return {entry["tag"] for entry in _entries(path)}


def axis_label(metric: str, splits: Sequence[str]) -> str:
    """Label of the axis of *metric*, with its unit and, if there is one split, its name."""
    unit = f" ({UNITS[metric]})" if metric in UNITS else ""
    return f"{metric}{f' of {splits[0]}' if len(splits) == 1 else ''}{unit}"


def _read_run(path: str, split: str, metric: str, axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
    """Updates [n], positions on *axis* [n], values
    of *metric* [n] and beginnings of stages of one run."""
    entries = _entries(path)
    updates, positions = _progress(entries, axis)
    chosen = [entry for entry in entries if entry["tag"] == split and isinstance(entry.get(metric), int | float)]
    if not chosen:
        raise UserError(f"{path}: has no figure {metric!r} of {split!r}; it has {_available(entries)}")
    at = np.array([entry["step"] for entry in chosen], float)
    values = np.array([entry[metric] for entry in chosen], float)
    # A stage begins where the last line of the one before it stands.
    numbers = [(entry["step"], entry["stage"]) for entry in entries if "stage" in entry]
    begins = [last for (last, before), (_, after) in zip(numbers, numbers[1:], strict=False) if after != before]
    return at, np.interp(at, updates, positions), values, tuple(np.interp(begins, updates, positions))


def _entries(path: str) -> list[Entry]:
    try:
        return read_entries(read_named(path, "give a file of `metrics_file`"))
    except ValueError as error:
        raise UserError(f"{path}: not a file of `metrics_file` ({error})") from None


def _progress(entries: Sequence[Entry], axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Updates and positions on *axis*, to interpolate between, both [m]."""
    steps, positions = [0.0], [0.0]
    for entry in entries:
        step = float(entry["step"])
        if axis == "tokens":
            # Only intervals of training count tokens; wpb is their mean number in an update.
            if entry["tag"] != "train_inner" or step <= steps[-1]:
                continue
            position = positions[-1] + _number(entry, "wpb") * (step - steps[-1])
        elif axis == "hours":
            position = _number(entry, "wall") / 3600
        else:
            position = step
        if math.isfinite(position):
            steps.append(step)
            positions.append(position)
    return np.array(steps), np.array(positions)


def _number(entry: Entry, name: str) -> float:
    """The number *name* of an entry; NaN where it has none, or null."""
    value = entry.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def _available(entries: Sequence[Entry]) -> str:
    metrics: dict[str, dict[str, None]] = {}
    for entry in entries:
        names = [name for name, value in entry.items() if isinstance(value, int | float) and name != "step"]
        metrics.setdefault(entry["tag"], {}).update(dict.fromkeys(names))
    return "; ".join(f"of {tag!r} {', '.join(names)}" for tag, names in metrics.items()) or "no entries"


def _crossing(x: np.ndarray, values: np.ndarray, value: float) -> float:
    below = np.flatnonzero(values <= value)
    if not len(below):
        return math.nan
    i = int(below[0])
    # No line to interpolate on: the first value is below already, or the step is level.
    if i == 0 or values[i - 1] == values[i]:
        return float(x[i])
    share = (values[i - 1] - value) / (values[i - 1] - values[i])
    return float(x[i - 1] + share * (x[i] - x[i - 1]))
