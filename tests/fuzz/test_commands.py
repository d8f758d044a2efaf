"""Commands on bad inputs of every class: one line that names the file or flag, exit code 2, nothing
changed, in bounds.

A part of the suite; ``BAD_INPUTS=suite`` runs all of it, ``BAD_INPUTS=whole`` every member of every
class.
"""

from __future__ import annotations

import os
import subprocess
import sys

import runs

CHOICES = {"part": ["--every", "10"], "suite": [], "whole": ["--whole"]}


def test_bad_inputs_are_one_line_and_change_nothing():
    command = [sys.executable, "-m", "fuzz.commands", "--workers", "1", *CHOICES[os.environ.get("BAD_INPUTS", "part")]]
    done = subprocess.run(
        command, capture_output=True, text=True, env=runs.environment(PYTHONPATH=f"{runs.ROOT}:{runs.ROOT / 'tests'}")
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
