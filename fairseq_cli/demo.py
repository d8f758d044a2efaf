"""Train and evaluate a small Shortformer in a few minutes on two cores.

Prepares a corpus, preprocesses it, trains in two stages, evaluates non-overlapping and token by
token, prints a table and a sample of generated text, and plots the loss. All output is written to
--output. After an interruption the same command continues where it stopped.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fairseq.config.fields import LARGEST_INT, shortened
from fairseq.config.parser import Parser, check_words, folder_path
from fairseq.errors import UserError
from fairseq.system.files import atomic_file, prepare_folder
from fairseq.system.terminal import printable
from fairseq.system.version import __version__
from fairseq_cli import command

PROMPT = "This function returns"
BATCH = 1024  # tokens per update
SHORT, LONG = 32, 128  # tokens per sample of the two stages
STATE, LOG = "demo.json", "train.jsonl"
OUTPUTS = (STATE, LOG, "checkpoints", "data-bin", "corpus", "loss.png", "report.txt")
# Runs a command as its console script does. With -m the current folder would be the first place for
# every import; Python 3.10 has neither -P nor PYTHONSAFEPATH, and -I would drop PYTHONPATH and
# packages of the user as well.
LAUNCHER = """import sys
root, module, *sys.argv = sys.argv[1:]
sys.path = [*filter(None, sys.path), root]
from importlib import import_module
import_module(module).cli_main()"""


@dataclass
class Finished:
    """Result of a command: output and peak memory."""

    output: list[str]
    megabytes: float


@dataclass
class Row:
    """A line of the table."""

    name: str
    tokens_per_second: float
    perplexity: float
    megabytes: float


class Steps:
    """The finished steps of a demo with their results,
    in a file, so that an interrupted demo goes on.

    Args:
        folder: of the demo.
        settings: a demo with other settings starts again.

    Raises:
        UserError: *folder* has files that no demo wrote.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._path = folder / STATE
        try:
            stored = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            stored = None
        known = isinstance(stored, dict) and stored.keys() == {"settings", "finished", "results"}
        stored = stored if known and isinstance(stored["results"], dict) else None
        # The demo removes checkpoints and logs of an earlier demo;
        # it must be sure that they are its own.
        if not stored and (foreign := [name for name in OUTPUTS if os.path.lexists(folder / name)]):
            raise UserError(f"--output {folder}: has {foreign[0]}, which is not the demo's; use another")
        if stored and stored["settings"] == settings and not stored["finished"]:
            self._state: dict[str, Any] = stored
        else:
            self._state = {"settings": settings, "finished": False, "results": {}}
            # Training would resume from checkpoints of other settings, and add to their log.
            for name in ("checkpoints", "corpus"):
                shutil.rmtree(folder / name, ignore_errors=True)
            (folder / LOG).unlink(missing_ok=True)
            self._write()

    def do(self, name: str, step: Callable[[], Any]) -> Any:
        """The result of the step *name*, a value for JSON, from the file or from calling *step*."""
        results = self._state["results"]
        if name in results:
            print(f"\n{name}: done before", flush=True)
        else:
            results[name] = step()
            self._write()
        return results[name]

    def finish(self) -> None:
        """Let the next demo start again."""
        self._state["finished"] = True
        self._write()

    def _write(self) -> None:
        with atomic_file(self._path, "--output") as file:
            file.write(json.dumps(self._state, indent=1).encode())


