"""Mutation testing: change the code of one place in small ways and see which changes no test notices.

    python -m scripts.mutation PLACE [MUTANTS …]     run the mutants that have no result yet, or those named (globs)
    python -m scripts.mutation PLACE --report        count results per file, and list what no test killed

Each place has a working folder, build/mutation/PLACE, with links to the repository and the settings of mutmut. Its
`mutants/` keeps results: a second run goes on where the first ended, and runs again what changed.
`python -m mutmut show NAME` in that folder prints a mutant.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutation"


@dataclass(frozen=True)
class Place:
    """Files to mutate, and the tests that ought to see a change of them: fast ones, none that start processes."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


PLACES = {
    "optim": Place(("fairseq/optim/*.py",), ("tests/optim",)),
    "notes": Place(("fairseq/modules/notes.py",), ("tests/modules/test_notes.py",)),
    "checkpoint": Place(
        ("fairseq/checkpoint/*.py",),
        (
            "tests/checkpoint/test_checkpoint.py",
            "tests/checkpoint/test_inert.py",
            "tests/checkpoint/test_integrity.py",
            "tests/checkpoint/test_manager.py",
            "tests/checkpoint/test_optimizer_state.py",
        ),
    ),
    "training": Place(
        ("fairseq/training/*.py",),
        (
            "tests/training/test_best.py",
            "tests/training/test_carried_state.py",
            "tests/training/test_limits.py",
            "tests/training/test_loss_scaler.py",
            "tests/training/test_nonfinite.py",
            "tests/training/test_saving.py",
            "tests/training/test_training.py",
            "tests/training/test_updates.py",
        ),
    ),
    "distributed": Place(("fairseq/distributed/*.py",), ("tests/distributed",)),
}

SETTINGS = {
    "source_paths": ["fairseq", "fairseq_cli"],
    "do_not_mutate": ["fairseq/checkpoint/foreign/*"],  # readers of other programs' files, a place of their own
    # Wording is not behaviour: tests elsewhere hold that an error is raised, and the flag or file that it names.
    "do_not_mutate_patterns": [r"raise \w+\(", r"logger\.\w+\(", r"warnings\.warn\(", r"flag\("],
    "also_copy": ["benchmarks", "docs", "examples", "scripts", "README.md", "constraints.txt", "Makefile"],
    "pytest_add_cli_args": ["-p", "no:cacheprovider"],
    "process_isolation": "forkserver",  # a plain fork inherits torch's threads, which it does not have
    "timeout_constant": "4",  # seconds, times a factor of 15: a busy machine is no result
}

KILLED, SURVIVED, UNTESTED = (1, 3), (0,), (33, 5)


def prepare(name: str) -> Path:
    """Return the working folder of a place: links to the repository, and the settings of mutmut."""
    folder = WORK / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in ROOT.iterdir():
        link = folder / path.name
        if path.name not in ("build", "mutants", ".git", ".venv", "setup.cfg") and not link.is_symlink():
            link.symlink_to(path)
    if (folder / "pyproject.toml").is_symlink():
        (folder / "pyproject.toml").unlink()
    # mutmut reads setup.cfg only if pyproject.toml, which pytest needs, has no section for it
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    place = PLACES[name]
    settings = {**SETTINGS, "only_mutate": place.files, "pytest_add_cli_args_test_selection": place.tests}
    lines = ["[mutmut]"]
    for key, value in settings.items():
        lines.append(f"{key} = {value}" if isinstance(value, str) else "\n    ".join([f"{key} =", *value]))
    (folder / "setup.cfg").write_text("\n".join(lines) + "\n")
    return folder


def results(folder: Path) -> dict[str, dict[str, int | None]]:
    """Exit code of the tests by mutant, of each mutated file."""
    metas = sorted((folder / "mutants" / "fairseq").rglob("*.py.meta"))
    codes = {str(meta.relative_to(folder / "mutants"))[: -len(".meta")]: json.loads(meta.read_text()) for meta in metas}
    return {file: meta["exit_code_by_key"] for file, meta in codes.items() if meta["exit_code_by_key"]}


def outcome(code: int | None) -> str:
    """Result of a mutant in a word; a mutant that never ends, or ends the process, is noticed."""
    if code is None:
        return "pending"
    named = {
        **dict.fromkeys(KILLED, "killed"),
        **dict.fromkeys(SURVIVED, "survived"),
        **dict.fromkeys(UNTESTED, "untested"),
    }
    return named.get(code, "timeout or crash")


def report(folder: Path) -> None:
    """Print outcomes per file, their sum, and the mutants that no test killed."""
    total: Counter[str] = Counter()
    rest = []
    for file, codes in results(folder).items():
        counts = Counter(outcome(code) for code in codes.values())
        total += counts
        rest += [f"{outcome(code)} {name}" for name, code in codes.items() if outcome(code) in ("survived", "untested")]
        print(f"{file}: {len(codes)} mutants, {', '.join(f'{count} {word}' for word, count in sorted(counts.items()))}")
    print(
        f"all: {sum(total.values())} mutants, {', '.join(f'{count} {word}' for word, count in sorted(total.items()))}"
    )
    print(*rest, sep="\n")


def main() -> int:
    """Run mutmut on a place, or report what it found there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", choices=PLACES)
    parser.add_argument("mutants", nargs="*", help="names or globs of mutants")
    parser.add_argument("--report", action="store_true", help="print results only")
    parser.add_argument("--workers", default="1", help="processes, default 1")
    args = parser.parse_args()
    folder = prepare(args.place)
    if args.report:
        report(folder)
        return 0
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", args.workers, *args.mutants]
    code = subprocess.run(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    report(folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
