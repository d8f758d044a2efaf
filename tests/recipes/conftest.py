"""Fixtures of the tests of recipes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm


@pytest.fixture(scope="session", autouse=True)
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The interpreter of recipes, whose commands are forks of this process."""
    for name in ("scipy.stats", "matplotlib.pyplot"):
        importlib.import_module(name)  # once, not in each fork
    with warm.interpreter(tmp_path_factory.mktemp("bin")) as program, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHON", str(program))
        yield program
