"""Draw the curves of training runs and compare them."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fairseq.analysis import plots
from fairseq.analysis.curves import AXES, Curve, axis_label, read_curve, tags_of
from fairseq.config import fields
from fairseq.errors import UserError
from fairseq.evaluation.report import table
from fairseq.logging.recorders import METRICS_FILE
from fairseq.system.files import prepare_file
from fairseq_cli.plot import PlotConfig


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a table of the runs, and draw their curves into ``--results-path``.

    Returns:
        For each run the last and lowest value of the metric,
        and the position at which it reaches ``--reach``.
    """
    cfg = fields.typed(PlotConfig, args)
    folders = [run for run in args.runs if os.path.isdir(run)]
    runs = [_run(run) for run in args.runs]
    picture = _picture(cfg, runs, folders)
    splits = [split.strip() for split in cfg.split.split(",") if split.strip()]
    if not splits:
        raise UserError(f"--split {cfg.split!r}: empty; give a validation split, train_inner or train")
    # Training beside validations, of which a short run has only one.
    if len(folders) == len(runs) == 1 and cfg.split == PlotConfig.split:
        there = tags_of(runs[0][1][0])
        splits = [split for split in ("train_inner", *splits) if split in there] or splits
    curves = [read_curve(*run, split, cfg.figure, cfg.over) for run in runs for split in splits]
    if len(splits) > 1:  # of each run the splits in turn
        names = [f"{curve.name}, {splits[i % len(splits)]}" for i, curve in enumerate(curves)]
        curves = [dataclasses.replace(curve, name=name) for curve, name in zip(curves, names, strict=True)]
    rows = [_row(curve, cfg) for curve in curves]
    print(*table([list(rows[0]), *([_text(value) for value in row.values()] for row in rows)], left=1), sep="\n")
    if picture is not None:
        labels = AXES[cfg.over], axis_label(cfg.figure, splits)
        plots.draw_curves(picture, curves, *labels, cfg.reach, len(splits))
        print(f"\n{picture}")
    return rows


def _run(text: str) -> tuple[str, list[str]]:
    """Name and files of a run: NAME=FILE,FILE or FILE;
    a folder stands for the metrics that a run wrote there."""
    name, _, paths = text.rpartition("=")
    if os.path.isdir(paths):
        return name or Path(paths).absolute().name, [str(Path(paths) / METRICS_FILE)]
    return name, [str(Path(path) / METRICS_FILE) if os.path.isdir(path) else path for path in paths.split(",")]


def _picture(cfg: PlotConfig, runs: list[tuple[str, list[str]]], folders: list[str]) -> Path | None:
    """The file to draw into, by default in the first
    of *folders*; None without these, or without matplotlib.

    Raises:
        UserError: it cannot be written, or has another format.
    """
    if cfg.results_path is None:
        if folders and not plots.is_available():
            print("no picture: plots need matplotlib: pip install matplotlib", file=sys.stderr)
        return Path(folders[0]) / "curves.png" if folders and plots.is_available() else None
    plots.require("--results-path")
    if Path(cfg.results_path).suffix not in plots.CURVE_FORMATS:
        raise UserError(f"--results-path {cfg.results_path}: must end in {', '.join(plots.CURVE_FORMATS)}")
    prepare_file("--results-path", cfg.results_path, {f"RUN {file}": file for _, files in runs for file in files})
    return Path(cfg.results_path)


def _row(curve: Curve, cfg: PlotConfig) -> dict[str, object]:
    row = {"run": curve.name, "seeds": len(curve.values), cfg.over: float(curve.x[-1])}
    row |= {f"last {cfg.figure}": curve.values[:, -1], f"lowest {cfg.figure}": curve.lowest}
    if cfg.reach is not None:
        row[f"{cfg.over} to {cfg.reach:g}"] = curve.reaches(cfg.reach)
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
