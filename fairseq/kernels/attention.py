"""Attention on CPUs by kernels in C (``attention.c``),
with gradients and without: scores stay in the cache.

They are compiled at first use; without them torch's operators give the same numbers to rounding,
with the same masks.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq.kernels import build
from fairseq.kernels.arguments import TYPES, is_plain
from fairseq.kernels.noise import scale_of
from fairseq.kernels.training import draw_mask
from fairseq.kernels.training import kernels as training_kernels

_SOURCE = Path(__file__).with_name("attention.c")
# Probabilities that are saved for the backward pass
# where torch's kernel would save none: 64 MiB a layer.
_MOST_SAVED = 1 << 24


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


class _Options(NamedTuple):
    scale: float  # of the scores of keys
    p: float  # rate of dropout
    causal: bool
    trains: bool = False  # the probabilities are saved for the backward pass


def computes(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    p: float,
    distance: Tensor | None = None,
    table: Tensor | None = None,
) -> bool:
    """Return whether the kernel computes attention of these tensors: without *table* absolute, with
    it by distance."""
    tensors = [x for x in (query, distance, table, *keys, *values) if x is not None]
    if any(not is_plain(x) or x.dtype != query.dtype for x in tensors):
        return False
    if len(keys) > 2 or not _is_regular(query, distance, table, keys, values):
        return False
    # The kernel has no rows without keys.
    if query.size(2) > sum(key.size(2) for key in keys):
        return False
    # torch's kernel of absolute attention computes the probabilities anew.
    saves_none = not p and table is None and query.dtype == torch.float32
    if saves_none and _trains(tensors) and _scores(query, keys) > _MOST_SAVED:
        return False
    return _compiled() is not None and (not p or training_kernels(query) is not None)


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
    return _attention(_Options(1 / math.sqrt(query.size(-1)), p, causal), query, None, None, keys, values, bias)


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
    return _attention(_Options(1.0, p, causal=True), content, distance, table, keys, values, bias)


def _attention(
    options: _Options,
    query: Tensor,
    distance: Tensor | None,
    table: Tensor | None,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    bias: Tensor | None,
) -> Tensor:
    if bias is not None and bias.requires_grad:
        raise ValueError("the kernels of attention have no gradient of a bias")
    past = (None, None) if len(keys) == 1 else (keys[0], values[0])
    inputs = (query, distance, table, *past, keys[-1], values[-1])
    options = options._replace(trains=_trains([x for x in inputs if x is not None]))
    mask = draw_mask(_scores(query, keys), options.p) if options.p else None
    readable = (None if x is None else _readable(x) for x in inputs)
    return _Attention.apply(options, bias, mask, *readable).transpose(1, 2)


def _scores(query: Tensor, keys: Sequence[Tensor]) -> int:
    return query.size(0) * query.size(1) * query.size(2) * sum(key.size(2) for key in keys)


def _trains(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _is_regular(
    query: Tensor, distance: Tensor | None, table: Tensor | None, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> bool:
    """Whether all have the shapes that the kernel takes for granted, which reads at addresses."""
    if any(x.dim() != 4 for x in (query, *keys, *values)) or len(keys) != len(values):
        return False
    rows, heads, _, dim = query.shape
    pieces = [(rows, heads, key.size(2), dim) for key in keys]
    if [key.shape for key in keys] != pieces or [value.shape for value in values] != pieces:
        return False
    by_distance = (heads, sum(key.size(2) for key in keys), dim)
    return (distance is None or distance.shape == query.shape) and (table is None or table.shape == by_distance)


class _Underivable(torch.autograd.Function):
    """The first *count* tensors, as functions of all, whose derivatives are an error."""

    @staticmethod
    def forward(ctx: object, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("the kernels of attention have no second derivative")


def _without_derivative(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """A backward pass by kernels: asking for its derivative is an error, not silently zero.

    The error of torch's ``once_differentiable`` does not reach ``torch.autograd.grad``, whose
    inputs its node lacks.
    """

    @functools.wraps(backward)
    def computed(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        computed_ones = [x for x in results if x is not None]
        read = [x for x in (*grads, *ctx.saved_tensors) if x is not None]
        derived = iter(_Underivable.apply(len(computed_ones), *computed_ones, *read))
        return tuple(None if x is None else next(derived) for x in results)

    return computed


class _Inputs(NamedTuple):
    query: Tensor
    distance: Tensor | None
    table: Tensor | None
    past_key: Tensor | None
    past_value: Tensor | None
    key: Tensor
    value: Tensor

    def keys(self) -> int:
        return self.key.size(2) + (0 if self.past_key is None else self.past_key.size(2))


class _Attention(torch.autograd.Function):
    """Attention of either kind; of the scores only the probabilities are saved."""

    @staticmethod
    def forward(ctx: Any, options: _Options, bias: Tensor | None, mask: Tensor | None, *inputs: Any) -> Tensor:
        tensors = _Inputs(*inputs)
        rows, heads, queries, dim = tensors.query.shape
        result, shape = tensors.query.new_empty(rows, queries, heads, dim), (rows, heads, queries, tensors.keys())
        probabilities = tensors.query.new_empty(shape) if options.trains else None
        problem = _problem(options, tensors, mask, probabilities, output=result.transpose(1, 2))
        if bias is not None:
            bias = _readable(bias.to(result).expand(shape))
            problem.bias = _view(bias)
        call("attention", problem)
        ctx.options = options
        ctx.save_for_backward(mask, probabilities, *tensors)
        return result

    @staticmethod
    @_without_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mask, probabilities, *inputs = ctx.saved_tensors
        tensors = _Inputs(*inputs)
        results = _Inputs(*(None if x is None else _like(x) for x in tensors))  # type: ignore[arg-type]
        # A copy must stay in memory until the kernel has read it.
        grad = _readable(grads[0]).transpose(1, 2)
        problem = _problem(ctx.options, tensors, mask, probabilities, output=grad)
        problem.of_query, problem.of_distance = _view(results.query), _view(results.distance)
        problem.of_key[:] = [_view(results.past_key), _view(results.key)]
        problem.of_value[:] = [_view(results.past_value), _view(results.value)]
        sums = None
        if tensors.table is not None and results.table is not None:
            problem.of_table = _view(results.table[None])
            slots = problem.heads + problem.threads - 1
            sums = _room(slots * _compiled().attention_sums(ctypes.byref(problem)))
            problem.sums = sums.data_ptr()
        call("attention_gradient", problem)
        return None, None, None, *results


def _problem(
    options: _Options, tensors: _Inputs, mask: Tensor | None, probabilities: Tensor | None, output: Tensor
) -> Problem:
    rows, heads, queries, dim = tensors.query.shape
    problem = Problem(type=TYPES[output.dtype], rows=rows, heads=heads, queries=queries, keys=tensors.keys(), dim=dim)
    problem.past = 0 if tensors.past_key is None else tensors.past_key.size(2)
    problem.causal, problem.scale, problem.dropout_scale = options.causal, options.scale, scale_of(options.p)
    problem.threads = min(torch.get_num_threads(), rows * heads)
    problem.query, problem.output = _view(tensors.query), _view(output)
    problem.key[:] = [_view(tensors.past_key), _view(tensors.key)]
    problem.value[:] = [_view(tensors.past_value), _view(tensors.value)]
    problem.distance = _view(tensors.distance)
    problem.table = _view(None if tensors.table is None else tensors.table[None])
    problem.probabilities, problem.mask = (None if x is None else x.data_ptr() for x in (probabilities, mask))
    return problem


def call(kernel: str, problem: Problem) -> None:
    """Let the *kernel* compute what *problem* describes."""
    compiled = _compiled()
    scratch = _room(problem.threads * compiled.attention_scratch(ctypes.byref(problem)))
    problem.scratch = scratch.data_ptr()
    getattr(compiled, kernel)(ctypes.byref(problem))


def _room(words: int) -> Tensor:
    # On the CPU, whatever the default device is.
    return torch.empty(words, dtype=torch.float32, device="cpu")


def _compiled() -> Any:
    return build.library("attention", _SOURCE, _declare)


def _declare(compiled: ctypes.CDLL) -> None:
    # By default a result has 32 bits.
    for size in (compiled.attention_scratch, compiled.attention_sums, compiled.attention_size):
        size.restype = ctypes.c_long


def _readable(x: Tensor) -> Tensor:
    """*x* with its last dimension contiguous, as kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _like(x: Tensor) -> Tensor:
    """Room for a tensor like *x*; of [B, H, T, D] time comes
    before heads in memory, as in the products around."""
    return torch.empty_like(x) if x.dim() == 3 else x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def _view(x: Tensor | None) -> _View:
    """Of [batch, head, time, D]."""
    return _View() if x is None else _View(x.data_ptr(), *x.stride()[:3])
