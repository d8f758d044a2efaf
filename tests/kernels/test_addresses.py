"""Kernels of training read and write nothing beside their tensors, on whatever the compiler and the
processor offer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fairseq.kernels import build as native

FOLDER = Path(native.__file__).parent
TAKE = "#define TAKE(WORDS) "


def test_the_sanitizers_of_addresses_and_undefined_behaviour_find_nothing(tmp_path: Path, machine: str) -> None:
    if machine == "no compiler":
        pytest.skip("nothing is compiled")
    main, attention = tmp_path / "main.c", tmp_path / "attention.c"
    # Compiling takes longest, and longer the more is optimised.
    flags = ["-O0", "-march=native", *os.environ.get("CFLAGS", "").split(), "-fsanitize=address,undefined", "-w"]
    command = [*os.environ.get("CC", "cc").split(), *flags, f"-I{FOLDER}", main, "-o", tmp_path / "main", "-lm"]
    # Calls of kernels that do not compile must fail: they are no reason to skip.
    main.write_text("int main(void) { return 0; }")
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("the compiler has no sanitizers")
    # The pieces of scratch, too, are allocated by the test, which may put each into memory of its
    # own.
    source = (FOLDER / "attention.c").read_text()
    assert source.count(TAKE) == 1
    attention.write_text(source.replace(TAKE, f"{TAKE}exact(&scratch, WORDS) // "))
    text = Path(__file__).with_name("addresses.c").read_text()
    text = text.replace('"ATTENTION"', f'"{attention}"')
    for name in ("dropout", "cross_entropy", "layers"):
        text = text.replace(f'"{name.upper()}"', f'"{FOLDER / name}.c"')
    main.write_text(text)
    subprocess.run(command, check=True)
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
