"""Attention on CPUs, ``fairseq::attention``: absolute and by distance, with its gradient.

The scores of a head stay in the cache (``attention.c``); of them only the probabilities are saved.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq.kernels import build
from fairseq.kernels.arguments import TYPES, no_second_derivative, operator
from fairseq.kernels.dropout import draw_mask, scale_of

_SOURCE = Path(__file__).with_name("attention.c")

# Probabilities that are saved for the backward pass
# where torch's kernel would save none: 64 MiB a layer.
_MOST_SAVED = 1 << 24


def compiled() -> Any:
    """The compiled kernels; None if there are none."""
    return build.library("attention", _SOURCE, _declare)


def _declare(library: ctypes.CDLL) -> None:
    # By default a result has 32 bits.
    for size in (library.attention_scratch, library.attention_sums, library.attention_size):
        size.restype = ctypes.c_long


def computes(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    p: float,
    distance: Tensor | None = None,
    table: Tensor | None = None,
) -> bool:
    """Return whether :func:`attention`, or with *table* :func:`relative_attention`, takes such
    tensors."""
    tensors = [x for x in (query, distance, table, *keys, *values) if x is not None]
    # The kernel has two pieces of keys at most, and no rows without keys.
    if any(x.dtype != query.dtype for x in tensors) or not 0 < len(keys) == len(values) <= 2:
        return False
    if any(x.dim() != 4 for x in (query, *keys, *values)):
        return False
    # It reads at addresses: keys that torch would broadcast are other memory.
    rows, heads, queries, dim = query.shape
    count = sum(key.size(2) for key in keys)
    pieces = [(rows, heads, key.size(2), dim) for key in keys]
    if queries > count or [key.shape for key in keys] != pieces or [value.shape for value in values] != pieces:
        return False
    if distance is not None and distance.shape != query.shape:
        return False
    if table is not None and table.shape != (heads, count, dim):
        return False
    # torch's kernel of absolute attention computes the probabilities anew.
    saves_none = not p and table is None and query.dtype == torch.float32
    return not (saves_none and _trains(tensors) and rows * heads * queries * count > _MOST_SAVED)


def attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    bias: Tensor | None,
    p: float,
    causal: bool = False,
) -> Tensor:
    """dropout(softmax(Q Kᵀ / √D + bias)) V, for tensors that the kernel :func:`computes`.

    Args:
        query: [B, H, T, D].
        keys: one or two pieces that follow one another, [B, H, ·, D], of S in all; *values* also.
        bias: broadcastable to [B, H, T, S]; it has no gradient.
        p: rate of dropout.
        causal: hide the keys after each query, of which the last stands at the last key.

    Returns:
        [B, H, T, D], of which time comes before heads in memory.
    """
    return _attention(query, None, None, keys, values, bias, 1 / math.sqrt(query.size(-1)), p, causal)


def relative_attention(
    content: Tensor,
    distance: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    table: Tensor,
    bias: Tensor | None,
    p: float,
) -> Tensor:
    """dropout(softmax(Q⁺ Kᵀ + shift(Q* Rᵀ) + bias)) V over the keys up to each query.

    Shape: as of :func:`attention`, with content and distance for query; table, of the distances S −
    1, …, 0, [H, S, D].
    """
    return _attention(content, distance, table, keys, values, bias, 1.0, p, causal=True)


def _attention(
    query: Tensor,
    distance: Tensor | None,
    table: Tensor | None,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    bias: Tensor | None,
    scale: float,
    p: float,
    causal: bool,
) -> Tensor:
    if bias is not None and bias.requires_grad:
        raise ValueError("the kernels of attention have no gradient of a bias")
    past = (None, None) if len(keys) == 1 else (keys[0], values[0])
    inputs = (query, distance, table, *past, keys[-1], values[-1])
    scores = query.size(0) * query.size(1) * query.size(2) * sum(key.size(2) for key in keys)
    mask = draw_mask(scores, p) if p else None
    trains = _trains([x for x in inputs if x is not None])
    result, _ = attend(*inputs, bias, mask, scale, p, causal, trains)
    return result.transpose(1, 2)


def _trains(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


@operator("fairseq::attention")
def attend(
    query: Tensor,
    distance: Tensor | None,
    table: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    p: float,
    causal: bool,
    trains: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of either kind: [B, T, H, D], and if it *trains* the probabilities [B, H, T, S].

    *mask* is one of dropout at the rate *p*, *scale* the factor of the scores of keys.
    """
    inputs = [None if x is None else _readable(x) for x in (query, distance, table, past_key, past_value, key, value)]
    result, probabilities = _results(query, past_key, key, trains)
    problem = _problem(inputs, mask, probabilities, result.transpose(1, 2), scale, p, causal)
    if bias is not None:
        shape = (problem.rows, problem.heads, problem.queries, problem.keys)
        bias = _readable(bias.to(result).expand(shape))
        problem.bias = _view(bias)
    _run("attention", problem)
    return result, probabilities


@torch.library.register_fake("fairseq::attention")
def _(
    query: Tensor,
    distance: Tensor | None,
    table: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    p: float,
    causal: bool,
    trains: bool,
) -> tuple[Tensor, Tensor]:
    return _results(query, past_key, key, trains)


def _results(query: Tensor, past_key: Tensor | None, key: Tensor, trains: bool) -> tuple[Tensor, Tensor]:
    rows, heads, queries, dim = query.shape
    keys = key.size(2) + (0 if past_key is None else past_key.size(2))
    shape = (rows, heads, queries, keys) if trains else (0,)
    return query.new_empty(rows, queries, heads, dim), query.new_empty(shape)


