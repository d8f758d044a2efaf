"""``pytest --device cuda``: tests that train in their own process do it on a GPU, or skip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import torch


@pytest.mark.parametrize(
    "device, flags, on_cpu", [("cpu", "--cpu", True), ("cuda", "--cpu", False), ("cpu", "", False)]
)
def test_a_run_trains_on_the_device_of_the_option(
    device: str, flags: str, on_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(runs, "DEVICE", device)
    monkeypatch.setattr(runs.train_command, "main", started.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    runs.train(tmp_path, runs.BASELINE.replace("--cpu", flags))
    assert [args.cpu for args in started] == [on_cpu]


def test_without_a_gpu_a_test_that_trains_on_one_skips_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.skip.Exception, match="--device cuda: there is no GPU"):
        runs.train(tmp_path, runs.BASELINE)


def test_the_option_reaches_the_runs(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getoption("--device") == runs.DEVICE
