"""What version 1.0.0 wrote is read by every later version, and goes on with the same numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import runs

from fairseq.hub import LanguageModel

RELEASE = runs.ROOT / "tests" / "golden" / "release_1_0"
EXPECTED = json.loads((RELEASE / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_of_1_0_goes_on_with_the_same_updates(name: str, tmp_path: Path) -> None:
    shutil.copy(RELEASE / f"{name}.pt", tmp_path / "checkpoint_last.pt")
    log = runs.updates(runs.train(tmp_path, EXPECTED[name]["flags"], "--max-update 8 --no-save"))
    wanted = EXPECTED[name]["updates"]
    for metric in ("num_updates", "loss", "gnorm", "lr"):
        assert [line[metric] for line in log] == pytest.approx([line[metric] for line in wanted], rel=1e-4), metric


@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_of_1_0_gives_the_same_perplexity(name: str) -> None:
    model = LanguageModel.from_pretrained(RELEASE / f"{name}.pt", data=runs.DATA)
    text = (runs.GOLDEN / "text" / "valid.txt").read_text(encoding="utf-8").splitlines()[:20]
    assert model.perplexity(text) == pytest.approx(EXPECTED[name]["perplexity"], rel=1e-5)