@operator("fairseq::attention_gradient")
def attend_gradient(
    grad: Tensor,
    query: Tensor,
    distance: Tensor | None,
    table: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    probabilities: Tensor,
    scale: float,
    p: float,
    causal: bool,
) -> list[Tensor]:
    """The gradients of those of the seven tensors from *query* on that are given."""
    inputs = [query, distance, table, past_key, past_value, key, value]
    readable = [None if x is None else _readable(x) for x in inputs]
    results = [None if x is None else _like(x) for x in inputs]
    grad = _readable(grad)
    problem = _problem(readable, mask, probabilities, grad.transpose(1, 2), scale, p, causal)
    of_query, of_distance, of_table, of_past_key, of_past_value, of_key, of_value = map(_view, results)
    problem.of_query, problem.of_distance = of_query, of_distance
    problem.of_key[:], problem.of_value[:] = [of_past_key, of_key], [of_past_value, of_value]
    if table is not None:
        problem.of_table = of_table
        slots = problem.heads + problem.threads - 1
        sums = _room(slots * compiled().attention_sums(ctypes.byref(problem)))
        problem.sums = sums.data_ptr()
    _run("attention_gradient", problem)
    return [x for x in results if x is not None]


@torch.library.register_fake("fairseq::attention_gradient")
def _(
    grad: Tensor,
    query: Tensor,
    distance: Tensor | None,
    table: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    probabilities: Tensor,
    scale: float,
    p: float,
    causal: bool,
) -> list[Tensor]:
    return [_like(x) for x in (query, distance, table, past_key, past_value, key, value) if x is not None]


no_second_derivative("fairseq::attention_gradient")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _, mask, scale, p, causal, _ = inputs
    ctx.options = scale, p, causal
    ctx.mark_non_differentiable(output[1])
    # Zeros for the gradient of the probabilities would be as large as they are.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, mask, output[1])


def _gradients(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    *tensors, mask, probabilities = ctx.saved_tensors
    if grad is None:
        return (None,) * 13
    gradients = iter(attend_gradient(grad, *tensors, mask, probabilities, *ctx.options))
    return *(None if x is None else next(gradients) for x in tensors), *(None,) * 6


torch.library.register_autograd("fairseq::attention", _gradients, setup_context=_save)


# ---- calls of the kernels ----


class _View(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_long) for name in ("batch", "head", "time")))


class Problem(ctypes.Structure):
    """The structure ``Attention`` of ``attention.c``, which says what its members are."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("type", "rows", "heads", "queries", "keys", "past", "dim")),
        *((name, ctypes.c_long) for name in ("causal", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "dropout_scale")),
        *(("query", _View), ("key", _View * 2), ("value", _View * 2), ("output", _View)),
        *(("of_query", _View), ("of_key", _View * 2), ("of_value", _View * 2)),
        *(("probabilities", ctypes.c_void_p), ("bias", _View), ("mask", ctypes.c_void_p)),
        *((name, _View) for name in ("distance", "of_distance", "table", "of_table")),
        *(("sums", ctypes.c_void_p), ("scratch", ctypes.c_void_p)),
    )


def _problem(
    inputs: Sequence[Tensor | None],
    mask: Tensor | None,
    probabilities: Tensor,
    output: Tensor,
    scale: float,
    p: float,
    causal: bool,
) -> Problem:
    query, distance, table, past_key, past_value, key, value = inputs
    assert query is not None and key is not None
    rows, heads, queries, dim = query.shape
    past = 0 if past_key is None else past_key.size(2)
    problem = Problem(type=TYPES[output.dtype], rows=rows, heads=heads, queries=queries, dim=dim)
    problem.keys, problem.past = past + key.size(2), past
    problem.causal, problem.scale, problem.dropout_scale = causal, scale, scale_of(p)
    problem.threads = min(torch.get_num_threads(), rows * heads)
    problem.query, problem.distance, problem.output = _view(query), _view(distance), _view(output)
    problem.key[:], problem.value[:] = [_view(past_key), _view(key)], [_view(past_value), _view(value)]
    problem.table = _view(table)
    problem.probabilities = probabilities.data_ptr() if probabilities.numel() else None
    problem.mask = None if mask is None else mask.data_ptr()
    return problem


def _run(kernel: str, problem: Problem) -> None:
    library = compiled()
    scratch = _room(problem.threads * library.attention_scratch(ctypes.byref(problem)))
    problem.scratch = scratch.data_ptr()
    getattr(library, kernel)(ctypes.byref(problem))


def _room(words: int) -> Tensor:
    # On the CPU, whatever the default device is.
    return torch.empty(words, dtype=torch.float32, device="cpu")


def _readable(x: Tensor) -> Tensor:
    """*x* with its last dimension contiguous, as kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _like(x: Tensor) -> Tensor:
    """Room for a tensor like *x*; of [B, H, T, D] time comes
    before heads in memory, as in the products around."""
    shape = x.transpose(1, 2).shape
    return x.new_empty(x.shape) if x.dim() == 3 else x.new_empty(shape).transpose(1, 2)


def _view(x: Tensor | None) -> _View:
    """Of [batch, head, time, D], or of [head, time, D]."""
    if x is None:
        return _View()
    return _View(x.data_ptr(), *(x.stride() if x.dim() == 4 else (0, *x.stride()))[:3])
