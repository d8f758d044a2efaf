"""The device of a process, and the arithmetic that it is allowed."""

from __future__ import annotations

import logging

import torch

from fairseq.config.settings import CommonConfig
from fairseq.errors import UserError

logger = logging.getLogger(__name__)


def device_of(common: CommonConfig, local_rank: int = 0) -> torch.device:
    """Select GPU *local_rank*, or the CPU with --cpu or without any GPU, and float32's precision on it.

    Raises:
        UserError: there is no GPU of that number.
    """
    # "highest" keeps float32 exact: PyTorch's own default may change, and a user's environment does.
    torch.set_float32_matmul_precision("high" if common.tf32 else "highest")
    if common.cpu or not torch.cuda.is_available():
        if (common.fp16 or common.memory_efficient_fp16) and not _has_float16_arithmetic():
            flag = "`fp16`" if common.fp16 else "`memory_efficient_fp16`"
            logger.warning(f"{flag}: this CPU has no float16 arithmetic, so it is far slower than float32; use `bf16`")
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(f"`device_id` {local_rank}: there are {torch.cuda.device_count()} GPUs, numbered from 0")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def chosen_device(name: torch.device | str) -> torch.device:
    """Return the device called *name*; ``auto`` is a GPU if there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def _has_float16_arithmetic() -> bool:
    """Return whether CPU matrix products run in float16; True where the build of PyTorch does not report it."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return supported is None or bool(supported())
