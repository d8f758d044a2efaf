"""What version 1.0.0 wrote is read by every later version, and goes on with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs

from fairseq.hub import LanguageModel

RELEASE = runs.ROOT / "tests" / "golden" / "release_1_0"
EXPECTED = json.loads((RELEASE / "expected.json").read_text(encoding="utf-8"))


def stored(name: str) -> Path:
    """The checkpoint of a run, a folder where its training was sharded."""
    folder = RELEASE / name
    return folder if folder.is_dir() else RELEASE / f"{name}.pt"


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_of_1_0_goes_on_with_the_same_updates(name: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint_last.pt").symlink_to(stored(name))
    log = runs.updates(runs.train(tmp_path, EXPECTED[name]["flags"], "--max-update 8 --no-save"))
    wanted = EXPECTED[name]["updates"]
    for metric in ("num_updates", "loss", "gnorm", "lr"):
        assert [line[metric] for line in log] == pytest.approx([line[metric] for line in wanted], rel=1e-4), metric


@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_of_1_0_gives_the_same_perplexity(name: str) -> None:
    model = LanguageModel.from_pretrained(stored(name), data=runs.DATA)
    text = (runs.GOLDEN / "text" / "valid.txt").read_text(encoding="utf-8").splitlines()[:20]
    assert model.perplexity(text) == pytest.approx(EXPECTED[name]["perplexity"], rel=1e-5)
