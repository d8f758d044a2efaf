"""Mutation testing: change the code of one place in small ways and see which changes no test
notices.

    # run the mutants that have no result yet, or those named (globs)
    python -m scripts.mutation PLACE [MUTANTS …]
    # run those again that no test killed, after a change of the tests
    python -m scripts.mutation PLACE --again
    # count results per file, and list what no test killed
    python -m scripts.mutation PLACE --report

Each place has a working folder, build/mutation/PLACE, with links to the repository and the settings
of mutmut, which makes the mutants. Its `results.json` keeps outcomes: a second run goes on where
the first ended. Remove the folder after a change of the code.
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
    """Files to mutate, and the tests that ought to see a change of them: fast ones, none that start
    processes."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


PLACES = {
    "optim": Place(("fairseq/optim/*.py",), ("tests/optim",)),
    "notes": Place(
        ("fairseq/notes/dictionary.py",),
        (
            "tests/notes/test_note_dictionary.py",
            "tests/notes/test_centred_notes.py",
            "tests/notes/test_note_properties.py",
        ),
    ),
    "checkpoint": Place(
        ("fairseq/checkpoint/*.py",),
        (
            "tests/checkpoint",
            # a whole run, slower than all others together
            "--deselect=tests/checkpoint/test_integrity.py::test_training_goes_on_from_the_newest_good_checkpoint",
        ),
    ),
    "training": Place(
        ("fairseq/training/*.py",),
        (
            "tests/training/test_best.py",
            "tests/training/test_carried_state.py",
            "tests/training/test_effective.py",
            "tests/training/test_loop.py",
            "tests/training/test_loop_steps.py",
            "tests/training/test_last_line.py",
            "tests/training/test_limits.py",
            "tests/training/test_log_lines.py",
            "tests/training/test_loss_scaler.py",
            "tests/training/test_nonfinite_places.py",
            "tests/training/test_outputs.py",
            "tests/training/test_parallel.py",
            "tests/training/test_profile_window.py",
            "tests/training/test_resumption.py",
            "tests/training/test_resumed_run.py",
            "tests/training/test_restored_trainer.py",
            "tests/training/test_run.py",
            "tests/training/test_run_lines.py",
            "tests/training/test_saving.py",
            "tests/training/test_trainer.py",
            "tests/training/test_updates.py",
            "tests/training/test_utilisation.py",
            "tests/distributed/test_agreement.py::test_ranks_that_agree_exchange_one_number",
            "tests/distributed/test_agreement.py::test_the_first_fact_that_differs_is_named_on_every_rank",
            "tests/distributed/test_agreement.py::test_data_that_cannot_be_read_end_all_ranks_with_the_reason",
        ),
    ),
    "distributed": Place(
        ("fairseq/distributed/*.py",),
        (
            "tests/distributed/test_ddp.py",
            "tests/distributed/test_device.py",
            "tests/distributed/test_gather_tensors.py",
            "tests/distributed/test_interruption.py",
            "tests/distributed/test_run.py",
            "tests/distributed/test_sharded_reducer.py",
            "tests/distributed/test_slurm.py",
            "tests/distributed/test_spawned.py",
            "tests/distributed/test_tensor_part.py",
        ),
    ),
}

SETTINGS = {
    "source_paths": ["fairseq", "fairseq_cli"],
    "do_not_mutate": ["fairseq/interop/pickles/*"],  # readers of other programs' files, a place of their own
    # Wording is not behaviour: tests elsewhere hold that an error is raised, and the flag or file
    # that it names.
    "do_not_mutate_patterns": [r"raise \w+\(", r"logger\.\w+\(", r"warnings\.warn\(", r"flag\("],
    "also_copy": ["benchmarks", "docs", "examples", "scripts", "README.md", "constraints.txt", "Makefile"],
}

# mutmut's own run starts pytest again for every mutant, which takes longer than the tests.
GENERATE = """import os
from mutmut.__main__ import create_mutants
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir, setup_source_paths
set_mutant_under_test("mutant_generation")
os.makedirs("mutants", exist_ok=True)
copy_src_dir()
copy_also_copy_files()
setup_source_paths()
create_mutants(1)
"""


def prepare(name: str) -> Path:
    """Return the working folder of a place: links to the repository, and the settings of mutmut."""
    folder = WORK / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in ROOT.iterdir():
        link = folder / path.name
        own = ("build", "mutants", ".git", ".venv", "setup.cfg", "pyproject.toml")
        if path.name not in own and not link.is_symlink():
            link.symlink_to(path)
    # mutmut reads setup.cfg only if pyproject.toml, which pytest needs, has no section for it
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    place = PLACES[name]
    settings = {**SETTINGS, "only_mutate": place.files, "pytest_add_cli_args_test_selection": place.tests}
    lines = ["[mutmut]"]
    for key, value in settings.items():
        lines.append(f"{key} = {value}" if isinstance(value, str) else "\n    ".join([f"{key} =", *value]))
    (folder / "setup.cfg").write_text("\n".join(lines) + "\n")
    return folder


def run(folder: Path, name: str, mutants: list[str], seconds: float) -> int:
    """Make the mutants of a place, and run those of them that have no result, or *mutants*."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", GENERATE], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    tree = folder / "mutants"
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "tests"))), "MUTANT_UNDER_TEST": ""}
    command = [sys.executable, "-m", "scripts.mutation_session", str(folder / "results.json"), str(seconds)]
    return subprocess.run([*command, *PLACES[name].tests, "--", *mutants], cwd=tree, env=environment).returncode


def report(folder: Path) -> None:
    """Print outcomes per file, their sum, and the mutants that no test killed."""
    outcomes = _outcomes(folder)
    total: Counter[str] = Counter()
    for meta in sorted((folder / "mutants" / "fairseq").rglob("*.py.meta")):
        mutants = json.loads(meta.read_text())["exit_code_by_key"]
        counts = Counter(outcomes.get(name, "pending") for name in mutants)
        total += counts
        if mutants:
            print(f"{str(meta.relative_to(folder / 'mutants'))[:-5]}: {len(mutants)} mutants, {_shown(counts)}")
    print(f"all: {sum(total.values())} mutants, {_shown(total)}")
    print(*(f"{outcomes[name]} {name}" for name in _alive(outcomes)), sep="\n")


def _outcomes(folder: Path) -> dict[str, str]:
    return json.loads((folder / "results.json").read_text())


def _alive(outcomes: dict[str, str]) -> list[str]:
    return [name for name, word in outcomes.items() if word in ("survived", "untested")]


def _shown(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))


def main() -> int:
    """Run the mutants of a place, or report what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", choices=PLACES)
    parser.add_argument("mutants", nargs="*", help="names or globs of mutants")
    parser.add_argument("--again", action="store_true", help="mutants that no test has killed")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of tests a mutant meets (default: 10)")
    parser.add_argument("--report", action="store_true", help="print results only")
    args = parser.parse_args()
    folder = prepare(args.place)
    mutants = args.mutants + (_alive(_outcomes(folder)) if args.again else [])
    code = 0 if args.report else run(folder, args.place, mutants, args.seconds)
    report(folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
