"""Time until a language model is as good as a tuned baseline: each lever alone, then one after
another.

    # all rows, with the corpus that it makes itself
    python -m benchmarks.time_to_quality OUT
    python -m benchmarks.time_to_quality OUT --data data-bin/novels --seeds 1,2,3
    # these rows only; --list names all
    python -m benchmarks.time_to_quality OUT --rows 'muon;+muon' --seeds 4
    # the time of an update of each row
    python -m benchmarks.time_to_quality OUT --clock 240
    # without the runs of the grid
    python -m benchmarks.time_to_quality OUT --baseline wsd@5e-3 --rows muon
    # a row of your own
    python -m benchmarks.time_to_quality OUT --row 'wide@0.9: --decoder-ffn-embed-dim 1024'

The baseline is the model of Baevski & Auli (2019) at one length, in fp32, by Adam; its schedule and
batch (``GRID``) and its rate (``RATES``) are those with the lowest perplexity on the validation
split (seed 1), at equal tokens read. The *target* is the mean of its final perplexities on the test
split. A run's figure is the number of updates, and their CPU time, after which its perplexity
on the test split stays below the target, interpolated between validations in the logarithm of the
perplexity. The settings of levers are in ``levers.py``; they are added to the baseline's, whose
rate they have. A row called ``+beta2`` has the levers of the list up to ``beta2``. Since schedules
end with a run, each row has its number of updates. A perplexity is that in blocks of the length
that the run has then.

Other programs on the machine change the CPU time of a run, not its updates. ``--clock``
measures the time of an update of all rows in turns, to OUT/clock.jsonl; the table then has updates
times their median time.

Runs train one after another with one thread. Each is a line of OUT/runs.jsonl with its flags,
commit, machine and date; a run that is there is not repeated. The corpus, unless ``--data`` names a
folder of ``fairseq-preprocess``, is that of ``fairseq-demo``: the prose of Python's help and of
docstrings.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.levers import BASELINE, GRID, RATES, SIZES, Row, Size, flags_of, rows, stage_ends
from fairseq.analysis.curves import Curve
from fairseq.analysis.plots import CURVE_FORMATS, draw_curves, require
from fairseq.errors import UserError

VALIDATION = 8192
"""Tokens of each of the splits that are validated: with memory, the first steps of a larger one
read other tokens."""


class Runs:
    """The runs of a folder, in its file ``runs.jsonl``.

    Args:
        folder: made if it is not there.
        data: folder of ``fairseq-preprocess``.
    """

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data = folder, data
        self.path = folder / "runs.jsonl"
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        complete = text[: text.rfind("\n") + 1]
        if complete != text:  # killed while it was written
            self.path.write_text(complete, encoding="utf-8")
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in complete.splitlines()]

    def curve(self, row: str, flags: Sequence[str]) -> list[dict[str, float]]:
        """Return the curve of the run of *row* with *flags*, which is made unless it is there."""
        key = {"row": row, "data": self.data.name, "flags": shlex.join(flags)}
        for line in self.lines:
            if key.items() <= line.items():
                return line["curve"]
        print(f"{row}: fairseq-train {self.data} {key['flags']}", flush=True)
        line = {**key, "curve": self.train(flags), **self.origin()}
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return line["curve"]

    def origin(self) -> dict[str, object]:
        """Return the machine, the versions, the commit and the date."""
        return {**machine.describe(torch.device("cpu")), "threads": 1}

    def seconds(self, row: str) -> list[float] | None:
        """Return the median CPU time of an update in each stage of *row* from clock.jsonl, if
        it is there."""
        path = self.folder / "clock.jsonl"
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        rounds = [line["seconds"] for line in lines if line["row"] == row]
        return [statistics.median(stage) for stage in zip(*rounds, strict=True)] or None

    def timed(self, row: str, flags: Sequence[str]) -> list[dict[str, float]]:
        """Return the curve of *row*, with the times of clock.jsonl where that has the row."""
        curve, seconds = self.curve(row, flags), self.seconds(row)
        return retimed(curve, stage_ends(flags), seconds) if seconds else curve

    def train(self, flags: Sequence[str]) -> list[dict[str, float]]:
        """Train in a process of one thread, and return the curve."""
        curve, log = self.folder / "curve.json", self.folder / "train.log"
        command = [sys.executable, "-m", "benchmarks.clocked_training", str(curve), str(self.data), *flags]
        with log.open("w", encoding="utf-8") as output:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        if done.returncode:
            sys.exit(f"a run failed; see {log}")
        return json.loads(curve.read_text(encoding="utf-8"))


def clock(runs: Runs, chosen: Sequence[Row], size: Size, seconds: float) -> None:
    """Measure the CPU time per update of the *chosen* rows, in turns for about *seconds*; append it
    to clock.jsonl."""
    short, begin = replace(size, updates=48, validations=12), time.perf_counter()
    while True:
        for row in chosen:
            flags = [*flags_of(replace(row, share=1.0), short, RATES[0], 1, "valid"), "--max-valid-steps", "1"]
            seconds_each = costs(runs.train(flags), stage_ends(flags))
            line = {"row": row.name, "seconds": seconds_each, **runs.origin()}
            with (runs.folder / "clock.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{row.name}: {', '.join(f'{1000 * each:.1f}' for each in seconds_each)} ms an update", flush=True)
        if time.perf_counter() - begin > seconds:
            return


def costs(curve: Sequence[Mapping[str, float]], ends: Sequence[int]) -> list[float]:
    """Return the median CPU time of an update in each stage, between validations of that
    stage, in seconds."""
    medians = []
    for begin, end in zip([curve[0]["updates"], *ends], ends, strict=False):
        times = [
            (b["cpu"] - a["cpu"]) / (b["updates"] - a["updates"])
            for a, b in zip(curve, curve[1:], strict=False)
            if begin <= a["updates"] < b["updates"] <= end
        ]
        medians.append(statistics.median(times))
    return medians


def retimed(
    curve: Sequence[Mapping[str, float]], ends: Sequence[int], seconds: Sequence[float]
) -> list[dict[str, float]]:
    """Return *curve* with the times that updates of *seconds* in each stage take."""
    spans = [(begin, end, cost) for begin, end, cost in zip([0, *ends], ends, seconds, strict=False)]
    return [
        {**point, "cpu": sum(max(0, min(point["updates"], end) - begin) * cost for begin, end, cost in spans)}
        for point in curve
    ]


def time_to(curve: Sequence[Mapping[str, float]], target: float, clock: str = "cpu") -> float | None:
    """Return the time on *clock* from which on the perplexities of *curve* stay below *target*;
    None if they do not."""
    above = [index for index, point in enumerate(curve) if not point["ppl"] < target]
    if not above:
        return curve[0][clock]
    if above[-1] == len(curve) - 1:
        return None
    before, after = curve[above[-1]], curve[above[-1] + 1]
    high, low = math.log(before["ppl"]), math.log(after["ppl"])
    share = (high - math.log(target)) / (high - low)
    return before[clock] + share * (after[clock] - before[clock])


def welch(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the two-sided p-value of Welch's t-test of equal means; None where a sample has fewer
    than two values.

    Source: Welch 1947, "The generalization of Student's problem when several different population
    variances are involved".
    """
    if min(len(a), len(b)) < 2:
        return None
    errors = [statistics.variance(sample) / len(sample) for sample in (a, b)]
    difference = abs(statistics.fmean(a) - statistics.fmean(b))
    if sum(errors) == 0:
        return 0.0 if difference else 1.0
    freedom = sum(errors) ** 2 / sum(e**2 / (len(s) - 1) for e, s in zip(errors, (a, b), strict=True))
    # With t = √ν · tan θ the density of Student's t is proportional to cos^(ν − 1) θ: its tails by
    # Simpson's rule.
    angle = math.atan(difference / math.sqrt(sum(errors)) / math.sqrt(freedom))
    tail, half = (_simpson(start, math.pi / 2, freedom - 1) for start in (angle, 0.0))
    return tail / half


