"""Model FLOPs utilisation: the share of a device's peak speed that training needs (Chowdhery et al. 2022, §4.1)."""

from __future__ import annotations

import re

import numpy as np
import torch

from fairseq.config.settings import CommonConfig
from fairseq.models.flops import Reading, flops_per_token
from fairseq.tasks.masked_lm import MaskedLMTaskConfig
from fairseq.training.trainer import Trainer

# Of dense products: data sheets also print twice as much, for 2:4 sparsity.
PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
PEAKS: dict[str, tuple[float | None, ...]] = {
    # Name of the device: dense TFLOP/s by PRECISIONS, from the vendors' data sheets; None: not supported.
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
    """Return the operations per second of dense matrix products; None if not known, as for a part of a GPU (MIG).

    *device* is the name that ``torch.cuda.get_device_name`` returns, *precision* one of :data:`PRECISIONS`.
    """
    # A part of a GPU reports the name of the whole one, with MIG in it.
    for pattern, peaks in PEAKS.items():
        if re.fullmatch(pattern, device) and "MIG" not in device:
            peak = peaks[PRECISIONS.index(precision)]
            return None if peak is None else peak * 1e12
    return None


def matrix_precision(common: CommonConfig) -> str:
    """Return the precision of matrix products."""
    if common.bf16:
        return "bf16"
    if common.fp16 or common.memory_efficient_fp16:
        return "fp16"
    return "tf32" if common.tf32 else "fp32"


def token_flops(trainer: Trainer) -> float | None:
    """Return the operations of one token of the run; None for models without an output layer over words.

    Rows count as full.
    """
    length = trainer.task.batch_settings().get("tokens_per_sample")
    if length is None or trainer.model.output_layer is None:
        return None
    settings = trainer.task.settings.task
    reading = Reading(
        segment=length,
        memory=trainer.model.memory_length,
        predicted=settings.mask_prob if isinstance(settings, MaskedLMTaskConfig) else 1.0,
        counts=np.array(trainer.task.source_dictionary.count),
    )
    return flops_per_token(trainer.model, reading)


def token_share(trainer: Trainer) -> float | None:
    """Return the percentage of the devices' peak that one token per second needs; None where it is not known."""
    device, common = trainer.world.device, trainer.task.settings.common
    on_gpu = device.type == "cuda"
    peak = peak_flops(torch.cuda.get_device_name(device), matrix_precision(common)) if on_gpu else None
    flops = token_flops(trainer) if peak is not None else None
    return None if peak is None or flops is None else 100 * flops / (peak * trainer.world.size)
