"""Measurements that each have a process of their own, so that none sees another's memory or caches."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure_apart(module: str, cases: Sequence[Any], folder: Path, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Let ``python -m MODULE --folder FOLDER --case CASE`` measure each case, a dataclass with a name; prints speeds.

    The process prints a JSON object with ``median`` as its last line.
    """
    results = []
    for case in cases:
        command = [sys.executable, "-m", module, "--folder", str(folder), "--case", json.dumps(asdict(case)), *flags]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results.append({"case": asdict(case), **json.loads(process.stdout.splitlines()[-1])})
        print(f"{case.name:32} {results[-1]['median']:10,.0f} tokens/s", flush=True)
    return results


def ceiling(device: torch.device) -> dict[str, float]:
    """What the machine's matrix product reaches now, in GFLOP/s by precision."""
    return {name: machine.matrix_product(device, dtype) for name, dtype in TYPES.items()}


def report(results: list[dict[str, Any]], gflops: dict[str, float], device: torch.device, path: Path | None) -> None:
    """Print everything as JSON, and write it to *path*."""
    content = {"machine": machine.describe(device), "gflops": gflops, "results": results}
    print(f"\n{json.dumps(content)}")
    if path:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
