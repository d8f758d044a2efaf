"""Accelerators that do nothing, of any kind, for tests on a host without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


def found(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int = 1) -> list[int]:
    """Let torch have *count* accelerators of a *kind*, or none; return the numbers of those that
    are selected."""
    selected: list[int] = []
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda: SimpleNamespace(has_fp64=True))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None if kind is None else torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "set_device_index", selected.append)
    for module, has in ((torch.accelerator, kind is not None), (torch.cuda, kind == "cuda")):
        monkeypatch.setattr(module, "is_available", lambda has=has: has)
        monkeypatch.setattr(module, "device_count", lambda has=has: count if has else 0)
    return selected
