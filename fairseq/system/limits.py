"""Limits on what settings and files may ask for,
checked before memory or processes are allocated."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq.errors import UserError, is_out_of_memory

# Commands that read text only, and their worker processes, need not load torch.
if TYPE_CHECKING:
    from torch import nn

PROCESSES_PER_CORE = 16
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """Return the memory that this process may use:
    physical memory, capped by the cgroup limit or ``ulimit -v``."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or "max"
        limits.append(int(_CGROUP.read_text()))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min([*limits, soft] if soft != resource.RLIM_INFINITY else limits)


def check_processes(flag: str, count: int) -> None:
    """Raise UserError, which names *flag*,
    if this machine cannot run *count* processes on its CPUs."""
    most = PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if count > most:
        raise UserError(f"{flag} {count}: at most {most} processes run on the {os.cpu_count()} cores of this machine")


@dataclass(frozen=True)
class ModelLimit:
    """Most ``elements`` in all parameters of a model,
    most ``tensors``, and the error message of a larger one."""

    elements: int
    tensors: int
    advice: str

    @classmethod
    def of_machine(cls) -> ModelLimit:
        """Return the limit by memory: float32 parameters have to fit."""
        available = memory_bytes()
        return cls(
            available // 4,
            1 << 20,
            f"the model's parameters do not fit into {available / 2**30:.0f} GiB of memory; choose a smaller `arch` "
            "or lower its layers, widths or positions",
        )

    @classmethod
    def of_checkpoint(cls, parameters: Mapping[str, object], path: str | Path) -> ModelLimit:
        """Return the limit of a model whose parameters are in a file:
        twice what it contains, and a little more.

        Settings in the file may ask for any size; a model cannot be larger than the parameters that
        it is filled with.
        """
        from torch import Tensor

        sizes = [value.numel() for value in parameters.values() if isinstance(value, Tensor)]
        return cls(
            2 * sum(sizes) + (1 << 20),
            2 * len(sizes) + 1000,
            f"{path}: its settings describe a larger model than the {sum(sizes):,} parameters that it contains; "
            "use another checkpoint",
        )


class _TooLarge(UserError):
    """The model exceeds a limit."""


@contextlib.contextmanager
def limited_models(limit: ModelLimit) -> Iterator[None]:
    """Context in which a model under construction may not exceed *limit*.

    Each parameter counts as it is registered, before it is initialized, so that memory is not used
    yet. Parameters on the meta device take no memory and count by their number only.

    Raises:
        UserError: the model exceeds the limit; of nested contexts the outermost describes it.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    elements = tensors = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal elements, tensors
        if parameter is None:
            return
        tensors += 1
        elements += 0 if parameter.is_meta else parameter.numel()
        if elements > limit.elements or tensors > limit.tensors:
            raise _TooLarge(limit.advice)

    # The hook of torch is global: nested contexts count the same parameters.
    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    except _TooLarge:
        raise _TooLarge(limit.advice) from None
    except RuntimeError as error:
        if is_out_of_memory(error) or "Storage size calculation overflowed" in str(error):
            raise _TooLarge(limit.advice) from None
        raise
    finally:
        handle.remove()
