"""Any accelerator that torch finds is used alike, and one module knows the kinds of them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import accelerators
import pytest
import runs
import torch
from strict import on_strict_device

from fairseq.modules import devices
from fairseq.system import provenance

APPLE, INTEL, NVIDIA = (torch.device(name) for name in ("mps:0", "xpu:0", "cuda:0"))
# Files that name CUDA all the same.
NAMES = {
    "fairseq/modules/devices.py": "the one that knows it",
    "fairseq/modules/attention.py": "torch's function that knows who takes shared keys",
    "fairseq/utils.py": "plug-ins call `move_to_cuda`, as fairseq calls it",
    "fairseq/interop/fairseq/roberta_hub.py": "tasks of plug-ins take `use_cuda`, as fairseq gives it",
    "fairseq/config/parser.py": "a flag of other programs, and what it is here",
    "fairseq/distributed/launch.py": "NCCL, whose name depends on the device",
}


def test_no_other_module_names_cuda() -> None:
    files = [path for folder in ("fairseq", "fairseq_cli") for path in (runs.ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    words = re.compile(r"(?<!is_)cuda|is_mps|torch\.(mps|xpu)", re.IGNORECASE)
    naming = {str(path.relative_to(runs.ROOT)) for path in files if words.search(path.read_text(encoding="utf-8"))}
    assert naming <= NAMES.keys()


@pytest.mark.parametrize("kind, count", [("cuda", 4), ("xpu", 2), ("hpu", 1), (None, 0)])
def test_accelerators_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int) -> None:
    selected = accelerators.found(monkeypatch, kind, count)
    assert devices.accelerator() == (None if kind is None else torch.device(kind)) and devices.count() == count
    assert devices.is_present("cpu") and devices.is_present("cuda:0") is (kind == "cuda")
    if kind is not None:
        assert devices.select(count - 1) == torch.device(kind, count - 1) and selected == [count - 1]
        assert devices.is_present(f"{kind}:0")


def test_numbers_in_float64_are_on_the_host_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators.found(monkeypatch, "mps")
    assert devices.accelerator() == torch.device("mps") and devices.count() == 1
    host = torch.device("cpu")
    for device, place in ((APPLE, host), (INTEL, INTEL), (NVIDIA, NVIDIA), (host, host)):
        assert devices.exact_device(device) == place
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda: SimpleNamespace(has_fp64=False))
    assert devices.exact_device(INTEL) == host
    assert devices.exact(torch.tensor([True, False])).tolist() == [1.0, 0.0]


def test_memory_is_not_pinned_for_a_gpu_that_shares_it_with_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x.clone())
    x = torch.zeros(2)
    for kind in ("mps", "cuda"):
        accelerators.found(monkeypatch, kind)
        assert (devices.pin(x) is x) == (kind == "mps")


def test_torch_before_2_8_selects_a_device_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators.found(monkeypatch, "cuda", 2)
    selected: list[int] = []
    monkeypatch.delattr(torch.accelerator, "set_device_index")
    monkeypatch.setattr(torch.accelerator, "set_device_idx", selected.append)
    assert devices.select(1).index == 1 and selected == [1]


def module(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Let torch's module of every device have these *functions*."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**functions))


def test_random_states_are_asked_for_with_the_device_where_torch_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    module(
        monkeypatch,
        get_rng_state=lambda *args: calls.append(args) or torch.zeros(2, dtype=torch.uint8),
        set_rng_state=lambda *args: calls.append(args[1:]),
    )
    for device in (NVIDIA, INTEL, APPLE):
        devices.set_random_state(devices.random_state(device), device)
    assert calls == [(NVIDIA,), (NVIDIA,), (INTEL,), (INTEL,), (), ()]


def test_what_torch_does_not_tell_of_a_device_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch)
    assert devices.peak_memory(APPLE) is None
    assert devices.profiler_activity(APPLE) is None and devices.profiler_activity(INTEL) is not None
    devices.record_allocations(APPLE, 9)
    devices.write_allocations(APPLE, "/nowhere/snapshot")
    assert devices.peak_memory(torch.device("cpu")) is None and devices.peak_memory(torch.device("meta")) is None


def test_a_gpu_that_was_not_used_is_not_asked_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators.found(monkeypatch, "cuda")
    for is_used in (False, True):
        module(monkeypatch, is_initialized=lambda used=is_used: used, get_device_name=lambda: "H100")
        assert provenance.machine().get("gpu") == ("H100" if is_used else None)
    module(monkeypatch)
    assert "gpu" not in provenance.machine()


@on_strict_device
def test_copies_random_numbers_and_memory_of_a_device() -> None:
    device = devices.select(0)
    moved = devices.move(torch.ones(3), device)
    assert moved.device == device and devices.move(moved, device) is moved
    before = devices.random_state(device), torch.get_rng_state()
    with devices.same_random_numbers(device):
        torch.randn(3, device=device), torch.randn(3)
        assert not torch.equal(devices.random_state(device), before[0])
    assert torch.equal(devices.random_state(device), before[0]) and torch.equal(torch.get_rng_state(), before[1])
    assert devices.peak_memory(device) == 3 << 20 and provenance.machine()["gpu"] == "Strict"
