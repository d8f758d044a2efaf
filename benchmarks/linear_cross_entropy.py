"""Loss and gradients of the full softmax: this project's, torch's chunked one, and logits with
F.cross_entropy.

    python -m benchmarks.linear_cross_entropy [--rows 512] [--width 512] [--rounds 7]

The implementations alternate. Time is the median of the rounds; memory is measured in separate
processes, inputs not included.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.modules.output_layer import linear_cross_entropy

VOCABULARIES = (1_000, 10_000, 50_000)
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def ours(hidden: Tensor, weight: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """This project's implementation."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32):
        return linear_cross_entropy(hidden, weight, target)


def chunked(hidden: Tensor, weight: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """torch's chunked implementation with its default chunks."""
    options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden.to(dtype), weight.to(dtype), target, reduction="sum", options=options)


def plain(hidden: Tensor, weight: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """All logits at once, and the loss in float32."""
    return F.cross_entropy(F.linear(hidden.to(dtype), weight.to(dtype)).float(), target, reduction="sum")


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]] = {
    "ours": ours,
    "torch, chunked": chunked,
    "logits": plain,
}


def inputs(rows: int, width: int, words: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weights in float32, as in training, and targets."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, width, generator=generator).requires_grad_()
    weight = (torch.randn(words, width, generator=generator) / width**0.5).requires_grad_()
    return hidden, weight, torch.randint(words, (rows,), generator=generator)


def step(way: str, data: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> float:
    """The seconds of one forward and backward pass."""
    start = time.perf_counter()
    torch.autograd.grad(WAYS[way](*data, dtype), data[:2])
    return time.perf_counter() - start


def memory(way: str, rows: int, width: int, words: int, precision: str) -> float:
    """Peak memory of a step in MiB without the inputs, in a separate process."""
    command = [sys.executable, "-m", "benchmarks.linear_cross_entropy", "--peak", way, "--words", str(words)]
    command += ["--rows", str(rows), "--width", str(width), "--precision", precision]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak(way: str, data: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> float:
    """Growth of this process in MiB during a step, after a small step that loads the kernels. Linux
    only."""
    step(way, inputs(8, 16, 32), dtype)
    before = _resident("VmRSS")
    step(way, data, dtype)
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    """Size of this process in MiB: VmRSS is the current one, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def table(rows: int, width: int, rounds: int) -> None:
    """Measure and print a Markdown table."""
    print(f"{rows} rows of width {width}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print(f"| precision, words | {' | '.join(f'{way}: ms, MiB, error' for way in WAYS)} | ours / torch |")
    print("|---|" + "---|" * (len(WAYS) + 1))
    for precision, dtype in TYPES.items():
        for words in VOCABULARIES:
            data = inputs(rows, width, words)
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(rounds + 1):
                for way, times in seconds.items():
                    taken = step(way, data, dtype)
                    if number:  # the first round is a warm-up
                        times.append(taken)
            logits = F.linear(data[0].detach().double(), data[1].detach().double())
            exact = float(F.cross_entropy(logits, data[2], reduction="sum"))
            cells = []
            for way, times in seconds.items():
                error = abs(float(WAYS[way](*data, dtype).detach()) / exact - 1)
                mib = memory(way, rows, width, words, precision)
                cells.append(f"{1000 * statistics.median(times):.1f}, {mib:.0f}, {error:.0e}")
            ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds["torch, chunked"], strict=True))
            print(f"| {precision}, {words:,} | {' | '.join(cells)} | {ratio:.2f} |", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="number of hidden states (default: 512)")
    parser.add_argument("--width", type=int, default=512, help="their channels (default: 512)")
    parser.add_argument("--rounds", type=int, default=7, help="measured steps of each implementation (default: 7)")
    for hidden in ("--peak", "--precision"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--words", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print(peak(args.peak, inputs(args.rows, args.width, args.words), TYPES[args.precision]))
    else:
        table(args.rows, args.width, args.rounds)


if __name__ == "__main__":
    main()