def _simpson(start: float, end: float, power: float, steps: int = 2000) -> float:
    width = (end - start) / steps
    values = [max(0.0, math.cos(start + i * width)) ** power for i in range(steps + 1)]
    return width / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))


def table(curves: Mapping[str, Sequence[list[dict[str, float]]]]) -> str:
    """Return the Markdown table of the *curves* of each row, one for each seed; the first row is
    the baseline."""
    baseline = next(iter(curves.values()))
    target = statistics.fmean(curve[-1]["ppl"] for curve in baseline)
    # Half of the baseline's runs end above their mean; a run that does not reach the target counts
    # with all its time.
    reference = [time_to(curve, target) or curve[-1]["cpu"] for curve in baseline]
    lines = [
        f"Target: perplexity {target:.2f} on the test split, {len(baseline)} seed(s) of the baseline.",
        "",
        "| row | seeds | updates to the target | ms an update | CPU time (s) | times less | p"
        " | final perplexity | updates |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, runs in curves.items():
        updates, cpu = (
            [time_to(curve, target, clock) or (curve[-1][clock] if runs is baseline else None) for curve in runs]
            for clock in ("updates", "cpu")
        )
        reached = [time for time in cpu if time is not None]
        if len(reached) < len(runs):
            cells = [f"not reached by {len(runs) - len(reached)}", "", "", "", ""]
        else:
            p = None if runs is baseline else welch(reference, reached)
            ratio = statistics.fmean(reference) / statistics.fmean(reached)
            each = 1000 * statistics.fmean(curve[-1]["cpu"] / curve[-1]["updates"] for curve in runs)
            counts = [count for count in updates if count is not None]
            times = [_mean(counts), f"{each:.1f}", _mean(reached, 1)]
            cells = [*times, f"{ratio:.2f}", "" if p is None else f"{p:.2g}"]
        final = [curve[-1]["ppl"] for curve in runs]
        row = [name, str(len(runs)), *cells, _mean(final, 1), f"{runs[0][-1]['updates']:.0f}"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def plot(path: Path, curves: Mapping[str, Sequence[list[dict[str, float]]]]) -> None:
    """Plot the perplexity of each row over its CPU time, mean and range of the seeds, and the
    target."""
    drawn = []
    for name, runs in curves.items():
        # Seeds validate after the same updates at slightly different times, of which a point has
        # the mean.
        x, values = (np.array([[point[key] for point in curve] for curve in runs]) for key in ("cpu", "ppl"))
        drawn.append(Curve(name, x.mean(0), values))
    target = round(float(drawn[0].mean[-1]), 1)
    draw_curves(path, drawn, "CPU time of training (s)", "perplexity", target)


def _mean(values: Sequence[float], digits: int = 0) -> str:
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def make_corpus(folder: Path) -> Path:
    """Make the demo's corpus in *folder*, unless it is there; return its data folder."""
    data = folder / "data-bin"
    if not (data / "checksums.txt").exists():
        corpus = folder / "corpus"
        _command("corpus", "pydoc", str(corpus))
        for split in ("valid", "test"):
            path = corpus / f"{split}.txt"
            path.write_text("".join(_first(path.read_text(encoding="utf-8"), VALIDATION)), encoding="utf-8")
        texts = [w for s in ("train", "valid", "test") for w in (f"--{s}pref", f"{corpus}/{s}.txt")]
        _command("preprocess", "--only-source", *texts, "--destdir", str(data))
    return data


def _command(name: str, *flags: str) -> None:
    subprocess.run([sys.executable, "-m", f"fairseq_cli.{name}", *flags], check=True, stdout=subprocess.DEVNULL)


def _first(text: str, tokens: int) -> Iterable[str]:
    """Yield the first lines of *text* that have no more than so many *tokens*, ends of lines
    included."""
    for line in text.splitlines(keepends=True):
        tokens -= len(line.split()) + 1
        if tokens < 0:
            return
        yield line


def tune(runs: Runs, size: Size) -> tuple[Row, str]:
    """Return the baseline's settings and rate from the runs of the grid, which are made unless they
    are there."""
    grid = {
        (row, rate): runs.curve(f"grid: {row.name}", flags_of(row, size, rate, 1, "valid"))[-1]["ppl"]
        for row in GRID
        for rate in RATES
    }
    for row in GRID:
        print(f"grid: {row.name}: {', '.join(f'{rate}: {grid[row, rate]:.2f}' for rate in RATES)}")
    tuned, rate = min(grid, key=lambda each: grid[each])
    print(f"baseline: {tuned.name}, rate {rate}", flush=True)
    return tuned, rate


def measure(
    runs: Runs, chosen: Iterable[Row], size: Size, rate: str, seeds: Iterable[int]
) -> dict[str, list[list[dict[str, float]]]]:
    """Make the runs of the *chosen* rows that are not there; return the curves of each row, one for
    each seed."""
    return {
        row.name: [runs.timed(row.name, flags_of(row, size, rate, seed, "test")) for seed in seeds] for row in chosen
    }


def _tuned(text: str) -> tuple[Row, str]:
    known = {row.name: row for row in GRID}
    name, _, rate = text.rpartition("@")
    if name not in known or not _number(rate):
        raise argparse.ArgumentTypeError(f"{text!r}: expected SCHEDULE@RATE, a schedule of: {'; '.join(known)}")
    return known[name], rate


def _row(text: str) -> Row:
    match = re.fullmatch(r"([^:@]+)(?:@([\d.]+))?:\s*(.*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME: FLAGS or NAME@SHARE: FLAGS")
    return Row(match[1].strip(), match[3], _number(match[2] or "1"))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 0")
    return value


def _whole(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number above 0")
    return int(text)


def _plot(text: str) -> Path:
    path = Path(text)
    if path.suffix not in CURVE_FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a file name that ends in {', '.join(CURVE_FORMATS)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: no folder {path.parent}")
    try:
        require("--plot")
    except UserError as error:  # before hours of training
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def _seeds(text: str) -> list[int]:
    return [_whole(seed.strip()) for seed in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for runs.jsonl, table.md and the corpus")
    parser.add_argument("--data", type=Path, help="folder made by fairseq-preprocess (default: the demo's corpus)")
    parser.add_argument("--size", choices=SIZES, default="small", help="model and length of training (default: small)")
    parser.add_argument("--updates", type=_whole, help="of the baseline (default: the size's)")
    parser.add_argument(
        "--baseline",
        type=_tuned,
        metavar="SCHEDULE@RATE",
        help="the grid's best, if it is known (default: run the grid)",
    )
    parser.add_argument("--rows", help="names of rows, with semicolons between them (default: all)")
    parser.add_argument("--row", type=_row, action="append", default=[], help="NAME[@SHARE]: FLAGS, a row of your own")
    parser.add_argument("--seeds", type=_seeds, default=[1, 2, 3], help="seeds of every row (default: 1,2,3)")
    parser.add_argument("--clock", type=_number, metavar="SECONDS", help="measure the time of updates only, in turns")
    parser.add_argument("--plot", type=_plot, metavar="FILE", help="draw perplexity over CPU time (.png, .svg, .pdf)")
    parser.add_argument("--list", action="store_true", help="print the rows, and train nothing")
    args = parser.parse_args(argv)
    known = {row.name: row for row in rows(SIZES[args.size])}
    names = [name.strip() for name in args.rows.split(";")] if args.rows else list(known) if not args.row else []
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--rows: no row {unknown[0]!r}; known: {'; '.join(known)}")
    chosen = [*(known[name] for name in names), *args.row]
    if args.list:
        print("\n".join(f"{row.name}: {row.flags}" for row in chosen))
        return
    if args.data is not None and not (args.data / "dict.txt").is_file():
        parser.error(f"--data {args.data}: no dict.txt; give a folder of fairseq-preprocess")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        runs = Runs(args.out, args.data or make_corpus(args.out))
    except (OSError, json.JSONDecodeError) as error:
        parser.error(f"{args.out}: {error}; give a new folder, or that of earlier runs")
    size = replace(SIZES[args.size], updates=args.updates or SIZES[args.size].updates)
    tuned, rate = args.baseline or tune(runs, size)
    chosen = [tuned.under(row) for row in [BASELINE, *(row for row in chosen if row != BASELINE)]]
    if args.clock is not None:
        clock(runs, chosen, size, args.clock)
        return
    curves = measure(runs, chosen, size, rate, args.seeds)
    if args.plot is not None:
        plot(args.plot, curves)
    text = table(curves)
    print(text)
    (args.out / "table.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
