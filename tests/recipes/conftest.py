"""Fixtures of the tests of recipes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm

# By most recipes: once, not in each fork.
IMPORTED = ("matplotlib.pyplot", "sacremoses", "fairseq.hub", "fairseq.training.loop")
IMPORTED += ("fairseq.evaluation.language_models", "fairseq.evaluation.validation", "fairseq.preprocessing")


@pytest.fixture(scope="session", autouse=True)
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The interpreter of recipes, whose commands are forks of this process."""
    for name in IMPORTED:
        importlib.import_module(name)
    with warm.interpreter(tmp_path_factory.mktemp("bin")) as program, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHON", str(program))
        yield program
