"""Speed of training on a CPU, alone and beside a busy process, by how OpenMP's threads wait.

    python -m benchmarks.beside [--case "training, bf16"] [--rounds 5] \
        [--waits commands 300000 3000 passive]

A way to wait is a number of spins (``GOMP_SPINCOUNT``; libgomp's default is 300000), ``passive``
(``OMP_WAIT_POLICY``) or ``commands``: by the load, as this package's commands wait. The ways
alternate; medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks import language_model, transformer_xl

CASES = {
    f"{name}{case.name}": (module, case)
    for name, module in (("", language_model), ("Transformer-XL ", transformer_xl))
    for case in module.CASES
    if case.name.startswith("training")
}


def environment(wait: str) -> dict[str, str]:
    """The environment of a process whose threads wait so."""
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    named = {"commands": {}, "passive": {"OMP_WAIT_POLICY": "passive"}}
    return {**plain, **named.get(wait, {"GOMP_SPINCOUNT": wait})}


def speed(name: str, folder: Path, wait: str, busy: int, seconds: float) -> float:
    """Tokens per second of the case *name*, beside *busy* processes that compute without end."""
    module, case = CASES[name]
    command = [sys.executable, "-m", module.__name__, "--folder", str(folder), "--seconds", str(seconds)]
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        done = subprocess.run(
            [*command, "--case", json.dumps(asdict(case))],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=environment(wait),
        )
    finally:
        for other in others:
            other.kill()
            other.wait()
    return float(json.loads(done.stdout.splitlines()[-1])["median"])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", choices=CASES, default="training, bf16", help="what is trained (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each way (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=6, help="time for each in seconds (default: %(default)s)")
    parser.add_argument("--waits", nargs="+", default=["commands", "300000", "3000", "passive"], metavar="WAIT")
    args = parser.parse_args()
    speeds: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        language_model.make_corpus(folder, 19_768)
        for _ in range(args.rounds):
            for busy in (0, 1):
                for wait in args.waits:
                    found = speed(args.case, folder, wait, busy, args.seconds)
                    speeds.setdefault((wait, busy), []).append(found)
    print("| waiting | tokens/s alone | beside a busy process |\n|---|---|---|")
    for wait in args.waits:
        alone, beside = (statistics.median(speeds[wait, busy]) for busy in (0, 1))
        print(f"| {wait} | {alone:,.0f} | {beside:,.0f} |")


if __name__ == "__main__":
    main()
