"""Variables of the environment with which a library cannot be imported: one line that names
them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import runs


@pytest.mark.parametrize(
    "command, name, value",
    [
        ("preprocess", "TQDM_MININTERVAL", "x"),
        ("preprocess", "TQDM_NCOLS", "wide"),
        ("preprocess", "TORCH_LOGS", "nix"),
        ("plot", "MPLBACKEND", "nix"),
    ],
)
def test_a_value_that_a_library_cannot_read_is_one_line(command: str, name: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"split": "train_inner", "num_updates": 1, "loss": 2.0}\n')
    flags = f"{tmp_path}/metrics.jsonl --split train_inner --results-path {tmp_path}/o.png" if command == "plot" else ""
    words = [sys.executable, "-m", f"fairseq_cli.{command}", *flags.split()]
    done = subprocess.run(words, capture_output=True, text=True, env=runs.environment(**{name: value}))
    errors = done.stderr.splitlines()
    assert done.returncode == 2 and len(errors) == 1 and "error: " in errors[0] and name in errors[0], done.stderr
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
