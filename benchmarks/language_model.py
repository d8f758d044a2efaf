"""Speed and memory of a Shortformer in training, evaluation and generation, compared with the
original on two cores.

    python -m benchmarks.language_model [--compile] [--only generation] [--json FILE]
    python -m benchmarks.language_model --wiki103  # the full-size model, on a GPU if there is one

Each case runs in a separate process, through the task, the trainer and the scorer that the commands
use, on a corpus of random words with Zipfian frequencies. Large matrix products are measured in
turns with the updates; *products* is the share of an update's time in which its own products would
be computed at that speed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import generation, machine
from benchmarks.apart import Benchmark
from fairseq.config import options
from fairseq.config.settings import training_settings, typed_settings
from fairseq.data.indexed_dataset import IndexedWriter, token_dtype
from fairseq.distributed import World
from fairseq.evaluation.scorer import Scorer, Scoring
from fairseq.models.layerwise import compile_model
from fairseq.modules.precision import Precision
from fairseq.system.allocator import keep_freed_memory
from fairseq.tasks import setup_task
from fairseq.text.dictionary import Dictionary
from fairseq.training.state import TrainingState
from fairseq.training.update import update
from fairseq_cli.common import get_training_parser

ROWS, LENGTH = 16, 128
SMALL = """--decoder-layers 4 --decoder-embed-dim 256 --decoder-attention-heads 4 --decoder-ffn-embed-dim 1024
    --adaptive-softmax-cutoff 2000,8000 --adaptive-input-cutoff 2000,8000"""

# The original in fp32, on a 2-core machine whose matrix product runs at 193 GFLOP/s.
ORIGINAL = {"train": 3800.0, "evaluate": 9400.0, "token by token": 138.0}


@dataclass
class Case:
    """One line of the table."""

    name: str
    mode: str  # train, evaluate, token by token, or generation
    precision: str = "fp32"
    rows: int = ROWS
    compile: bool = False


CASES = [
    Case("training, fp32", "train"),
    Case("training, bf16", "train", "bf16"),
    Case("non-overlapping, fp32", "evaluate"),
    Case("non-overlapping, bf16", "evaluate", "bf16"),
    Case("token by token, 1 stream", "token by token", rows=1),
    Case("token by token, 16 streams", "token by token", rows=16),
    Case("token by token, bf16, 1 stream", "token by token", "bf16", rows=1),
    Case("token by token, bf16, 16 streams", "token by token", "bf16", rows=16),
    Case("generation", "generation", rows=1),
]


def command(case: Case, folder: Path, full_size: bool, device: torch.device) -> argparse.Namespace:
    """The training command of the measured model."""
    flags = [str(folder), "--arch", "shortformer_wiki103", "--criterion", "adaptive_loss", "--optimizer", "nag"]
    flags += ["--lr", "0.01", "--clip-norm", "0.1", "--tokens-per-sample", str(LENGTH)]
    flags += ["--required-batch-size-multiple", "1"]
    flags += ["--max-tokens", str(case.rows * LENGTH), "--seed", "1"]
    flags += [] if full_size else SMALL.split()
    flags += [f"--{case.precision}"] if case.precision != "fp32" else []
    flags += ["--cpu"] if device.type == "cpu" else []
    flags += ["--compile"] if case.compile else []
    return options.parse_args_and_arch(get_training_parser(), flags)


def measure(case: Case, folder: Path, full_size: bool, device: torch.device, seconds: float) -> dict[str, Any]:
    """Tokens per second of *case*, median (shown in the table) and best, and its peak memory."""
    keep_freed_memory()
    args = command(case, folder, full_size, device)
    settings = training_settings(args)
    torch.manual_seed(1)
    task = setup_task(settings)
    model = task.build_model(settings)
    if case.mode == "generation":
        found = generation.measure(model.to(device).eval(), len(task.source_dictionary), device, 3 * seconds)
        return {"median": found["lines"][0]["median"], "generation": found, "rss_mib": machine.peak_rss()}
    speeds, products = (
        training_speeds(args, task, model, device, seconds, steps=1 if full_size and device.type == "cpu" else 0)
        if case.mode == "train"
        else (_scoring(case, args, task, model, device, seconds), None)
    )
    speeds.sort()
    return {
        "products": products,
        "best": speeds[-1],
        "median": speeds[len(speeds) // 2],
        "rss_mib": machine.peak_rss(),
        "gpu_mib": machine.peak_gpu(device),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def training_speeds(
    args: argparse.Namespace, task: Any, model: Any, device: torch.device, seconds: float, steps: int = 0
) -> tuple[list[float], float | None]:
    """Tokens per second of groups of updates, for about *seconds*, and the share of products in the
    time of an update.

    The share is the time that an update's matrix products would take at the speed of large ones,
    which is measured before each group, as the speed of a machine that others share changes; the
    median of the groups. Those of a compiled model are not counted.

    Args:
        args: the training command.
        task: its task.
        model: what it trains.
        device: where.
        seconds: at least three groups are measured, whatever this is.
        steps: updates of a group; 0: 8 on a CPU, 20 on a GPU.
    """
    criterion = task.build_criterion(args)
    trainer = TrainingState(training_settings(args), task, model, criterion, World(device=device))
    batches = task.iterator("train", model, criterion, training=True, device=device)
    dtype = torch.float32 if not (args.fp16 or args.bf16) else torch.bfloat16
    steps = steps or (8 if device.type == "cpu" else 20)
    speeds: list[float] = []
    ceilings: list[float] = []
    started, warm = time.perf_counter(), 0
    while time.perf_counter() - started < seconds or len(speeds) < 3:
        samples = iter(batches)
        for _ in range(len(batches) // steps):
            gflops = machine.matrix_product(device, dtype, repeats=8)
            start, tokens = time.perf_counter(), 0
            for _ in range(steps):
                sample = next(samples)
                tokens += sample["ntokens"]
                update(trainer, [sample])
            machine.synchronize(device)
            if warm:
                speeds.append(tokens / (time.perf_counter() - start))
                ceilings.append(gflops * 1e9)
            warm += 1
            if time.perf_counter() - started > seconds and len(speeds) >= 3:
                break
    if args.compile:
        return speeds, None
    sample = next(iter(batches))
    per_token = machine.products_of(lambda: update(trainer, [sample])) / sample["ntokens"]
    shares = [speed * per_token / ceiling for speed, ceiling in zip(speeds, ceilings, strict=True)]
    return speeds, statistics.median(shares)


def _scoring(
    case: Case, args: argparse.Namespace, task: Any, model: Any, device: torch.device, seconds: float
) -> list[float]:
    if case.compile:
        compile_model(model)
    scoring = Scoring(LENGTH, token_by_token=case.mode == "token by token", batch_size=case.rows)
    scorer = Scorer([model], task.source_dictionary, scoring, Precision(typed_settings(args).common), device)
    corpus = task.corpus("valid" if case.mode == "evaluate" else "test")
    speeds: list[float] = []
    started = time.perf_counter()
    scorer.score(corpus)
    while time.perf_counter() - started < seconds or len(speeds) < 3:
        machine.synchronize(device)
        start = time.perf_counter()
        scores = scorer.score(corpus)
        speeds.append(len(scores) / (time.perf_counter() - start))
    return speeds


def make_corpus(folder: Path, vocabulary: int, frequencies: np.ndarray | None = None) -> None:
    """Write random words: 600,000 tokens for training, 65,536 and 4,096 for evaluation.

    Args:
        folder: the data-bin.
        vocabulary: its symbols, four special ones included.
        frequencies: of the words, falling; 1/rank by default.
    """
    frequencies = 1 / np.arange(1, vocabulary - 3) if frequencies is None else frequencies
    dictionary = Dictionary()
    for i, frequency in enumerate(frequencies):
        dictionary.add_symbol(f"w{i}", max(1, int(10**7 * frequency / frequencies[0])))
    dictionary.save(str(folder / "dict.txt"))
    rng = np.random.default_rng(1)
    for split, size in (("train", 600_000), ("valid", 65_536), ("test", 4_096)):
        tokens = (rng.choice(vocabulary - 4, size=size, p=frequencies / frequencies.sum()) + 4).astype(np.int64)
        with IndexedWriter(str(folder / split), token_dtype(len(dictionary))) as writer:
            writer.add(tokens, np.full(size // 32, 32, dtype=np.int32))


def table(results: list[dict[str, Any]], compare: bool) -> str:
    """The results as Markdown."""
    lines = ["| | tokens/s | products | × original | peak memory |", "|---|---|---|---|---|"]
    more = [generation.table(result["generation"]) for result in results if "generation" in result]
    for result in results:
        if "generation" not in result:
            case = Case(**result["case"])
            lines.append(line(case.name, result, ORIGINAL[case.mode] if compare else None))
    return "\n".join([*(lines if len(lines) > 2 else []), *("\n" + table for table in more)])


def line(name: str, result: dict[str, Any], original: float | None) -> str:
    """A row of a table; *original* is the speed that is compared with."""
    speed, share = result["median"], result["products"]
    memory = f"{result['gpu_mib']:,.0f} MiB GPU" if result["gpu_mib"] else f"{result['rss_mib']:,.0f} MiB"
    times = f"{speed / original:.2f}" if original else ""
    return f"| {name} | {speed:,.0f} | {'–' if share is None else f'{share:.0%}'} | {times} | {memory} |"


def wiki103_cases(on_cpu: bool) -> list[Case]:
    """The full-size model with its batch, on a GPU in half precision, eager and compiled."""
    if on_cpu:
        return [Case(f"shortformer_wiki103, {p}", "train", p, rows=72) for p in ("fp32", "bf16")]
    return [
        Case(f"shortformer_wiki103, {p}, {'compiled' if c else 'eager'}", "train", p, rows=72, compile=c)
        for p in ("fp16", "bf16")
        for c in (False, True)
    ]


BENCHMARK = Benchmark(
    module="benchmarks.language_model",
    description=__doc__,
    cases=CASES,
    full_size=wiki103_cases,
    compiled=4,
    make_corpus=lambda folder, full_size: make_corpus(folder, 267_744 if full_size else 19_768),
    measure=measure,
    table=table,
)

if __name__ == "__main__":
    BENCHMARK.main()
