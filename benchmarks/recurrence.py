"""A small version of table 6 of Dai et al. 2019: recurrence × position encoding × half or full
loss.

    python -m benchmarks.recurrence DATA --updates 3000 --seeds 1,2,3 --out DIR

All rows are trained with the same size, segments, order, updates, seeds and learning rate, and
evaluated on the validation split at several attention lengths: models with relative positions by
segments with memory, the others by a sliding window. An interrupted run resumes after the last
complete row and seed. Writes all figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    recurrence: bool
    encoding: str
    loss: str

    @property
    def name(self) -> str:
        """Name of the row's folder."""
        return f"{self.encoding}-{'recurrent' if self.recurrence else 'alone'}-{self.loss}"

    @property
    def by_distance(self) -> bool:
        """True if positions are relative, so that evaluation can use a memory."""
        return self.encoding in ("relative", "shaw")


ROWS = [  # in the paper's order, best first
    Row(True, "relative", "full"),
    Row(True, "shaw", "full"),
    Row(True, "relative", "half"),
    Row(False, "relative", "full"),
    Row(False, "relative", "half"),
    Row(False, "shaw", "full"),
    Row(False, "shaw", "half"),
    Row(False, "absolute", "half"),
    Row(False, "learned", "half"),
]


def folder_of(args: argparse.Namespace, row: Row, seed: int) -> Path:
    """The folder of a row's run."""
    return Path(args.out / f"{row.name}-{seed}")


def train_command(args: argparse.Namespace, row: Row, seed: int) -> list[str]:
    """The training command of *row*."""
    memory = str(args.segment if row.recurrence else 0)
    return [
        *("train.py", str(args.data), "--arch", "transformer_xl", "--cpu", "--criterion", "cross_entropy"),
        *("--n-layer", "4", "--d-model", "128", "--n-head", "4", "--d-inner", "512", "--dropout", "0"),
        *(("--cutoffs", args.cutoffs) if args.cutoffs else ()),
        *("--tokens-per-sample", str(args.segment), "--mem-len", memory, "--batch-size", "16", "--streams"),
        *("--position-encoding", row.encoding, "--loss-positions", row.loss, "--required-batch-size-multiple", "1"),
        *("--optimizer", "adam", "--lr", "1e-7", "--max-lr", "0.001", "--warmup-init-lr", "1e-7"),
        *("--lr-scheduler", "cosine", "--warmup-updates", "200", "--lr-period-updates", str(args.updates - 200)),
        *("--max-update", str(args.updates), "--clip-norm", "0.25", "--seed", str(seed), "--disable-validation"),
        *("--no-epoch-checkpoints", "--save-dir", str(folder_of(args, row, seed)), "--log-format", "json"),
        *("--log-interval", "100"),
    ]


def evaluate_command(args: argparse.Namespace, row: Row, seed: int, attention: int) -> list[str]:
    """The evaluation command for an attention length of up to *attention* tokens."""
    step, folder = args.segment // 2, folder_of(args, row, seed)
    if row.by_distance:
        reading = ["--tokens-per-sample", str(step), "--mem-len", str(attention - step), "--batch-size", "8"]
    else:
        reading = ["--tokens-per-sample", str(attention), "--context-window", str(attention - step)]
        reading += ["--max-tokens", str(max(4096, attention))]
    return [
        *("eval_lm.py", str(args.data), "--path", str(folder / "checkpoint_last.pt"), "--cpu"),
        *("--gen-subset", "valid", "--results-path", str(folder), *reading),
    ]


def run(command: list[str], log: Path) -> None:
    """Run a command of the project; write its output to *log*."""
    print("$ python " + shlex.join(command), flush=True)
    with open(log, "w", encoding="utf-8") as file:
        script = [sys.executable, str(ROOT / command[0]), *command[1:]]
        code = subprocess.run(script, stdout=file, stderr=subprocess.STDOUT, env=dict(os.environ)).returncode
    if code:
        sys.exit(f"the run failed; see {log}")


def measure(args: argparse.Namespace, row: Row, seed: int) -> dict[str, Any]:
    """Train and evaluate *row*, unless that is done."""
    folder = folder_of(args, row, seed)
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "row.json"
    if done.exists():
        return dict(json.loads(done.read_text(encoding="utf-8")))
    start = time.perf_counter()
    run(train_command(args, row, seed), folder / "train.log")
    result: dict[str, Any] = {
        "row": asdict(row),
        "seed": seed,
        "train_seconds": time.perf_counter() - start,
        "perplexity": {},
    }
    for attention in args.attention:
        run(evaluate_command(args, row, seed, attention), folder / f"eval-{attention}.log")
        figures = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        result["perplexity"][str(attention)] = figures["perplexity"]
    done.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def table(results: list[dict[str, Any]], lengths: list[int], bits: bool) -> str:
    """Means and standard deviations over seeds as Markdown: perplexity, or bits per character."""
    lines = [
        "| recurrence | encoding | loss | seeds | " + " | ".join(f"attention {n}" for n in lengths) + " |",
        "|---|---|---|---|" + "---|" * len(lengths),
    ]
    digits = 3 if bits else 2
    for row in {Row(**result["row"]): None for result in results}:
        runs = [result["perplexity"] for result in results if Row(**result["row"]) == row]
        means = {n: statistics.fmean(figure(run[str(n)], bits) for run in runs) for n in lengths}
        cells = []
        for n in lengths:
            spread = statistics.stdev(figure(run[str(n)], bits) for run in runs) if len(runs) > 1 else 0.0
            cell = f"{means[n]:.{digits}f}" + (f" ± {spread:.{digits}f}" if len(runs) > 1 else "")
            cells.append(f"**{cell}**" if means[n] == min(means.values()) else cell)
        recurrence = "yes" if row.recurrence else "no"
        lines.append(f"| {recurrence} | {row.encoding} | {row.loss} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(perplexity: float, bits: bool) -> float:
    """*perplexity*, or its logarithm in bits."""
    return math.log2(perplexity) if bits else perplexity


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder made by fairseq-preprocess")
    parser.add_argument("--updates", type=int, default=3000, help="updates per row, 200 of them warmup (default: 3000)")
    parser.add_argument("--segment", type=int, default=64, help="tokens of a segment, and of memory (default: 64)")
    parser.add_argument("--attention", default="64,128,256,512", help="attention lengths of evaluation")
    parser.add_argument("--cutoffs", default=None, help="bands of the vocabulary (default: one)")
    parser.add_argument("--bits", action="store_true", help="report bits per token instead of perplexity")
    parser.add_argument("--seeds", default="1", help="seeds of each row, e.g. 1,2,3 (default: 1)")
    parser.add_argument("--rows", default=None, help="numbers of rows, e.g. 0,3 (default: all)")
    parser.add_argument("--out", type=Path, default=Path("recurrence"), metavar="DIR", help="output folder")
    args = parser.parse_args(argv)
    args.attention = [int(n) for n in args.attention.split(",")]
    chosen = range(len(ROWS)) if args.rows is None else map(int, args.rows.split(","))
    started = time.strftime("%F %T")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    results = [measure(args, ROWS[number], seed) for number in chosen for seed in seeds]
    report = {
        "machine": machine.describe(torch.device("cpu")),
        "started": started,
        "command": "python -m benchmarks.recurrence " + shlex.join(sys.argv[1:]),
        "results": results,
    }
    (args.out / "recurrence.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(results, args.attention, args.bits))


if __name__ == "__main__":
    main()
