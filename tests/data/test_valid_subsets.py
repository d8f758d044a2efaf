"""Validation splits ``valid``, ``valid1``, …: named, joined or left out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import runs
from mistakes import user_error

FLAGS = f"{runs.BASELINE} --valid-subset valid --max-update 2 --disable-validation"
MEASURED = f"{runs.BASELINE} --valid-subset valid --max-update 2 --no-save"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose ``valid1`` is the golden corpus's ``test``."""
    folder = tmp_path_factory.mktemp("data") / "bin"
    shutil.copytree(runs.DATA, folder)
    for end in ("bin", "idx"):
        shutil.copy(folder / f"test.{end}", folder / f"valid1.{end}")
    return folder


def test_a_split_that_would_not_be_read_is_named(data: Path, tmp_path: Path) -> None:
    with user_error("--valid-subset valid: leaves out valid1 of .*; name them, join them by --combine-valid-subsets"):
        runs.train(tmp_path, MEASURED, data=data)
    assert not list(tmp_path.iterdir())


def test_joined_splits_are_measured_as_one(data: Path, tmp_path: Path) -> None:
    def measured(*flags: str) -> dict[str, dict[str, float]]:
        log = runs.train(tmp_path, MEASURED, *flags, data=data)
        return {split: lines[-1] for split in ("valid", "valid1") if (lines := runs.summaries(log, split))}

    apart, joined = measured("--valid-subset valid,valid1"), measured("--combine-valid-subsets")
    assert apart.keys() == {"valid", "valid1"} and joined.keys() == {"valid"}
    assert measured("--ignore-unused-valid-subsets")["valid"]["loss"] == apart["valid"]["loss"]
    # Blocks are those of the joined text, whose context differs at one place.
    tokens = {"valid": 2670, "valid1": 2292}
    mean = sum(apart[split]["loss"] * count for split, count in tokens.items()) / sum(tokens.values())
    assert joined["valid"]["loss"] == pytest.approx(mean, rel=0.01)
    assert min(apart["valid"]["loss"], apart["valid1"]["loss"]) < joined["valid"]["loss"]
