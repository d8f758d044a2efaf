"""Speed and memory of training a Transformer-XL, compared with the authors' code on two cores.

    python -m benchmarks.transformer_xl [--compile] [--json FILE]
    python -m benchmarks.transformer_xl --wiki103     # full-size models; compiled, too, on a GPU

Each case runs in a separate process, through the task and the trainer that the commands use, on a
corpus of random words with Zipfian frequencies. *products* is as of ``benchmarks.language_model``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.apart import Benchmark
from benchmarks.language_model import line, make_corpus, training_speeds
from fairseq.config import options
from fairseq.config.settings import training_settings
from fairseq.system.allocator import keep_freed_memory
from fairseq.tasks import setup_task
from fairseq_cli.common import get_training_parser

SMALL = """--arch transformer_xl --n-layer 4 --d-model 256 --n-head 4 --d-inner 1024 --cutoffs 2000,8000
    --tokens-per-sample 128 --mem-len 128"""

AUTHORS_SPEED = 3385.0  # of their code in fp32, on a 2-core machine whose matrix product runs at 193 GFLOP/s


@dataclass
class Case:
    """One line of the table."""

    name: str
    flags: str
    precision: str = "fp32"
    rows: int = 16
    compile: bool = False


CASES = [Case("training, fp32", SMALL), Case("training, bf16", SMALL, "bf16")]


def command(case: Case, folder: Path, full_size: bool, device: torch.device) -> argparse.Namespace:
    """The training command of the measured model."""
    flags = [str(folder), *case.flags.split(), "--criterion", "cross_entropy", "--optimizer", "adam", "--lr", "0.00025"]
    flags += ["--clip-norm", "0.25", "--batch-size", str(case.rows), "--required-batch-size-multiple", "1"]
    flags += [f"--{case.precision}"] if case.precision != "fp32" else []
    flags += ["--cpu"] if device.type == "cpu" else []
    flags += ["--compile"] if case.compile else []
    return options.parse_args_and_arch(get_training_parser(), flags)


def measure(case: Case, folder: Path, full_size: bool, device: torch.device, seconds: float) -> dict[str, Any]:
    """Tokens per second of *case*, median (shown in the table) and range, and its peak memory."""
    keep_freed_memory()
    args = command(case, folder, full_size, device)
    torch.manual_seed(1)
    settings = training_settings(args)
    task = setup_task(settings)
    model = task.build_model(settings)
    steps = 1 if full_size and device.type == "cpu" else 0
    speeds, products = training_speeds(args, task, model, device, seconds, steps)
    speeds.sort()
    return {
        "products": products,
        "best": speeds[-1],
        "median": speeds[len(speeds) // 2],
        "worst": speeds[0],
        "rss_mib": machine.peak_rss(),
        "gpu_mib": machine.peak_gpu(device),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def table(results: list[dict[str, Any]], compare: bool) -> str:
    """The results as Markdown."""
    rows = [line(result["case"]["name"], result, AUTHORS_SPEED if compare else None) for result in results]
    return "\n".join(["| | tokens/s | products | × authors' | peak memory |", "|---|---|---|---|---|", *rows])


def wiki103_cases(on_cpu: bool) -> list[Case]:
    """The full-size models with their batches, on a GPU in bfloat16, eager and compiled; on a CPU
    the smaller one."""
    if on_cpu:
        flags = "--arch transformer_xl_wiki103_base"
        return [Case(f"wiki103_base, {p}", flags, p, rows=60) for p in ("fp32", "bf16")]
    return [
        Case(
            f"wiki103_{size}, bf16, {'compiled' if c else 'eager'}",
            f"--arch transformer_xl_wiki103_{size}",
            "bf16",
            b,
            c,
        )
        for size, b in (("base", 60), ("large", 16))
        for c in (False, True)
    ]


BENCHMARK = Benchmark(
    module="benchmarks.transformer_xl",
    description=__doc__,
    cases=CASES,
    full_size=wiki103_cases,
    compiled=len(CASES),
    make_corpus=lambda folder, full_size: make_corpus(folder, 267_744 if full_size else 19_768),
    measure=measure,
    table=table,
)

if __name__ == "__main__":
    BENCHMARK.main()
