"""The operations of an update are those that torch counts; mfu is logged where the device's peak is
known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from torch import nn

from fairseq.config.settings import CommonConfig
from fairseq.distributed import World
from fairseq.training import log
from fairseq.training.utilisation import count_flops, device_peak, peak_flops

PLAIN = f"--arch transformer_lm {runs.SMALL} --optimizer adam --criterion cross_entropy"


def test_products_of_forward_and_backward_passes_are_counted_also_those_in_place() -> None:
    layer, total = nn.Linear(8, 16, bias=False), torch.zeros(3, 5)

    def step() -> str:
        layer(torch.ones(4, 8, requires_grad=True)).sum().backward()
        total.addmm_(torch.ones(3, 7), torch.ones(7, 5))
        return "done"

    assert count_flops(step) == ("done", 3 * 2 * 4 * 8 * 16 + 2 * 3 * 7 * 5)


@pytest.mark.parametrize(
    "device, precision, expected",
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "fp16", None),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
        ("NVIDIA GeForce GTX 1080", "fp32", None),
    ],
)
def test_the_peak_is_that_of_the_device_and_precision(device: str, precision: str, expected: float | None) -> None:
    assert peak_flops(device, precision) == expected


@pytest.mark.parametrize(
    ("flags", "peak"),
    [({}, 66.9), ({"tf32": True}, 494.7), ({"bf16": True, "tf32": True}, 989.4), ({"fp16": True}, 989.4)],
)
def test_the_peak_is_that_of_the_precision_of_matrix_products(
    flags: dict[str, bool], peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert device_peak(CommonConfig(**flags), World(device=torch.device("cuda", 1))) == pytest.approx(peak * 1e12)
    assert device_peak(CommonConfig(**flags), World()) is None, "on a CPU"


def test_the_log_has_mfu_only_where_the_peak_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--max-update 3 --disable-validation --no-save"
    lines = runs.train(tmp_path / "a", PLAIN, flags)
    assert "mfu" not in lines[0] and "wps" in lines[0]
    counted: list[str] = []

    def count(step: Any) -> Any:
        counted.append("update")
        return step(), 5_000

    monkeypatch.setattr(log, "count_flops", count)
    monkeypatch.setattr(log, "device_peak", lambda *args: 1e6)
    lines = runs.train(tmp_path / "b", PLAIN, flags)
    assert len(counted) == 1, "once an epoch"
    for line in lines[:3]:
        assert float(line["mfu"]) == pytest.approx(0.5 * float(line["ups"]), rel=0.02)
