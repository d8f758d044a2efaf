"""Kernels in several threads and processes of Python: each call has memory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import runs

from fairseq.kernels import build as native
from fairseq.kernels.build import library

CALLS = Path(__file__).with_name("calls.py")
SOURCE = Path(native.__file__).with_name("dropout.c")
pytestmark = pytest.mark.skipif(library("dropout", SOURCE) is None, reason="no C compiler")


def start(*command: object, **environment: object) -> subprocess.Popen[str]:
    chosen = {"PYTHONPATH": str(runs.ROOT), "OMP_NUM_THREADS": "2", **{k: str(v) for k, v in environment.items()}}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *map(str, command)], env={**os.environ, **chosen}, stdout=pipe, stderr=pipe, text=True
    )


def output_of(process: subprocess.Popen[str]) -> str:
    """What *process* prints; an error, or a warning, fails."""
    try:
        out, err = process.communicate(timeout=runs.TIMEOUT)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    return out.strip()


def test_threads_that_share_a_model_compute_what_each_does_alone() -> None:
    output_of(start(CALLS, 10))


CHILD = """
    import os, signal, torch
    from fairseq.kernels.dropout import dropout

    def computed():
        x = torch.arange(1 << 18).float().view(512, 512).requires_grad_()
        y = dropout(x, 0.5)
        (y @ y.t()).sum().backward()
        return float(x.grad.count_nonzero()) > 0

    assert computed()
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends a child that waits for threads of its parent
        os._exit(0 if computed() else 1)
    print(os.waitpid(child, 0)[1], computed())
"""


def test_a_process_that_is_forked_after_use_computes() -> None:
    assert output_of(start("-c", textwrap.dedent(CHILD))) == "0 True"


LOAD = """
    import sys
    from pathlib import Path
    from fairseq.kernels import build as native

    folder = Path(sys.argv[1])
    print(native.library("testing", folder / "number.c").number())
"""
DAMAGE = """
    (path,) = (folder / "fairseq-short").iterdir()
    intact = path.read_bytes()
    for damaged in (intact[: len(intact) // 2], intact[:4] + bytes(len(intact) - 4), b""):
        path.unlink()  # the former one is in use
        path.write_bytes(damaged)
        native.library.cache_clear()
        print(native.library("testing", folder / "number.c").number(), len(path.read_bytes()) == len(intact))
"""


def write_source(folder: Path) -> None:
    (folder / "number.c").write_text("int number(void) { return 7; }")


def test_processes_that_compile_at_once_all_load_the_library(tmp_path: Path) -> None:
    write_source(tmp_path)
    program = textwrap.dedent(LOAD)
    processes = [start("-c", program, tmp_path, XDG_CACHE_HOME=tmp_path) for _ in range(3)]
    assert [output_of(process) for process in processes] == ["7"] * 3
    assert len([*(tmp_path / "fairseq-short").iterdir()]) == 1, "one library, and nothing of its making"


def test_a_damaged_library_in_the_cache_is_compiled_again(tmp_path: Path) -> None:
    write_source(tmp_path)
    program = textwrap.dedent(LOAD) + textwrap.dedent(DAMAGE)
    assert output_of(start("-c", program, tmp_path, XDG_CACHE_HOME=tmp_path)) == "7\n" + "\n".join(["7 True"] * 3)
