"""Description of the machine and its peak speeds."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import fairseq.kernels.attention  # noqa: F401 - its operators
from fairseq.modules.linear import linear
from fairseq.system import provenance

Shape = Sequence[int]


def describe(device: torch.device) -> dict[str, object]:
    """Processor or GPU, cores, versions and commit."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else provenance.processor(),
        "threads": torch.get_num_threads(),
        **provenance.versions(),
        "commit": provenance.commit() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


def matrix_product(device: torch.device, dtype: torch.dtype, repeats: int = 20) -> float:
    """Speed in GFLOP/s of a 2048 × 1024 × 4096 matrix product, the best of *repeats* by torch and
    by this package."""
    a = torch.randn(2048, 1024, device=device).to(dtype)
    b = torch.randn(4096, 1024, device=device).to(dtype)
    seconds = min(best_seconds(partial(product, a, b), device, repeats) for product in (F.linear, linear))
    return 2 * 2048 * 1024 * 4096 / seconds / 1e9


def flop_counter() -> FlopCounterMode:
    """Context that counts the operations of matrix products, attention's included."""
    formulas = {
        torch.ops.mkldnn._linear_pointwise: _linear_flops,
        torch.ops.fairseq.attention: _attention_flops,
        torch.ops.fairseq.attention_gradient: _attention_gradient_flops,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


def products_of(work: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products that *work* computes."""
    with flop_counter() as counter:
        work()
    return counter.get_total_flops()


def _attention_flops(
    query: Shape, distance: Shape | None, table: Shape | None, past_key: Shape | None, past_value: Shape | None,
    key: Shape, value: Shape, bias: Shape | None, mask: Shape | None, scale: float, p: float, causal: bool,
    trains: bool = False, out_shape: object = None,
) -> int:  # fmt: skip
    """Of the scores that are read: two products, and one of distances."""
    rows, heads, queries, dim = query
    keys = key[2] + (0 if past_key is None else past_key[2])
    hidden = queries * (queries - 1) // 2 if causal else 0
    return 2 * dim * rows * heads * (queries * keys - hidden) * (2 if table is None else 3)


def _attention_gradient_flops(
    grad: Shape, query: Shape, distance: Shape | None, table: Shape | None, past_key: Shape | None, *rest: Any,
    out_shape: object = None,
) -> int:  # fmt: skip
    past_value, key, value, mask, _, scale, p, causal = rest  # without the probabilities
    return 2 * _attention_flops(
        query, distance, table, past_key, past_value, key, value, None, mask, scale, p, causal
    )  # fmt: skip


def _linear_flops(x: Sequence[int], weight: Sequence[int], *rest: object, out_shape: object = None) -> int:
    return 2 * math.prod(x) * weight[0]


def read_bandwidth(device: torch.device, repeats: int = 5) -> float:
    """Bandwidth in GB/s of reading 256 MiB, more than caches hold, with all threads: the best of
    *repeats*."""
    data = torch.ones(1 << 26, device=device)
    return data.numel() * 4 / best_seconds(data.sum, device, repeats) / 1e9


def best_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Shortest of *repeats* runs of *work*, after three warm-up runs."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def synchronize(device: torch.device) -> None:
    """Wait for the device's work to finish."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_rss() -> float:
    """Peak resident memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_gpu(device: torch.device) -> float | None:
    """Peak allocated GPU memory in MiB; None without a GPU."""
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
