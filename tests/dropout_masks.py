"""Masks of dropout on CPUs, written out."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def splitmix64(seed: int, count: int) -> np.ndarray:
    """Words of the generator as its authors write it, a state that grows and is hashed: uint64."""
    words, whole = [], (1 << 64) - 1
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & whole
        z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & whole
        z = (z ^ z >> 27) * 0x94D049BB133111EB & whole
        words.append(z ^ z >> 31)
    return np.array(words, dtype=np.uint64)


def mask_of(p: float, shape: tuple[int, ...]) -> Tensor:
    """The factors of the next dropout, in float64: sixteen bits of noise from a seed that torch
    draws."""
    seed, count = int(torch.randint(1 << 62, ())), math.prod(shape) // 4 + 1
    bits = splitmix64(seed, count).view(np.int16)
    dropped = round(p * 65536)
    kept = torch.from_numpy(bits[: math.prod(shape)].astype(int) >= dropped - 32768).view(shape)
    return kept.double() * 65536 / (65536 - dropped)
