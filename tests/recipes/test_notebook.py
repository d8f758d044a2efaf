"""The notebook: its cells run in order, in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs

NOTEBOOK = runs.ROOT / "examples" / "first_model.ipynb"


def test_the_cells_of_the_notebook_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name, value in runs.environment(SMALL="1", MPLBACKEND="Agg").items():
        monkeypatch.setenv(name, value)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), namespace)
    output = capsys.readouterr().out
    assert "bits per byte" in output and "Perplexity" in output
    assert output.count("#") > 20 and output.count("This function returns") >= 3
