"""Training runs for the tests: small models on the golden corpus, in this process or in one of
their own."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq import checkpoint
from fairseq.config import options
from fairseq.errors import UserError
from fairseq.models.loading import stored_parameters
from fairseq.tasks import setup_task
from fairseq_cli import train as train_command
from fairseq_cli.common import get_training_parser

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "language_model"
DATA = GOLDEN / "data-bin"

# The validation set is the corpus: 2,670 tokens, 42 batches of 4 rows × 16 tokens.
SMALL = """--cpu --train-subset valid --valid-subset test --tokens-per-sample 16 --max-tokens 64 --max-tokens-valid 640
    --required-batch-size-multiple 1 --criterion adaptive_loss --decoder-layers 2 --decoder-embed-dim 32
    --decoder-ffn-embed-dim 64 --decoder-attention-heads 2 --optimizer nag --lr-scheduler fixed --lr 0.05
    --clip-norm 0.1 --seed 3
    --log-format json --log-interval 1"""
BASELINE = f"--arch transformer_lm_tiny {SMALL}"
SHORTFORMER = f"--arch shortformer_tiny {SMALL}"
NO_DROPOUT = "--dropout 0 --attention-dropout 0 --activation-dropout 0 --adaptive-softmax-dropout 0"
TIMEOUT = 600  # seconds a process of a test may take: only to end a test that hangs, however slow the machine is
NAG = "--optimizer nag --lr-scheduler cosine --lr 0.001 --max-lr 0.1 --warmup-updates 10"
NAG += " --lr-period-updates 30 --t-mult 2"
ADAM = "--optimizer adam --adam-betas 0.9,0.98 --weight-decay 0.01 --lr-scheduler inverse_sqrt --lr 0.002"
ADAM += " --warmup-updates 9"
LINES = "--sample-break-mode eos --tokens-per-sample 200 --max-tokens 200"
LINES += " --lr-scheduler polynomial_decay --total-num-update 1000000"
DROPOUT = "--dropout 0.2 --attention-dropout 0.1 --activation-dropout 0.1 --adaptive-softmax-dropout 0.1"
SHORT = f"{BASELINE} --max-update 2"


DEVICE = "cpu"
"""Where :func:`train` trains: ``--device`` of pytest."""
CLOCKS = ("wps", "ups", "train_wall", "wall")


def words(*flags: Any) -> list[str]:
    """Command-line words from strings, split at white space, from paths, and from lists of such."""
    found: list[str] = []
    for flag in flags:
        if isinstance(flag, list | tuple):
            found += words(*flag)
        else:
            found += flag.split() if isinstance(flag, str) else [str(flag)]
    return found


@contextlib.contextmanager
def errors_of_a_command() -> Iterator[None]:
    """Let a ``UserError`` name flags, as the command prints it that the decorated function stands
    for."""
    try:
        yield
    except UserError as error:
        error.args = (error.with_flags,)
        raise


@errors_of_a_command()
def arguments(*flags: Any, data: Path = DATA) -> Any:
    """The parsed arguments of ``fairseq-train``."""
    return options.parse_args_and_arch(get_training_parser(), [str(data), *words(*flags)])


@errors_of_a_command()
def model_of(*flags: Any, data: Path = DATA) -> Any:
    """The model that ``fairseq-train`` would build, with its initial weights."""
    args = arguments(*flags, data=data)
    torch.manual_seed(args.seed)
    return setup_task(args).build_model(args)


@errors_of_a_command()
def saved(path: Path, *flags: Any, data: Path = DATA, seed: int = 1) -> Path:
    """A checkpoint at *path* of a model with random weights, larger than initial ones."""
    model, generator = model_of(*flags, data=data), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    args = {key: value for key, value in vars(arguments(*flags, data=data)).items() if key != "data"}
    state = {"args": args, "model": stored_parameters(model), "optimizer_history": [], "extra_state": {}}
    checkpoint.save(path, state)
    return path


@errors_of_a_command()
def train(save_dir: Path, *flags: Any, data: Path = DATA) -> list[dict[str, Any]]:
    """Run ``fairseq-train`` in this process, on :data:`DEVICE`; returns the lines of its JSON
    log."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("--device cuda: there is no GPU")
    args, log = arguments("--save-dir", save_dir, *flags, data=data), io.StringIO()
    args.cpu = args.cpu and DEVICE == "cpu"
    with contextlib.redirect_stdout(log):
        train_command.main(args)
    return records(log.getvalue())


def records(text: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines of *text*, with or without the log's date and tag."""
    found = (re.fullmatch(r"(?:[-\d]+ [:\d]+ \| INFO \| \S+ \| )?(\{.*\})", line) for line in text.splitlines())
    return [json.loads(match[1]) for match in found if match]


def updates(log: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of *log* that tell of an update, without what a clock says."""
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in log if "num_updates" in line]


def summaries(log: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The lines of *log* that end an epoch's training (``train``) or a validation (its split),
    without clocks."""
    lines = [{k.removeprefix(f"{kind}_"): v for k, v in line.items()} for line in log if f"{kind}_num_updates" in line]
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in lines]


def losses(log: Iterable[dict[str, Any]]) -> list[float]:
    """The loss of each update of *log*."""
    return [line["loss"] for line in log if "num_updates" in line]


def command(name: str | Path, *flags: Any, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a script, e.g. ``train.py`` at the root, in a process of its own."""
    return subprocess.run(
        [sys.executable, str(ROOT / name), *words(*flags)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=environment(**settings),
    )


def environment(**settings: str) -> dict[str, str]:
    """The environment of a process that uses one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **settings}


class Endless(io.RawIOBase):
    """A stream of one line without an end, of which no more than *most* bytes may be read."""

    def __init__(self, most: int) -> None:
        self.rest = most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        assert self.rest >= 0, "the line is read without a limit"
        self.rest -= len(buffer)
        buffer[:] = b"a" * len(buffer)
        return len(buffer)


def difference(a: Any, b: Any, path: str = "") -> str | None:
    """Where *a* and *b*, two checkpoints' contents, differ in a single bit; None if they do not."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return None if a.dtype == b.dtype and torch.equal(a, b) else path
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{path}: {sorted(map(str, a.keys() ^ b.keys()))}"
        return next((found for key in a if (found := difference(a[key], b[key], f"{path}.{key}"))), None)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return f"{path}: {len(a)} and {len(b)} items"
        pairs = enumerate(zip(a, b, strict=True))
        return next((found for i, (x, y) in pairs if (found := difference(x, y, f"{path}[{i}]"))), None)
    same = a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))
    return None if same else f"{path}: {a} and {b}"


def content(file: Path) -> dict[str, Any]:
    """All of a checkpoint but its arguments and what a clock says: what two equal runs have in
    common."""
    state = checkpoint.read(file)
    del state["args"]
    del state["extra_state"]["previous_training_time"]
    return state
