"""A table of GLUE scores over the updates of pre-training, from the results of fairseq-finetune.

python glue_table.py results/bert-base results/tnf-bert-base --output results.json

Each folder has a folder for each number of updates, with TASK/results.json. Scores are means over
seeds at the best learning rate. The average is of all tasks; where one is not yet done, it is left
out. Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def read(folder: Path) -> list[dict[str, Any]]:
    """Updates and scores of the model in *folder*, in the order of updates."""
    return [
        {
            "updates": int(checkpoint.name),
            "scores": {
                file.parent.name: json.loads(file.read_text(encoding="utf-8"))["score"]
                for file in sorted(checkpoint.glob("*/results.json"))
            },
        }
        for checkpoint in sorted(folder.iterdir(), key=lambda path: int(path.name))
    ]


def add_averages(models: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Add the average to each row of *models* that has all tasks; return the tasks."""
    tasks = sorted({task for rows in models.values() for row in rows for task in row["scores"]})
    for row in (row for rows in models.values() for row in rows):
        complete = row["scores"].keys() == set(tasks)
        row["average"] = sum(row["scores"].values()) / len(tasks) if complete else None
    return tasks


def report(models: dict[str, list[dict[str, Any]]], tasks: Sequence[str]) -> Iterator[str]:
    """The table in Markdown, and when each model reaches the first one's last average."""
    yield f"| model | updates | {' | '.join(tasks)} | average |"
    yield f"|---|{'---:|' * (len(tasks) + 2)}"
    for name, rows in models.items():
        for row in rows:
            cells = [row["scores"].get(task) for task in tasks] + [row["average"]]
            shown = " | ".join("–" if cell is None else f"{cell:.1f}" for cell in cells)
            yield f"| {name} | {row['updates']:,} | {shown} |"
    (first, rows), *others = models.items()
    last = rows[-1]
    if last["average"] is None:
        return
    for name, rows in others:
        reached = [row["updates"] for row in rows if row["average"] is not None and row["average"] >= last["average"]]
        aim = f"{last['average']:.1f}, the average of {first} after {last['updates']:,} updates"
        yield f"\n{name} reaches {aim}: {f'after {reached[0]:,}' if reached else 'never'}"


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="results of a model")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the scores here, as JSON")
    args = parser.parse_args(argv)
    models = {folder.name: read(folder) for folder in args.folders}
    tasks = add_averages(models)
    print(*report(models, tasks), sep="\n")
    if args.output:
        args.output.write_text(json.dumps({"tasks": tasks, "models": models}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
