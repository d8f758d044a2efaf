"""Noise of dropout on CPUs: which elements are kept.

torch's dropout draws one random number for each element on one thread, which costs more than the
matrix product that it follows. Here 16 bits decide about an element, four elements to a word of a
generator that threads share; the rate is exact to 1/65536 (the kept values are scaled by what was
really kept, so the expectation is exact).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LOWEST = torch.iinfo(torch.int16).min
"""The least of the values of sixteen bits, which are compared as signed numbers."""
_LEVELS = 1 << 16
_SEEDS = 1 << 62  # torch draws signed numbers of 64 bits


def draw_seed() -> int:
    """The seed of the next noise: torch's generator draws it,
    so that a checkpoint's random state repeats it."""
    return int(torch.randint(_SEEDS, (), device="cpu"))


def words_of(size: int, seed: int) -> np.ndarray:
    """Noise for *size* elements, four to a word: uint64."""
    count = max(1, (size + 3) // 4)
    # As in training.c.
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ z >> 30) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> 27) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> 31


def dropped_values(p: float) -> int:
    """Number of the 65536 values of sixteen bits that drop an element at the rate *p*."""
    # Never all values: the factor of the rest would be infinite.
    return min(max(round(p * _LEVELS), 0), _LEVELS - 1)


def scale_of(p: float) -> float:
    """Factor of what is kept."""
    return _LEVELS / (_LEVELS - dropped_values(p))


def pick(x: Tensor, words: Tensor, p: float) -> Tensor:
    """*x* scaled where the noise *words*, int64, keep it, 0 elsewhere.

    Elements are picked by torch's threshold kernel, which runs at the speed of memory: a boolean
    mask would be converted and multiplied at a tenth of it.
    """
    # Noise at or below it drops the element.
    threshold = LOWEST + dropped_values(p) - 1
    values = words.view(torch.int16)[: x.numel()].view(x.shape).float()
    if x.dtype != torch.float32:
        # Only the sign of the difference matters, which every type keeps.
        values = values.sub_(threshold).to(x.dtype)
        threshold = 0
    return torch.ops.aten.threshold_backward(x, values, threshold).mul_(scale_of(p))
