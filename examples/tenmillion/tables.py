"""Numbers of the recipe: updates that fit a budget of time, and tables of minimal pairs with
standard errors.

python tables.py updates speed.jsonl --seconds 10800
python tables.py report results
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def updates(metrics: Path, seconds: float) -> int:
    """Return the updates that fit into *seconds*, at the median speed of the lines of *metrics*
    after the first."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    speeds = [line["ups"] for line in lines if line.get("ups")][1:]
    if not speeds:
        raise SystemExit(f"{metrics}: no speeds of updates; remove the file and run the recipe again")
    return max(1, int(seconds * statistics.median(map(float, speeds))))


def words_of(name: str) -> float:
    """Return the words that the checkpoint *name* has read; the best one comes last."""
    number = re.fullmatch(r"checkpoint_words_(\d+)", name)
    return float(number[1]) if number else math.inf


def read(folder: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Names of checkpoints with their phenomena and the scores of the test split, in the order of
    words."""
    for checkpoint in sorted(folder.iterdir(), key=lambda path: words_of(path.name)):
        pairs = json.loads((checkpoint / "pairs" / "results.json").read_text(encoding="utf-8"))
        text = json.loads((checkpoint / "text" / "results.json").read_text(encoding="utf-8"))
        yield checkpoint.name, pairs["phenomena"], text


def cell(share: float, count: float) -> str:
    """An accuracy in percent with its standard error."""
    return f"{100 * share:.1f} ± {100 * math.sqrt(share * (1 - share) / count):.1f}"


def report(folder: Path) -> Iterator[str]:
    """Two tables in Markdown: accuracy and bits per byte of each checkpoint, and the phenomena of
    the last one."""
    rows = list(read(folder))
    yield "| checkpoint | accuracy (%) | bits per byte |"
    yield "|---|---:|---:|"
    for name, phenomena, text in rows:
        whole = phenomena["all"]
        bits = text.get("bits_per_byte")
        yield f"| {name} | {cell(whole['acc'], whole['pairs'])} | {'–' if bits is None else format(bits, '.4f')} |"
    yield ""
    yield f"| phenomenon, {rows[-1][0]} | pairs | accuracy (%) |"
    yield "|---|---:|---:|"
    for name, values in rows[-1][1].items():
        yield f"| {name} | {values['pairs']:.0f} | {cell(values['acc'], values['pairs'])} |"


def main() -> None:
    """Print what the recipe asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("table", choices=("updates", "report"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--seconds", type=float, default=0.0, help="budget of training")
    args = parser.parse_args()
    if args.table == "updates":
        print(updates(args.path, args.seconds))
    else:
        print("\n".join(report(args.path)))


if __name__ == "__main__":
    main()
