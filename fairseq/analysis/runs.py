"""Draw the curves of training runs and compare them."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fairseq.analysis import plots
from fairseq.analysis.curves import AXES, Curve, axis_label, read_curve, tags_of
from fairseq.errors import UserError
from fairseq.logging.recorders import METRICS_FILE
from fairseq.system.files import prepare_file
from fairseq.system.tables import table


def compare_runs(
    runs: Sequence[str],
    metric: str = "loss",
    splits: Sequence[str] = ("valid",),
    over: str = "updates",
    reach: float | None = None,
    picture: str | None = None,
    adds_training: bool = False,
) -> list[dict[str, Any]]:
    """Print a table of *runs*, and draw their curves into *picture*, by default in the first run's
    folder.

    Args:
        runs: folders or their metrics files, or ``NAME=RUN,RUN,…`` with one run per seed.
        over: the horizontal axis, of :data:`~fairseq.analysis.curves.AXES`.
        reach: a value of the metric.
        adds_training: whether a single folder's training metrics are drawn, too.

    Returns:
        For each run the last and lowest value of the metric, and the position at which it reaches
        *reach*.
    """
    folders = [run for run in runs if os.path.isdir(run)]
    named = [_run(run) for run in runs]
    file = _picture(picture, named, folders)
    if adds_training and len(folders) == len(named) == 1:
        there = tags_of(named[0][1][0])
        splits = [split for split in ("train_inner", *splits) if split in there] or splits
    curves = [read_curve(*run, split, metric, over) for run in named for split in splits]
    if len(splits) > 1:  # of each run the splits in turn
        names = [f"{curve.name}, {splits[i % len(splits)]}" for i, curve in enumerate(curves)]
        curves = [dataclasses.replace(curve, name=name) for curve, name in zip(curves, names, strict=True)]
    rows = [_row(curve, metric, over, reach) for curve in curves]
    print(*table([list(rows[0]), *([_text(value) for value in row.values()] for row in rows)], left=1), sep="\n")
    if file is not None:
        plots.draw_curves(file, curves, AXES[over], axis_label(metric, splits), reach, len(splits))
        print(f"\n{file}")
    return rows


def _run(text: str) -> tuple[str, list[str]]:
    """Name and files of a run: NAME=FILE,FILE or FILE;
    a folder stands for the metrics that a run wrote there."""
    name, _, paths = text.rpartition("=")
    if os.path.isdir(paths):
        return name or Path(paths).absolute().name, [str(Path(paths) / METRICS_FILE)]
    return name, [str(Path(path) / METRICS_FILE) if os.path.isdir(path) else path for path in paths.split(",")]


def _picture(path: str | None, runs: list[tuple[str, list[str]]], folders: list[str]) -> Path | None:
    """The file to draw into, by default in the first
    of *folders*; None without these, or without matplotlib.

    Raises:
        UserError: it cannot be written, or has another format.
    """
    if path is None:
        if folders and not plots.is_available():
            print("no picture: plots need matplotlib: pip install matplotlib", file=sys.stderr)
        return Path(folders[0]) / "curves.png" if folders and plots.is_available() else None
    plots.require("`results_path`")
    if Path(path).suffix not in plots.CURVE_FORMATS:
        raise UserError(f"`results_path` {path}: must end in {', '.join(plots.CURVE_FORMATS)}")
    prepare_file("`results_path`", path, {f"RUN {file}": file for _, files in runs for file in files})
    return Path(path)


def _row(curve: Curve, metric: str, over: str, reach: float | None) -> dict[str, object]:
    row = {"run": curve.name, "seeds": len(curve.values), over: float(curve.x[-1])}
    row |= {f"last {metric}": curve.values[:, -1], f"lowest {metric}": curve.lowest}
    if reach is not None:
        row[f"{over} to {reach:g}"] = curve.reaches(reach)
    return row


def _text(value: object) -> str:
    """*value* as text; several as their mean and range."""
    if isinstance(value, np.ndarray):
        if np.isnan(value).any():
            return "not reached"
        spread = f" ({_number(value.min())} to {_number(value.max())})" if len(value) > 1 else ""
        return f"{_number(value.mean())}{spread}"
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.5g}"
