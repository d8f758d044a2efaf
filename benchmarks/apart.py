"""Benchmarks whose cases run in separate processes, so that memory and caches are not shared."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Benchmark:
    """A table of speeds and the program that measures it.

    Attributes:
        module: run with ``python -m``; its docstring is the help.
        cases: dataclasses with ``name`` and ``compile``, for a CPU.
        full_size: (whether on a CPU) → the same of models as published (``--wiki103``).
        compiled: number of first *cases* that ``--compile`` also measures compiled.
        make_corpus: (folder, full size) → None; writes a corpus.
        measure: (case, folder, full size, device, seconds) → figures; ``median`` is printed.
        table: (results, whether to compare with the original) → Markdown.
    """

    module: str
    description: str | None
    cases: Sequence[Any]
    full_size: Callable[[bool], Sequence[Any]]
    compiled: int
    make_corpus: Callable[[Path, bool], None]
    measure: Callable[[Any, Path, bool, torch.device, float], dict[str, Any]]
    table: Callable[[list[dict[str, Any]], bool], str]

    def main(self, argv: list[str] | None = None) -> None:
        """The command line."""
        parser = argparse.ArgumentParser(
            description=self.description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
        parser.add_argument("--seconds", type=float, default=15, help="time for each case in seconds (default: 15)")
        parser.add_argument("--compile", action="store_true", help="also measure with torch.compile")
        parser.add_argument("--wiki103", action="store_true", help="full-size models, on a GPU if there is one")
        parser.add_argument(
            "--only", choices=sorted({c.mode for c in self.cases if hasattr(c, "mode")}), help="only cases of this kind"
        )
        parser.add_argument("--case", help=argparse.SUPPRESS)
        parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
        args = parser.parse_args(argv)
        device = torch.device("cuda" if args.wiki103 and torch.cuda.is_available() else "cpu")
        kind = type(self.cases[0])
        if args.case:
            case = kind(**json.loads(args.case))
            found = self.measure(case, args.folder, args.wiki103, device, args.seconds)
            print(json.dumps(found))
            return
        cases = list(self.full_size(device.type == "cpu") if args.wiki103 else self.cases)
        if args.compile and not args.wiki103:
            cases += [replace(c, name=f"{c.name}, compiled", compile=True) for c in self.cases[: self.compiled]]
        if args.only:
            cases = [case for case in cases if case.mode == args.only]
        before = ceiling(device)
        with tempfile.TemporaryDirectory() as folder:
            self.make_corpus(Path(folder), args.wiki103)
            flags = ["--seconds", str(args.seconds), *(["--wiki103"] if args.wiki103 else [])]
            results = measure_apart(self.module, cases, Path(folder), flags)
        gflops = {name: max(value, before[name]) for name, value in ceiling(device).items()}
        print(f"\nmatrix product 2048 × 1024 × 4096: {gflops['fp32']:.0f} GFLOP/s fp32, {gflops['bf16']:.0f} bf16\n")
        print(self.table(results, not args.wiki103))  # the original was measured with the small models
        report(results, gflops, device, args.json)


def measure_apart(module: str, cases: Sequence[Any], folder: Path, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Measure each case with ``python -m MODULE --folder FOLDER --case CASE``, and print its speed.

    The last line that the process prints is a JSON object with ``median``.
    """
    results = []
    for case in cases:
        command = [sys.executable, "-m", module, "--folder", str(folder), "--case", json.dumps(asdict(case)), *flags]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results.append({"case": asdict(case), **json.loads(process.stdout.splitlines()[-1])})
        print(f"{case.name:32} {digits(results[-1]['median']):>10} tokens/s", flush=True)
    return results


def digits(number: float) -> str:
    """*number* with two digits at least."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def ceiling(device: torch.device) -> dict[str, float]:
    """Current speed of the matrix product in GFLOP/s, by precision."""
    return {name: machine.matrix_product(device, dtype) for name, dtype in TYPES.items()}


def report(results: list[dict[str, Any]], gflops: dict[str, float], device: torch.device, path: Path | None) -> None:
    """Print all results as JSON, and write them to *path*."""
    content = {"machine": machine.describe(device), "gflops": gflops, "results": results}
    print(f"\n{json.dumps(content)}")
    if path:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
