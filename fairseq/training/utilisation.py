"""Model FLOPs utilisation: the share of a device's peak speed
that training reaches (Chowdhery et al. 2022, §4.1)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from fairseq.config.settings import CommonConfig
from fairseq.distributed import World
from fairseq.modules import devices

T = TypeVar("T")

# Of dense products: data sheets also print twice as much, for 2:4 sparsity.
PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
PEAKS: dict[str, tuple[float | None, ...]] = {
    # Name of the device: dense TFLOP/s by PRECISIONS,
    # from the vendors' data sheets; None: not supported.
    r"NVIDIA (H200|GH200|H100|H800)(?!.*(PCIe|NVL)).*": (989.4, 989.4, 494.7, 66.9),
    r"NVIDIA H(100|800) PCIe": (756, 756, 378, 51.2),
    r"(NVIDIA )?A(100|800)-.*": (312, 312, 156, 19.5),
    r"NVIDIA A100 .*": (312, 312, 156, 19.5),
    r"NVIDIA A40": (149.7, 149.7, 74.8, 37.4),
    r"NVIDIA A10": (125, 125, 62.5, 31.2),
    r"NVIDIA L4": (121, 121, 60, 30.3),
    r"NVIDIA L40S": (362, 362, 183, 91.6),
    r"(NVIDIA |Tesla )*V100-SXM2.*": (None, 125, None, 15.7),
    r"(NVIDIA |Tesla )*V100-PCIE.*": (None, 112, None, 14),
    r"(NVIDIA |Tesla )*T4": (None, 65, None, 8.1),
}


def peak_flops(device: str, precision: str) -> float | None:
    """Return the operations per second of dense matrix products; None if not known, as for a part
    of a GPU (MIG).

    *device* is the name that ``devices.name`` returns, *precision* one of :data:`PRECISIONS`.
    """
    # A part of a GPU reports the name of the whole one, with MIG in it.
    for pattern, peaks in PEAKS.items():
        if re.fullmatch(pattern, device) and "MIG" not in device:
            peak = peaks[PRECISIONS.index(precision)]
            return None if peak is None else peak * 1e12
    return None


def device_peak(common: CommonConfig, world: World) -> float | None:
    """Return the peak of the device of *world* in the precision of matrix products; None if not
    known, and on CPUs."""
    if not devices.is_accelerator(world.device):
        return None
    precision = "bf16" if common.bf16 else "fp16" if common.fp16 or common.memory_efficient_fp16 else "fp32"
    return peak_flops(devices.name(world.device), "tf32" if common.tf32 and precision == "fp32" else precision)


def count_flops(step: Callable[[], T]) -> tuple[T, int]:
    """Return the result of *step* and the operations of its matrix products, recomputed ones
    included, as torch counts them. Compiled code runs as it was written."""
    in_place = {torch.ops.aten.addmm_: _product, torch.ops.aten.baddbmm_: _product}  # which torch leaves out
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter, torch.compiler.set_stance("force_eager"):
        result = step()
    return result, counter.get_total_flops()


def _product(total: Any, left: torch.Size, right: torch.Size, **_: Any) -> int:
    """The operations of [..., N, K] @ [..., K, M]."""
    return 2 * left.numel() * right[-1]
