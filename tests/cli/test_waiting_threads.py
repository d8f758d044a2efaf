"""How OpenMP's threads wait in the commands and in the processes that they start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WAITS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def waits(code: str, program: str = "fairseq-train", **chosen: str) -> str:
    """What *code* prints in a process of *program*, where the user has *chosen* how threads wait."""
    plain = {name: value for name, value in os.environ.items() if name not in WAITS}
    lines = f"import os, sys; sys.argv[0] = {program!r}; import fairseq_cli; {code}"
    return subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=True, env={**plain, **chosen}
    ).stdout.strip()


def test_threads_of_a_command_sleep_soon_and_torch_is_not_imported_before() -> None:
    assert waits("print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)") == "3000 False"


def test_processes_that_a_command_starts_wait_as_it_does() -> None:
    start = (
        "import subprocess; subprocess.run([sys.executable, '-c', 'import os; print(os.environ[\"GOMP_SPINCOUNT\"])'])"
    )
    assert waits(start) == "3000"


@pytest.mark.parametrize(
    "chosen", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": ""}], ids=str
)
def test_the_users_choice_is_left(chosen: dict[str, str]) -> None:
    assert waits(f"print([os.environ.get(name, 'none') for name in {WAITS}])", **chosen) == str(
        [chosen.get(name, "none") for name in WAITS]
    )


def test_a_program_that_is_no_command_is_left_alone() -> None:
    assert waits("print('GOMP_SPINCOUNT' in os.environ)", program="/somewhere/study.py") == "False"
