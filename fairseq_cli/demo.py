"""Train and evaluate a small Shortformer in a few minutes on two cores.

Makes a corpus, preprocesses it, trains in two stages, evaluates non-overlapping and token by token,
prints a table and a sample of generated text, and plots the loss. All output is written to
--output. After an interruption the same command continues where it stopped.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import textwrap
import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from fairseq.config.fields import shortened
from fairseq.config.parser import Parser
from fairseq.errors import UserError
from fairseq.system.files import atomic_file, prepare_folder
from fairseq.system.terminal import printable
from fairseq_cli import command

PROMPT = "This function returns"
BATCH = 1024  # tokens per update
SHORT, LONG = 32, 128  # tokens per sample of the two stages
SETTINGS, LOG = "demo.json", "train.jsonl"
OUTPUTS = (SETTINGS, LOG, "checkpoints", "data-bin", "corpus", "loss.png", "report.txt")
# Runs a command as its console script does. With -m the current folder would be the first place for
# every import; Python 3.10 has neither -P nor PYTHONSAFEPATH, and -I would drop PYTHONPATH and
# packages of the user as well.
LAUNCHER = """import sys
root, module, *sys.argv = sys.argv[1:]
sys.path = [*filter(None, sys.path), root]
from importlib import import_module
import_module(module).cli_main()"""


def open_folder(folder: Path, settings: dict[str, object]) -> None:
    """Make *folder* that of a demo with *settings*; UserError if it has files of another one, or of
    something else."""
    prepare_folder("--output", folder)
    try:
        stored = json.loads((folder / SETTINGS).read_bytes())
    except (OSError, ValueError, RecursionError):
        stored = None
    there = [name for name in OUTPUTS if os.path.lexists(folder / name)]
    if there and stored != settings:
        # Training would resume from checkpoints of other settings.
        raise UserError(f"--output {folder}: has {there[0]}, not of a demo with these settings; use another")
    with atomic_file(folder / SETTINGS, "--output") as file:
        file.write(json.dumps(settings).encode())


def run(command: str, *flags: str, show: Callable[[str], str | None] = str) -> list[str]:
    """Run a module of :mod:`fairseq_cli`, and return the lines of its output; *show* maps a line to
    the text to print, or None.

    If it fails, print the end of its output and exit with its exit code. Modules are not looked for
    in the current folder.
    """
    name = f"fairseq-{command.replace('_', '-')}"
    print(f"\n$ {name} {printable(shlex.join(flags))}", flush=True)
    output: list[str] = []
    # The folder of this package comes last, for a source tree that is not installed.
    words = [sys.executable, "-c", LAUNCHER, str(Path(__file__).parents[1]), f"fairseq_cli.{command}", name, *flags]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        interrupted = False
        while True:
            try:
                for line in process.stdout:
                    output.append(printable(line.rstrip("\n")))
                    text = show(output[-1])
                    if text:
                        print(f"  {text}", flush=True)
                break
            except KeyboardInterrupt:
                if interrupted:
                    raise
                # The command got the signal as well: wait for it to save what it has.
                interrupted = True
    if interrupted:
        raise KeyboardInterrupt
    if process.returncode:
        print(*[line for line in output if not show(line)][-20:], sep="\n", file=sys.stderr)
        sys.exit(process.returncode)
    return output


# ---- the steps ---------------------------------------------------------------------------------


def prepare(folder: Path, max_words: int | None) -> None:
    if (folder / "data-bin" / "dict.txt").exists():
        return
    limit = ["--max-words", str(max_words)] if max_words else []
    run("corpus", "pydoc", str(folder / "corpus"), *limit)
    texts = [word for s in ("train", "valid", "test") for word in (f"--{s}pref", f"{folder}/corpus/{s}.txt")]
    destination = ["--destdir", str(folder / "data-bin"), "--workers", str(os.cpu_count() or 1)]
    run("preprocess", "--only-source", *texts, *destination, show=lambda line: None)


def train(folder: Path, stages: tuple[int, int], cutoffs: str) -> None:
    """Train in two stages in one run, or go on with it; write the log to ``train.jsonl``."""
    every = max(1, stages[1] // 8)  # updates from validation to validation, and from checkpoint to checkpoint
    run(
        "train",
        str(folder / "data-bin"),
        *("--task", "language_modeling", "--arch", "shortformer_demo", "--criterion", "adaptive_loss"),
        *("--adaptive-input-cutoff", cutoffs, "--adaptive-softmax-cutoff", cutoffs),
        *("--stages", f"{SHORT}:{stages[0]},{LONG}:{stages[1]}", "--max-tokens", str(BATCH)),
        *("--optimizer", "adam", "--clip-norm", "0.25", "--lr-scheduler", "cosine", "--lr", "1e-5", "--max-lr", "2e-3"),
        *("--warmup-updates", str(stages[0] // 4), "--warmup-init-lr", "1e-7", "--max-update", str(stages[1])),
        *("--sample-break-mode", "none", "--required-batch-size-multiple", "1", "--curriculum", "1000"),
        *("--validate-every", f"{every}u", "--save-every", f"{every}u,0ep", "--keep", "1u"),
        *("--cpu", "--seed", "1", "--save-dir", str(folder / "checkpoints")),
        *("--log-format", "json", "--log-interval", "10", "--metrics-file", str(folder / LOG)),
        show=progress,
    )


def evaluate(folder: Path, *flags: str) -> tuple[float, float]:
    """Evaluate the test text with one kind of inference: tokens per second and perplexity."""
    summary = re.compile(r"Evaluated .*|Loss \(base 2\).*")
    output = run(
        "eval_lm",
        *(str(folder / "data-bin"), "--path", str(folder / "checkpoints" / "checkpoint_last.pt")),
        *("--gen-subset", "test", "--sample-break-mode", "none", "--max-sentences", "1", "--cpu", *flags),
        show=lambda line: match[0] if (match := summary.search(line)) else None,
    )
    text = "\n".join(output)
    speed, perplexity = (re.search(p, text) for p in (r"\(([\d.]+) tokens/s\)", r"Perplexity: ([\d.]+)"))
    if speed is None or perplexity is None:
        sys.exit(f"fairseq-eval-lm: no summary in its output:\n{text}")
    return float(speed[1]), float(perplexity[1])


def sample(folder: Path) -> str:
    # Imported here, as what plots needs: the demo itself starts without torch.
    from fairseq.hub import LanguageModel

    model = LanguageModel.from_pretrained(str(folder / "checkpoints" / "checkpoint_last.pt"), str(folder / "data-bin"))
    return str(model.sample(PROMPT, max_tokens=120, temperature=0.8, top_k=40, seed=1))


# ---- the log -----------------------------------------------------------------------------------


def curve(folder: Path, tag: str, name: str) -> list[tuple[int, float]]:
    """The updates and values of the metric *name*
    in the records of *tag* in the log of training."""
    lines = (folder / LOG).read_text(encoding="utf-8").splitlines()
    records = [values for values in map(json.loads, lines) if values["tag"] == tag]
    return [(values["step"], values[name]) for values in records if values.get(name) is not None]


def progress(line: str) -> str | None:
    """A readable line for a validation record of the training log, None for other lines."""
    match = re.search(r" \| INFO \| \w+ \| (\{.*\})$", line)
    values = {} if match is None else json.loads(match[1])
    if "valid_loss" in values:
        return f"update {values['valid_num_updates']:5,}   validation: perplexity {2 ** values['valid_loss']:.1f}"
    if "loss" in values:
        update, perplexity = values["num_updates"], 2 ** values["loss"]
        return f"update {update:5,}   perplexity {perplexity:7.1f}   {values['wps']:6,.0f} tokens/s"
    return None


def training(folder: Path, low: float, high: float) -> tuple[float, float]:
    """Median speed and last validation perplexity of the updates from *low* to *high*."""
    speeds = [speed for update, speed in curve(folder, "train_inner", "wps") if low < update <= high]
    losses = [loss for update, loss in curve(folder, "valid", "loss") if low < update <= high]
    return statistics.median(speeds) if speeds else math.nan, 2 ** losses[-1] if losses else math.nan


def table(rows: dict[str, tuple[float, float]]) -> str:
    cells = [["", "tokens/s", "perplexity"]]
    for name, (speed, perplexity) in rows.items():
        cells.append([name, *(number.replace("nan", "–") for number in (f"{speed:,.0f}", f"{perplexity:,.2f}"))])
    # Imported here: it imports torch.
    from fairseq.system.tables import table as aligned

    return "\n".join(aligned(cells, left=1, terminal=True))


def plot(folder: Path) -> None:
    """Plot training and validation losses over the tokens read to ``loss.png``."""
    from fairseq.analysis import plots
    from fairseq.analysis.curves import AXES, axis_label, read_curve

    curves = [read_curve(tag, [str(folder / LOG)], tag, "loss", "tokens") for tag in ("train_inner", "valid")]
    plots.draw_curves(folder / "loss.png", curves, AXES["tokens"], axis_label("loss", []), None, len(curves))


def demo(folder: Path, stages: tuple[int, int], max_words: int | None, cutoffs: str) -> None:
    """Do every step that is not done yet, and print the report."""
    start = time.perf_counter()
    open_folder(folder, {"stages": list(stages), "max_words": max_words, "cutoffs": cutoffs})
    prepare(folder, max_words)
    train(folder, stages, cutoffs)
    sliding = ("--sliding-inf", "1", "--context-window", str(LONG - 1), "--max-tokens", str(LONG))
    rows = {
        f"training, {SHORT} tokens": training(folder, 0, stages[0]),
        f"training, {LONG} tokens": training(folder, stages[0], math.inf),
        "test, segment by segment": evaluate(folder),
        "test, token by token": evaluate(folder, *sliding),
    }
    plot(folder)
    report = f"{table(rows)}\n\nA sample:\n\n{textwrap.indent(textwrap.fill(sample(folder), 100), '    ')}\n"
    with atomic_file(folder / "report.txt", "--output") as file:
        file.write(report.encode())
    print(f"\n{report}\nIn {folder}/: loss.png, report.txt, {LOG}, checkpoints/")
    print(f"{time.perf_counter() - start:.0f} s in all")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise ArgumentTypeError(f"expected a whole number above 0, got {shortened(text)}")
    return int(text)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(" ".join((__doc__ or "").split()))
    parser.add_argument("--output", "--out", default="demo", metavar="DIR", help="output folder (default: demo)")
    parser.add_argument("--updates", type=_count, nargs=2, default=(220, 560), metavar="N", help="ends of the stages")
    parser.add_argument("--max-words", type=_count, metavar="N", help="maximum words of text")
    parser.add_argument("--cutoffs", default="1000,4000", help="bands of the vocabulary")
    args = parser.parse_args(argv)
    if args.updates[0] >= args.updates[1]:
        raise UserError(f"--updates {args.updates[0]} {args.updates[1]}: the first one must be lower")
    try:
        demo(Path(args.output), tuple(args.updates), args.max_words, args.cutoffs)
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on from here", file=sys.stderr)
        raise


cli_main = command(main, logs=False)

if __name__ == "__main__":
    cli_main()
