"""Staged and unstaged training at equal wall-clock time, Shortformer and baseline.

    python -m benchmarks.staged_training DATA --minutes 5 --stage-updates 300

Two runs train in parallel, each on one core: one in two stages (``--short`` tokens per sample for ``--stage-updates``
updates, then ``--long``), one on ``--long`` tokens throughout. Both stop after the same time and are evaluated on the
test split. Writes all figures as JSON and the validation curves as PNG.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine

ROOT = Path(__file__).resolve().parents[1]
ENDLESS = 1_000_000


def train_command(args: argparse.Namespace, arch: str, staged: bool, folder: Path) -> list[str]:
    """The training command of one run."""
    length = ["--tokens-per-sample", str(args.long), "--max-update", str(ENDLESS)]
    if staged:
        length = ["--stages", f"{args.short}:{args.stage_updates},{args.long}:{ENDLESS}"]
    return [
        *(str(ROOT / "train.py"), str(args.data), "--arch", arch, "--criterion", "adaptive_loss", "--cpu", *length),
        *("--adaptive-input-cutoff", args.cutoffs, "--adaptive-softmax-cutoff", args.cutoffs),
        *("--max-tokens", str(args.max_tokens), "--max-tokens-valid", str(args.max_tokens)),
        *("--required-batch-size-multiple", "1", "--optimizer", "adam", "--adam-betas", "0.9,0.98"),
        *("--lr", "0.001", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "200", "--warmup-init-lr", "1e-7"),
        *("--clip-norm", "0.25", "--dropout", "0.1", "--adaptive-softmax-dropout", "0.1", "--seed", "1"),
        *("--validate-interval-updates", str(args.validate_every), "--stop-time-hours", f"{args.minutes / 60:.6f}"),
        *("--no-epoch-checkpoints", "--save-dir", str(folder), "--log-format", "json", "--log-interval", "50"),
        *args.extra,
    ]


def evaluate_command(args: argparse.Namespace, folder: Path, *flags: str) -> list[str]:
    """The evaluation command of one run."""
    where = ["--path", str(folder / "checkpoint_last.pt"), "--gen-subset", "test", "--cpu", "--max-sentences", "1"]
    return [str(ROOT / "eval_lm.py"), str(args.data), *where, "--results-path", str(folder), *flags]


def side_by_side(commands: list[tuple[list[str], Path]]) -> None:
    """Run commands in parallel, each on its own core, with output to files."""
    cores = sorted(os.sched_getaffinity(0))
    running = []
    for number, (command, log) in enumerate(commands):
        core = cores[number % len(cores)]
        print("$ python " + shlex.join([Path(command[0]).name, *command[1:]]), flush=True)
        running.append(
            subprocess.Popen(
                ["taskset", "-c", str(core), sys.executable, *command],
                stdout=open(log, "w", encoding="utf-8"),  # noqa: SIM115
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        )
    if any(process.wait() for process in running):
        sys.exit("a run failed; see " + ", ".join(str(log) for _, log in commands))


def records_of(log: Path) -> list[dict[str, Any]]:
    """The objects of a JSON log, which stand behind date, level and tag."""
    parts = (line.partition(" | {") for line in log.read_text(encoding="utf-8").splitlines())
    return [json.loads("{" + values) for _, mark, values in parts if mark]


def curve(log: Path) -> list[tuple[float, float]]:
    """(seconds of training, validation loss in bits) from a JSON log."""
    records = records_of(log)
    return [(record["valid_wall"], record["valid_loss"]) for record in records if "valid_loss" in record]


def summary(log: Path, folder: Path) -> dict[str, Any]:
    """Updates, speed and test perplexity of one run."""
    records = records_of(log)
    # Lines within the first interval repeat its updates.
    steps = [record for record in records if "wps" in record and record.get("num_updates", 1) % 50 == 0]
    result = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    lengths = sorted({record.get("tokens_per_sample", 0) for record in steps})
    speeds = {n: [r["wps"] for r in steps if r.get("tokens_per_sample", 0) == n] for n in lengths}
    return {
        "updates": max(record["num_updates"] for record in steps),
        "tokens": sum(record["wpb"] * 50 for record in steps),
        "tokens_per_second": {str(n): sorted(values)[len(values) // 2] for n, values in speeds.items()},
        "curve": curve(log),
        "test": result,
    }


def plot(curves: dict[str, list[tuple[float, float]]], title: str, path: Path) -> None:
    """Plot validation loss over minutes of training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    styles = {"Shortformer": "#1f77b4", "baseline": "#d62728"}
    for name, points in curves.items():
        minutes = [seconds / 60 for seconds, _ in points]
        colour = next(c for word, c in styles.items() if name.startswith(word))
        axes.plot(minutes, [loss for _, loss in points], "--" if "unstaged" in name else "-", color=colour, label=name)
    axes.set(xlabel="wall-clock time (minutes, one core)", ylabel="validation loss (bits per token)", title=title)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder made by fairseq-preprocess")
    parser.add_argument("--minutes", type=float, default=5, help="wall-clock time of each run (default: 5)")
    parser.add_argument("--stage-updates", type=int, default=300, help="updates of the first stage (default: 300)")
    parser.add_argument("--short", type=int, default=64, help="tokens per sample of the first stage (default: 64)")
    parser.add_argument("--long", type=int, default=512, help="tokens per sample afterwards (default: 512)")
    parser.add_argument("--max-tokens", type=int, default=2048, help="tokens per update (default: 2048)")
    parser.add_argument("--validate-every", type=int, default=50, help="updates between validations (default: 50)")
    parser.add_argument("--cutoffs", default="2000,8000", help="bands of the vocabulary (default: 2000,8000)")
    parser.add_argument("--title", default="Staged and unstaged training", help="title of the plot")
    parser.add_argument("--out", type=Path, default=Path("staged"), metavar="DIR", help="output folder")
    args, extra = parser.parse_known_args(argv)
    args.extra = extra
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine.describe(torch.device("cpu")), "started": time.strftime("%F %T")}
    report["command"] = "python -m benchmarks.staged_training " + shlex.join(sys.argv[1:])
    curves = {}
    for model, arch in (("Shortformer", "shortformer_demo"), ("baseline", "transformer_lm_demo")):
        runs = {kind: args.out / re.sub(r"\W", "-", f"{model} {kind}".lower()) for kind in ("staged", "unstaged")}
        for folder in runs.values():
            folder.mkdir(exist_ok=True)
        side_by_side([(train_command(args, arch, kind == "staged", f), f / "train.log") for kind, f in runs.items()])
        side_by_side([(evaluate_command(args, f), f / "eval.log") for f in runs.values()])
        for kind, folder in runs.items():
            report[f"{model}, {kind}"] = summary(folder / "train.log", folder)
            curves[f"{model}, {kind}"] = report[f"{model}, {kind}"]["curve"]
    plot(curves, args.title, args.out / "staged.png")
    (args.out / "staged.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for name in curves:
        run = report[name]
        speeds = ", ".join(f"{speed:,.0f} tokens/s" for speed in run["tokens_per_second"].values())
        print(f"{name:24} {run['updates']:6,} updates  {speeds:32} test perplexity {run['test']['perplexity']:.2f}")


if __name__ == "__main__":
    main()
