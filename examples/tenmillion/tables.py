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
    """Names of checkpoints with the results of minimal pairs and of the test split, in the order of
    words."""
    for checkpoint in sorted(folder.iterdir(), key=lambda path: words_of(path.name)):
        pairs = json.loads((checkpoint / "pairs" / "results.json").read_text(encoding="utf-8"))
        text = json.loads((checkpoint / "text" / "results.json").read_text(encoding="utf-8"))
        yield checkpoint.name, pairs, text


def cell(values: dict[str, float]) -> str:
    """An accuracy in percent with its standard error."""
    return f"{100 * values['acc']:.1f} ± {100 * values['stderr']:.1f}"


def report(folder: Path) -> Iterator[str]:
    """Two tables in Markdown: accuracy and bits per byte of each checkpoint, and the phenomena of
    the last one."""
    rows = list(read(folder))
    last = rows[-1][1]
    has_known = "known_words" in last
    columns = ["accuracy (%)", *["known words (%)"] * has_known, "bits per byte"]
    yield f"| checkpoint | {' | '.join(columns)} |"
    yield f"|---{'|---:' * len(columns)}|"
    for name, pairs, text in rows:
        # As BabyLM: the mean of paradigms.
        parts = [pairs, pairs["known_words"]] if has_known else [pairs]
        bits = text.get("bits_per_byte")
        cells = [cell(part["averages"]["paradigms"]) for part in parts]
        yield f"| {name} | {' | '.join(cells)} | {'–' if bits is None else format(bits, '.4f')} |"
    yield ""
    yield f"| phenomenon, {rows[-1][0]} | pairs | accuracy (%) |"
    yield "|---|---:|---:|"
    for name, values in last["phenomena"].items():
        yield f"| {name} | {values['pairs']:.0f} | {cell(values)} |"


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
