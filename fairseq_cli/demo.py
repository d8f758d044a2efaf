"""Train and evaluate a small Shortformer in a few minutes on two cores (``fairseq-demo``).

Prepares a corpus, preprocesses it, trains in two stages, evaluates non-overlapping and token by token, prints a table
and a sample of generated text, and plots the loss. All output is written to ``demo/``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT = "This function returns"
BATCH = 1024  # tokens per update
SHORT, LONG = 32, 128  # tokens per sample of the two stages


@dataclass
class Finished:
    """Result of a command: output, duration and peak memory."""

    output: list[str]
    seconds: float
    megabytes: float


@dataclass
class Row:
    """A line of the table."""

    name: str
    tokens_per_second: float
    perplexity: float
    megabytes: float


def run(command: str, *flags: str, show: Callable[[str], str | None] = str) -> Finished:
    """Run a module of :mod:`fairseq_cli`; *show* maps a line of its output to the text to print, or None.

    If it fails, print the end of its output and exit with its exit code.
    """
    print(f"\n$ fairseq-{command.replace('_', '-')} {shlex.join(flags)}", flush=True)
    start = time.perf_counter()
    output: list[str] = []
    words = [sys.executable, "-m", f"fairseq_cli.{command}", *flags]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line.rstrip("\n"))
            shown = show(output[-1])
            if shown:
                print(f"  {shown}", flush=True)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        print(*[line for line in output if not show(line)][-20:], sep="\n", file=sys.stderr)
        sys.exit(process.returncode)
    unit = 1024**2 if sys.platform == "darwin" else 1024
    return Finished(output, time.perf_counter() - start, usage.ru_maxrss / unit)


# ---- the steps -------------------------------------------------------------------------------------------------------


def prepare(folder: Path, max_words: int | None) -> None:
    """Make the corpus and preprocess it."""
    limit = ["--max-words", str(max_words)] if max_words else []
    run("demo_corpus", str(folder / "corpus"), *limit)
    texts = [word for s in ("train", "valid", "test") for word in (f"--{s}pref", f"{folder}/corpus/pydoc.{s}.tokens")]
    destination = ["--destdir", str(folder / "data-bin"), "--workers", str(os.cpu_count() or 1)]
    run(
        "preprocess",
        "--only-source",
        *texts,
        *destination,
        show=lambda line: line.removeprefix("[None] ") if line.startswith("[") else None,
    )


def train(folder: Path, stages: tuple[int, int], cutoffs: str) -> Finished:
    """Train in two stages in one run; write the log to ``train.jsonl``."""
    finished = run(
        "train",
        str(folder / "data-bin"),
        *("--task", "language_modeling", "--arch", "shortformer_demo", "--criterion", "adaptive_loss"),
        *("--adaptive-input-cutoff", cutoffs, "--adaptive-softmax-cutoff", cutoffs),
        *("--stages", f"{SHORT}:{stages[0]},{LONG}:{stages[1]}", "--max-tokens", str(BATCH)),
        *("--optimizer", "adam", "--clip-norm", "0.25", "--lr-scheduler", "cosine", "--lr", "1e-5", "--max-lr", "2e-3"),
        *("--warmup-updates", str(stages[0] // 4), "--warmup-init-lr", "1e-7", "--max-update", str(stages[1])),
        *("--sample-break-mode", "none", "--required-batch-size-multiple", "1", "--curriculum", "1000"),
        *("--validate-interval-updates", str(max(1, stages[1] // 8)), "--no-epoch-checkpoints", "--cpu", "--seed", "1"),
        *("--save-dir", str(folder / "checkpoints"), "--log-format", "json", "--log-interval", "10"),
        show=progress,
    )
    (folder / "train.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in records(finished.output)), encoding="utf-8"
    )
    return finished


def evaluate(folder: Path, name: str, *flags: str) -> Row:
    """Evaluate the test text with one kind of inference."""
    summary = re.compile(r"Evaluated .*|Loss \(base 2\).*")
    finished = run(
        "eval_lm",
        *(str(folder / "data-bin"), "--path", str(folder / "checkpoints" / "checkpoint_last.pt")),
        *("--gen-subset", "test", "--sample-break-mode", "none", "--max-sentences", "1", "--cpu", *flags),
        show=lambda line: found[0] if (found := summary.search(line)) else None,
    )
    text = "\n".join(finished.output)
    speed, perplexity = (re.search(p, text) for p in (r"\(([\d.]+) tokens/s\)", r"Perplexity: ([\d.]+)"))
    if speed is None or perplexity is None:
        sys.exit(f"fairseq-eval-lm: no summary in its output:\n{text}")
    return Row(name, float(speed[1]), float(perplexity[1]), finished.megabytes)


def sample(folder: Path) -> str:
    """Text sampled from the trained model."""
    from fairseq.hub import LanguageModel

    model = LanguageModel.from_pretrained(str(folder / "checkpoints" / "checkpoint_last.pt"), str(folder / "data-bin"))
    return str(model.sample(PROMPT, max_tokens=120, temperature=0.8, top_k=40, seed=1))


# ---- the log ---------------------------------------------------------------------------------------------------------


def record(line: str) -> dict[str, Any] | None:
    """The figures of a line of a JSON log, None for other lines."""
    if not line.startswith("{"):
        return None
    values: dict[str, Any] = json.loads(line)
    return values


def records(lines: Iterable[str]) -> list[dict[str, Any]]:
    return [found for line in lines if (found := record(line)) is not None]


def progress(line: str) -> str | None:
    """A readable line for a validation record of the training log, None for other lines."""
    values = record(line)
    if values is None:
        return None
    if "valid_loss" in values:
        return f"update {values['valid_num_updates']:5,}   validation: perplexity {2 ** values['valid_loss']:.1f}"
    if "loss" in values:
        place, perplexity = values["num_updates"], 2 ** values["loss"]
        return f"update {place:5,}   perplexity {perplexity:7.1f}   {values['wps']:6,.0f} tokens/s"
    return None


def training_rows(finished: Finished, boundary: int) -> list[Row]:
    """Speed and last validation perplexity of both stages."""
    log = records(finished.output)
    rows = []
    for name, low, high in ((f"training, {SHORT} tokens", 0, boundary), (f"training, {LONG} tokens", boundary, 10**9)):
        steps = [values for values in log if "wps" in values and low < values["num_updates"] <= high]
        speed = statistics.median(values["wps"] for values in steps) if steps else float("nan")
        valid = [values["valid_loss"] for values in log if low < values.get("valid_num_updates", -1) <= high]
        rows.append(Row(name, speed, 2 ** valid[-1] if valid else float("nan"), finished.megabytes))
    return rows


def table(rows: list[Row]) -> str:
    """The figures of every step, aligned."""
    lines = [f"{'':27}{'tokens/s':>10}{'perplexity':>13}{'memory':>10}"]
    for row in rows:
        speed, perplexity = f"{row.tokens_per_second:,.0f}", f"{row.perplexity:,.2f}"
        lines.append(f"{row.name:27}{speed:>10}{perplexity:>13}{row.megabytes:>7,.0f} MB".replace("nan", "  –"))
    return "\n".join(lines)


def plot(log: list[dict[str, Any]], boundary: int, path: Path) -> None:
    """Plot training and validation losses over the tokens read."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    thousand = BATCH / 1000
    train = [(v["num_updates"] * thousand, v["loss"]) for v in log if "wps" in v and "loss" in v]
    valid = [(v["valid_num_updates"] * thousand, v["valid_loss"]) for v in log if "valid_loss" in v]
    figure, axes = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    axes.plot(*zip(*train, strict=True), color="#1f77b4", linewidth=1.5, label="training")
    if valid:
        axes.plot(*zip(*valid, strict=True), "o-", color="#d62728", linewidth=1.5, markersize=5, label="validation")
    axes.set(xlabel="tokens read (thousands)", ylabel="cross-entropy (bits per token)")
    axes.set_title("Shortformer, 4 layers of width 256, trained in two stages")
    axes.set_xlim(left=0)
    axes.margins(y=0.08)
    axes.set_ylim(top=min(axes.get_ylim()[1], valid[0][1] + 4 if valid else 16))  # the first updates are off the chart
    axes.grid(alpha=0.3)
    perplexity = axes.secondary_yaxis("right", functions=(lambda bits: bits, lambda bits: bits))
    perplexity.set_ylabel("perplexity")
    perplexity.yaxis.set_major_formatter(lambda bits, _: f"{2**bits:,.0f}")
    axes.axvline(boundary * thousand, color="0.5", linestyle="--", linewidth=1)
    for side, text in (("right", f"segments of {SHORT} tokens  "), ("left", f"  segments of {LONG} tokens")):
        axes.text(boundary * thousand, 0.95, text, ha=side, transform=axes.get_xaxis_transform(), color="0.35")
    axes.legend(loc="center right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def cli_main(argv: list[str] | None = None) -> None:
    """``fairseq-demo``."""
    parser = argparse.ArgumentParser(
        prog="fairseq-demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo"), metavar="DIR", help="output folder (default: demo)"
    )
    parser.add_argument("--updates", type=int, nargs=2, default=(220, 560), metavar="N", help="ends of the two stages")
    parser.add_argument("--max-words", type=int, metavar="N", help="most words of text")
    parser.add_argument("--cutoffs", default="1000,4000", help="bands of the vocabulary")
    args = parser.parse_args(argv)

    start = time.perf_counter()
    folder, boundary = args.output, args.updates[0]
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    prepare(folder, args.max_words)
    trained = train(folder, tuple(args.updates), args.cutoffs)
    sliding = ("--sliding-inf", "1", "--context-window", str(LONG - 1), "--max-tokens", str(LONG))
    rows = [
        *training_rows(trained, boundary),
        evaluate(folder, "test, segment by segment"),
        evaluate(folder, "test, token by token", *sliding),
    ]
    plot(records(trained.output), boundary, folder / "loss.png")
    report = f"{table(rows)}\n\nA sample:\n\n{textwrap.indent(textwrap.fill(sample(folder), 100), '    ')}\n"
    (folder / "report.txt").write_text(report, encoding="utf-8")
    print(f"\n{report}\nIn {folder}/: loss.png, report.txt, train.jsonl, checkpoints/")
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    cli_main()
