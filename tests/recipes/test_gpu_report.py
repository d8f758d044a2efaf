"""The report of ``make gpu``: steps that fail do not stop the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


def test_a_step_that_fails_stands_in_the_report_with_its_last_line_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    setup = gpu.Setup("cpu", small=True, seconds=0, folder=str(tmp_path / "data"))
    chosen = [
        gpu.Step("unknown flag", "train", 300, "llama_tiny", "bf16", "--dropout 7"),
        gpu.Step("too slow", "train", 0.01, "llama_tiny", "bf16"),
        gpu.Step("llama_tiny, bf16", "train", 300, "llama_tiny", "bf16"),
    ]
    assert not gpu.report(chosen, setup, 10, tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    failed, slow, trained = content["steps"]
    assert "dropout" in failed["error"] and "7" in failed["error"] and "took longer" in slow["error"]
    assert not content["passed"] and [step["passed"] for step in content["steps"]] == [False, False, True]
    assert trained["tokens_per_second"] > 0 and trained["flops_per_token"] > 0 and trained["mib"] > 0
    assert content["machine"]["torch"] == torch.__version__ and content["machine"]["commit"]
    table = capsys.readouterr().out
    assert "| unknown flag | " in table and "FAILED: " in table and "1 of 3 steps passed" in table


def test_the_time_of_the_report_bounds_every_step(tmp_path: Path) -> None:
    setup = gpu.Setup("cpu", small=True, seconds=0, folder=str(tmp_path))
    result = gpu.run(gpu.Step("late", "train", 60, "llama_tiny", "bf16"), setup, seconds_left=2)
    assert result["error"] == "not run: the time of the report is over" and not result["passed"]


def test_losses_that_differ_are_an_error() -> None:
    assert gpu.difference([2.0, 1.0], [2.0, 1.001], 1e-2, "the CPU's") == pytest.approx(1e-3, rel=1e-2)
    for found in ([2.0, 1.1], [2.0, float("nan")], [2.0]):
        with pytest.raises(RuntimeError, match="the CPU's"):
            gpu.difference(found, [2.0, 1.0], 1e-2, "the CPU's")


def test_a_build_of_torch_without_cuda_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "make gpu DEVICE=cpu rehearses" in capsys.readouterr().err
