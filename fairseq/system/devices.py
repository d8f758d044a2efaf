"""The accelerator of a process, whichever torch finds: NVIDIA's, AMD's, Apple's, Intel's or another one's."""

from __future__ import annotations

import torch
from torch import Tensor


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that this machine has; None: there is only the CPU."""
    kind = torch.accelerator.current_accelerator()
    return kind if kind is not None and torch.accelerator.is_available() else None


def select(index: int) -> torch.device:
    """Make accelerator *index*, which there must be, the current one of this process, and return it."""
    kind = accelerator()
    assert kind is not None
    # Called `set_device_idx` before torch 2.8.
    name = "set_device_index" if hasattr(torch.accelerator, "set_device_index") else "set_device_idx"
    getattr(torch.accelerator, name)(index)
    return torch.device(kind.type, index)


def is_accelerator(device: torch.device) -> bool:
    """Return whether *device* is neither the CPU nor one without memory."""
    return device.type not in ("cpu", "meta")


def random_state(device: torch.device) -> Tensor:
    """Return the state of the random generator of *device*, the current accelerator, in host memory."""
    return torch.get_device_module(device).get_rng_state().cpu()


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Restore what :func:`random_state` returned."""
    torch.get_device_module(device).set_rng_state(state.cpu())
