"""Kernels in several threads and processes of Python: each call has memory of its own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import runs
from launches import in_processes

from fairseq.kernels import build as native
from fairseq.kernels.build import library

CALLS = Path(__file__).with_name("calls.py")
SOURCE = Path(native.__file__).with_name("dropout.c")
pytestmark = pytest.mark.skipif(library("dropout", SOURCE) is None, reason="no C compiler")


def test_threads_and_forks_that_share_a_model_compute_what_each_does_alone() -> None:
    environment = {**os.environ, "PYTHONPATH": str(runs.ROOT), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, CALLS, "4"], env=environment, capture_output=True, text=True, timeout=runs.TIMEOUT
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def load(tmp_path: Path) -> Callable[[], int]:
    """Loads a library by a cache of its own, and returns what its function gives."""
    (tmp_path / "number.c").write_text("int number(void) { return 7; }")

    def call() -> int:
        os.environ["XDG_CACHE_HOME"] = str(tmp_path)
        native.library.cache_clear()
        return int(native.library("testing", tmp_path / "number.c").number())  # type: ignore[union-attr]

    return call


def test_processes_that_compile_at_once_all_load_the_library(tmp_path: Path, load: Callable[[], int]) -> None:
    assert in_processes(load, load, load) == [(0, 7)] * 3
    assert len([*(tmp_path / "fairseq-short").iterdir()]) == 1, "one library, and nothing of its making"


def test_a_damaged_library_in_the_cache_is_compiled_again(tmp_path: Path, load: Callable[[], int]) -> None:
    def load_damaged(cut: Callable[[bytes], bytes]) -> tuple[int, bool]:
        load()
        (path,) = (tmp_path / "fairseq-short").iterdir()
        intact = path.read_bytes()
        path.unlink()  # the former one is in use
        path.write_bytes(cut(intact))
        return load(), len(path.read_bytes()) == len(intact)

    cuts = (lambda all: all[: len(all) // 2], lambda all: all[:4] + bytes(len(all) - 4), lambda _: b"")
    for cut in cuts:
        assert in_processes(functools.partial(load_damaged, cut)) == [(0, (7, True))]
