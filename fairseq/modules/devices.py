"""The accelerator of a process, whichever torch finds: NVIDIA's, AMD's, Intel's or another maker's.

Other modules name a kind only for kernels that no other kind has. Torch calls AMD's GPUs CUDA, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that this machine has; None: it has none."""
    kind = torch.accelerator.current_accelerator()
    return kind if kind is not None and torch.accelerator.is_available() else None


def count() -> int:
    """Return the number of accelerators of this machine."""
    return 0 if accelerator() is None else torch.accelerator.device_count()


def select(index: int) -> torch.device:
    """Make accelerator *index*, which there must be,
    the current one of this process, and return it."""
    kind = accelerator()
    assert kind is not None
    # Called `set_device_idx` before torch 2.8.
    name = "set_device_index" if hasattr(torch.accelerator, "set_device_index") else "set_device_idx"
    getattr(torch.accelerator, name)(index)
    return torch.device(kind.type, index)


def chosen(name: torch.device | str) -> torch.device:
    """Return the device called *name*; ``auto`` is a GPU if there is one."""
    return torch.device((accelerator() or "cpu") if name == "auto" else name)


def is_present(device: torch.device | str) -> bool:
    """Return whether this machine has devices of the kind of *device*."""
    kind = accelerator()
    return torch.device(device).type in ("cpu", None if kind is None else kind.type)


def is_accelerator(device: torch.device) -> bool:
    """Return whether *device* is neither the CPU nor one without memory."""
    return device.type not in ("cpu", "meta")


def is_cuda(device: torch.device) -> bool:
    """Return whether *device* runs CUDA's kernels, such as apex's."""
    return device.type == "cuda"


# Numbers in float64: sums over a corpus, angles of positions, probabilities of draws


def has_float64(device: torch.device) -> bool:
    """Return whether *device* computes in float64: Apple's GPUs do not, nor do some of Intel's."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties().has_fp64)
    return device.type != "mps"


def exact_device(device: torch.device) -> torch.device:
    """Return where numbers of *device* are in float64: there, or on the host."""
    return device if has_float64(device) else torch.device("cpu")


def exact(x: Tensor) -> Tensor:
    """Return *x* in float64, on :func:`exact_device`; a copy to the host waits for the device."""
    return x.to(exact_device(x.device)).double()


# Memory


def pin(tensor: Tensor) -> Tensor:
    """Return *tensor* in pinned memory of the host,
    from and to which copies need not wait for the device; Apple's share theirs with the host."""
    kind = accelerator()
    return tensor if kind is not None and kind.type == "mps" else tensor.pin_memory()


def host_memory(tensor: Tensor) -> Tensor:
    """Return memory of the host, for a copy of *tensor*: pinned, but for Apple's."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "mps")


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return *tensor* on *device*, copied without waiting but to Apple's."""
    if is_accelerator(device) and tensor.device.type == "cpu":
        # A copy from pinned memory overlaps with computation; from pageable memory it would wait.
        tensor = pin(tensor)
    # Apple's may read memory that is not pinned after it has been freed.
    return tensor.to(device, non_blocking=device.type != "mps")


def synchronize(device: torch.device) -> None:
    """Wait until *device* has done all that it was given."""
    torch.accelerator.synchronize(device)


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes that this process had
    on *device* at once; None where torch does not tell."""
    peak = getattr(torch.get_device_module(device), "max_memory_allocated", None) if is_accelerator(device) else None
    return None if peak is None else int(peak(device))


# Random numbers


def random_state(device: torch.device) -> Tensor:
    """Return the state of the random generator of the accelerator *device*, in host memory."""
    return torch.get_device_module(device).get_rng_state(*_generator(device)).cpu()


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Restore what :func:`random_state` returned."""
    torch.get_device_module(device).set_rng_state(state.cpu(), *_generator(device))


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Context after which the CPU and *device* draw the random
    numbers that they would have drawn without it."""
    host, state = torch.get_rng_state(), random_state(device) if is_accelerator(device) else None
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if state is not None:
            set_random_state(state, device)


def _generator(device: torch.device) -> tuple[torch.device, ...]:
    # Apple's functions take no device: there is one.
    return () if device.type == "mps" else (device,)


# Profiles


def profiler_activity(device: torch.device) -> ProfilerActivity | None:
    """Return the activity under which torch's profiler
    records kernels of *device*; None: it does not."""
    return {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}.get(device.type)


def record_allocations(device: torch.device, most: int | None) -> None:
    """Record the last *most* allocations on *device*, where torch can; None: stop."""
    if is_cuda(device):
        settings: dict[str, Any] = {"enabled": None} if most is None else {"max_entries": most, "stacks": "python"}
        torch.cuda.memory._record_memory_history(**settings)


def write_allocations(device: torch.device, path: str) -> None:
    """Write the allocations that were recorded to the file *path*, where torch can."""
    if is_cuda(device):
        torch.cuda.memory._dump_snapshot(path)