def run(command: str, *flags: str, show: Callable[[str], str | None] = str) -> Finished:
    """Run a module of :mod:`fairseq_cli`; *show* maps a line
    of its output to the text to print, or None.

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
        # wait4 gives the peak memory of this process;
        # getrusage has the largest of all processes so far.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if interrupted:
        raise KeyboardInterrupt
    if process.returncode:
        print(*[line for line in output if not show(line)][-20:], sep="\n", file=sys.stderr)
        sys.exit(process.returncode)
    # Linux counts in KiB, macOS in bytes.
    unit = 1024**2 if sys.platform == "darwin" else 1024
    return Finished(output, usage.ru_maxrss / unit)


# ---- the steps ---------------------------------------------------------------------------------


def prepare(folder: Path, max_words: int | None) -> None:
    limit = ["--max-words", str(max_words)] if max_words else []
    run("corpus", "pydoc", str(folder / "corpus"), *limit)
    texts = [word for s in ("train", "valid", "test") for word in (f"--{s}pref", f"{folder}/corpus/{s}.txt")]
    destination = ["--destdir", str(folder / "data-bin"), "--workers", str(os.cpu_count() or 1)]
    run("preprocess", "--only-source", *texts, *destination, show=lambda line: None)


def train(folder: Path, stages: tuple[int, int], cutoffs: str) -> Finished:
    """Train in two stages in one run, or go on with it; write the log to ``train.jsonl``."""
    every = str(max(1, stages[1] // 8))  # updates from validation to validation, and from checkpoint to checkpoint
    return run(
        "train",
        str(folder / "data-bin"),
        *("--task", "language_modeling", "--arch", "shortformer_demo", "--criterion", "adaptive_loss"),
        *("--adaptive-input-cutoff", cutoffs, "--adaptive-softmax-cutoff", cutoffs),
        *("--stages", f"{SHORT}:{stages[0]},{LONG}:{stages[1]}", "--max-tokens", str(BATCH)),
        *("--optimizer", "adam", "--clip-norm", "0.25", "--lr-scheduler", "cosine", "--lr", "1e-5", "--max-lr", "2e-3"),
        *("--warmup-updates", str(stages[0] // 4), "--warmup-init-lr", "1e-7", "--max-update", str(stages[1])),
        *("--sample-break-mode", "none", "--required-batch-size-multiple", "1", "--curriculum", "1000"),
        *("--validate-interval-updates", every, "--save-interval-updates", every, "--keep-interval-updates", "1"),
        *("--no-epoch-checkpoints", "--cpu", "--seed", "1", "--save-dir", str(folder / "checkpoints")),
        *("--log-format", "json", "--log-interval", "10", "--metrics-file", str(folder / LOG)),
        show=progress,
    )


def evaluate(folder: Path, name: str, *flags: str) -> dict[str, object]:
    """Evaluate the test text with one kind of inference; returns the fields of a :class:`Row`."""
    summary = re.compile(r"Evaluated .*|Loss \(base 2\).*")
    finished = run(
        "eval_lm",
        *(str(folder / "data-bin"), "--path", str(folder / "checkpoints" / "checkpoint_last.pt")),
        *("--gen-subset", "test", "--sample-break-mode", "none", "--max-sentences", "1", "--cpu", *flags),
        show=lambda line: match[0] if (match := summary.search(line)) else None,
    )
    text = "\n".join(finished.output)
    speed, perplexity = (re.search(p, text) for p in (r"\(([\d.]+) tokens/s\)", r"Perplexity: ([\d.]+)"))
    if speed is None or perplexity is None:
        sys.exit(f"fairseq-eval-lm: no summary in its output:\n{text}")
    return asdict(Row(name, float(speed[1]), float(perplexity[1]), finished.megabytes))


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


def training_rows(folder: Path, boundary: int, megabytes: float) -> list[Row]:
    """Speed and last validation perplexity of both stages."""
    rows = []
    for length, low, high in ((SHORT, 0, boundary), (LONG, boundary, math.inf)):
        speeds = [speed for update, speed in curve(folder, "train_inner", "wps") if low < update <= high]
        losses = [loss for update, loss in curve(folder, "valid", "loss") if low < update <= high]
        speed = statistics.median(speeds) if speeds else math.nan
        rows.append(Row(f"training, {length} tokens", speed, 2 ** losses[-1] if losses else math.nan, megabytes))
    return rows


def table(rows: list[Row]) -> str:
    cells = [["", "tokens/s", "perplexity", "memory"]]
    for row in rows:
        numbers = f"{row.tokens_per_second:,.0f}", f"{row.perplexity:,.2f}", f"{row.megabytes:,.0f} MB"
        cells.append([row.name, *(number.replace("nan", "–") for number in numbers)])
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
    prepare_folder("--output", folder)
    # Another version could read the former steps' files otherwise.
    about = {"version": __version__, "python": sys.version}
    steps = Steps(folder, {**about, "stages": list(stages), "max_words": max_words, "cutoffs": cutoffs})
    steps.do("prepare", lambda: prepare(folder, max_words))
    megabytes = steps.do("train", lambda: train(folder, stages, cutoffs).megabytes)
    sliding = ("--sliding-inf", "1", "--context-window", str(LONG - 1), "--max-tokens", str(LONG))
    rows = training_rows(folder, stages[0], megabytes)
    for name, flags in (("test, segment by segment", ()), ("test, token by token", sliding)):
        rows.append(Row(**steps.do(name, functools.partial(evaluate, folder, name, *flags))))
    plot(folder)
    report = f"{table(rows)}\n\nA sample:\n\n{textwrap.indent(textwrap.fill(sample(folder), 100), '    ')}\n"
    with atomic_file(folder / "report.txt", "--output") as file:
        file.write(report.encode())
    steps.finish()
    print(f"\n{report}\nIn {folder}/: loss.png, report.txt, {LOG}, checkpoints/")
    print(f"{time.perf_counter() - start:.0f} s in all")


def main(argv: list[str] | None = None) -> None:
    parser = Parser(" ".join((__doc__ or "").split()))
    parser.add_argument(
        "--output", "--out", type=folder_path, default=Path("demo"), metavar="DIR", help="output folder (default: demo)"
    )
    parser.add_argument("--updates", type=int, nargs=2, default=(220, 560), metavar="N", help="ends of the two stages")
    parser.add_argument("--max-words", type=int, metavar="N", help="maximum words of text")
    parser.add_argument("--cutoffs", default="1000,4000", help="bands of the vocabulary")
    args = parser.parse_args(argv)
    check_words(args.max_words)
    if not 0 < args.updates[0] < args.updates[1] <= LARGEST_INT:
        raise UserError(f"--updates {shortened(args.updates)}: two numbers of updates, the first one lower")
    try:
        demo(args.output, tuple(args.updates), args.max_words, args.cutoffs)
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on from here", file=sys.stderr)
        raise


cli_main = command(main, logs=False)

if __name__ == "__main__":
    cli_main()
