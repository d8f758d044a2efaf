"""What training computes between matrix products on CPUs, in one pass over memory each: kernels in C (``fused.c``).

They are compiled at first use; without them torch's operators give the same numbers to rounding, and the same masks. On
GPUs torch's kernels take fewer passes for dropout after a ReLU, and for the residual that dropout is added to.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq.modules.native import library
from fairseq.modules.noise import LOWEST, draw_seed, dropped_values, generator, pick, scale_of, words_of

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_MODES = {"plain": 0, "add": 1, "relu": 2, "relu gradient": 3}  # as in fused.c
_LEAST_WORK = 1 << 15  # elements per thread; fewer take no longer than it takes to start a thread
_CACHED_SCORES = 1 << 19  # attention scores per thread of a group of heads: fewer cost calls, more leave its cache
_SOURCE = Path(__file__).with_name("fused.c")


def kernels(x: Tensor) -> ctypes.CDLL | None:
    """The compiled kernels; None if there are none, or none for *x*."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype not in _TYPES or not x.numel():
        return None
    # Subclasses (fake, distributed and other tensors) have no data at their address, or not all of it.
    return _compiled() if type(x) in (Tensor, nn.Parameter) else None


def dropout(x: Tensor, p: float, residual: Tensor | None = None) -> Tensor:
    """The dropout of *x*, added to *residual* of its shape and type, without which *x* is on a CPU."""
    if residual is not None and x.device.type != "cpu":
        return _AddDropout.apply(residual, x, p)
    return _Dropout.apply(x, _noise(x, p), p, residual)


def relu_dropout(x: Tensor, p: float) -> Tensor:
    """The dropout of relu(*x*); on GPUs by torch's kernels."""
    return _ReLUDropout.apply(x, _noise(x, p) if x.device.type == "cpu" else None, p)


def softmax_dropout(scores: Tensor, p: float) -> Tensor:
    """The dropout of the softmax of *scores* over their last dimension."""
    noise = _noise(scores, p)
    if _is_mask(noise):
        return _SoftmaxDropout.apply(scores, noise, p)
    return _Dropout.apply(scores.softmax(-1), noise, p, None)


def attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, p: float, causal: bool = False
) -> Tensor | None:
    """dropout(softmax(Q Kᵀ / √D + bias)) V in training; None if no kernel computes it.

    Args:
        query: [N, T, D].
        key: [N, S, D]; *value* also.
        bias: broadcastable to [N, T, S].
        causal: hide the keys after each query, of which the last stands at the last key.

    Returns:
        [N, T, D].
    """
    if any(kernels(x) is None or x.dtype != query.dtype for x in (query, key, value)):
        return None
    # The kernel has no rows without keys.
    if causal and query.size(1) > key.size(1):
        return None
    mask = _mask(len(query) * query.size(1) * key.size(1), p) if p else None
    period = query.size(1) if causal else 0
    return _Attention.apply(query.contiguous(), key.contiguous(), value.contiguous(), bias, mask, p, period)


def relative_attention(
    content: Tensor, distance: Tensor, key: Tensor, value: Tensor, table: Tensor, bias: Tensor | None
) -> Tensor | None:
    """softmax(Q⁺ Kᵀ + shift(Q* Rᵀ) + bias) V over the keys up to each query; None if no kernel computes it.

    Shape: content and distance, the queries, [H, B, T, D]; key and value [H, B, K, D]; table, of the distances K − 1,
    …, 0, [H, K, D]; bias [T, K] → [H, B, T, D].
    """
    tensors = (content, distance, key, value, table)
    if any(kernels(x) is None or x.dtype != content.dtype for x in tensors):
        return None
    # The kernel has no rows without keys, and reads at the address of each distance.
    if content.size(2) > key.size(2) or table.size(1) != key.size(2):
        return None
    return _RelativeAttention.apply(*(x.contiguous() for x in tensors), bias)


def cross_entropy(logits: Tensor, target: Tensor, gradient: bool) -> Tensor | None:
    """−log softmax(logits [n, V])[target [n]]: [n], float64; None if no kernel computes it.

    With *gradient* the logits are overwritten with the gradient of the losses' sum.

    Raises:
        IndexError: a target is not in 0 … V − 1.
        ValueError: the target is no vector of n.
    """
    compiled = kernels(logits) if logits.is_contiguous() else None
    if compiled is None:
        return None
    # The kernel reads and writes at addresses: other shapes would be other memory.
    if target.shape != logits.shape[:1]:
        raise ValueError(f"target {list(target.shape)}: expected one word for each of {logits.size(0)} rows of logits")
    # The kernel reads at the address of each target, where an invalid one would be in other memory.
    low, high = torch.aminmax(target)
    if low < 0 or high >= logits.size(1):
        raise IndexError(f"target {int(low if low < 0 else high)} is out of range for {logits.size(1)} words")
    target = target.long().contiguous()
    losses = logits.new_empty(target.shape, dtype=torch.float64)
    compiled.cross_entropy(_type(logits), *_pointers(logits, target, losses), *_shape(logits), *_last(logits, gradient))
    return losses


def add_column_sums_(sums: Tensor, x: Tensor) -> None:
    """Add the sums of *x* [n, V] over its rows to *sums* [V], float32."""
    compiled = kernels(x) if x.is_contiguous() else None
    if compiled is None:
        sums.add_(x.sum(0, dtype=torch.float32))
    else:
        compiled.add_column_sums(_type(x), *_pointers(x, sums), *_shape(x), *_last(x))


class _Dropout(torch.autograd.Function):
    """Dropout, added to a residual connection or not; its gradient is a dropout with the same noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor, p: float, residual: Tensor | None) -> Tensor:
        ctx.p, ctx.adds = p, residual is not None
        ctx.save_for_backward(noise)
        if _is_mask(noise):
            return _drop("add" if ctx.adds else "plain", x, residual, noise, p)
        dropped = pick(x, noise, p)
        return dropped if residual is None else residual + dropped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (noise,) = ctx.saved_tensors
        # Through autograd again: dropout is linear in x, so that its gradient has a derivative, too.
        grad = _Dropout.apply(grads[0], noise, ctx.p, None) if ctx.needs_input_grad[0] else None
        return grad, None, None, grads[0] if ctx.adds else None


class _ReLUDropout(torch.autograd.Function):
    """Dropout after a ReLU; the backward pass needs only the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor | None, p: float) -> Tensor:
        ctx.p, ctx.fused, ctx.on_gpu = p, noise is not None and _is_mask(noise), noise is None
        if noise is None:
            y = torch.native_dropout(x.relu(), p, True)[0]
        else:
            y = _drop("relu", x, None, noise, p) if ctx.fused else pick(x, noise, p).clamp_min_(0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        if ctx.on_gpu:
            return torch.ops.aten.native_dropout_backward(grads[0], y > 0, 1 / (1 - ctx.p)), None, None
        if ctx.fused and not torch.is_grad_enabled():  # torch's operators have a second derivative
            return _drop("relu gradient", grads[0], y, None, ctx.p), None, None
        return torch.ops.aten.threshold_backward(grads[0], y, 0).mul_(scale_of(ctx.p)), None, None


class _AddDropout(torch.autograd.Function):
    """Dropout and the addition of a residual by torch's kernels, as on GPUs: the mask alone is written between them."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, p: float) -> Tensor:
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
        ctx.factor = 1 / (1 - p)
        ctx.save_for_backward(mask)
        return torch.addcmul(residual, x, mask, value=ctx.factor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grads[0], torch.ops.aten.native_dropout_backward(grads[0], mask, ctx.factor), None


class _Underivable(torch.autograd.Function):
    """The first *count* tensors, as functions of all, whose derivatives are an error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("the kernels of attention have no second derivative")


def _without_derivative(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """A backward pass by kernels: asking for its derivative is an error, not silently zero.

    The error of torch's ``once_differentiable`` does not reach ``torch.autograd.grad``, whose inputs its node lacks.
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


class _SoftmaxDropout(torch.autograd.Function):
    """Dropout after a softmax, by kernels."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor, p: float) -> Tensor:
        ctx.p, scores = p, scores.contiguous()
        probabilities, dropped = torch.empty_like(scores), torch.empty_like(scores)
        _soften(scores, None, probabilities, dropped, mask, p)
        # The result, which the product with the values keeps anyway, is a function of the scores, which are not kept.
        ctx.save_for_backward(probabilities, mask, dropped)
        return dropped

    @staticmethod
    @_without_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        probabilities, mask, _ = ctx.saved_tensors
        result = torch.empty_like(probabilities)
        _soften_gradient(probabilities, grads[0].contiguous(), result, None, mask, ctx.p)
        return result, None, None


class _Attention(torch.autograd.Function):
    """Attention some heads at a time, whose scores stay in the cache; only the probabilities are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        p: float,
        period: int,
    ) -> Tensor:
        ctx.p, ctx.period, result = p, period, torch.empty_like(query)
        probabilities = query.new_empty(*query.shape[:2], key.size(1))
        scale = 1 / math.sqrt(query.size(-1))
        beta = 0 if bias is None else 1
        bias = query.new_zeros(()) if bias is None else bias
        for some, bits, scores in _groups(probabilities, mask):
            added = bias.expand(len(query), -1, -1)[some] if bias.dim() == 3 else bias
            torch.baddbmm(added, query[some], key[some].transpose(1, 2), beta=beta, alpha=scale, out=scores)
            dropped = None if bits is None else scores
            _soften(scores, None, probabilities[some], dropped, bits, p, period)
            torch.bmm(probabilities[some] if dropped is None else dropped, value[some], out=result[some])
        ctx.save_for_backward(query, key, value, probabilities, mask)
        return result

    @staticmethod
    @_without_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, probabilities, mask = ctx.saved_tensors
        grad, scale = grads[0].contiguous(), 1 / math.sqrt(query.size(-1))
        of_query, of_key, of_value = (torch.empty_like(x) for x in (query, key, value))
        for some, bits, scores in _groups(probabilities, mask):
            dropped = probabilities[some]
            if bits is not None:
                dropped = _drop("plain", dropped, None, bits, ctx.p, scores)
            torch.bmm(dropped.transpose(1, 2), grad[some], out=of_value[some])
            torch.bmm(grad[some], value[some].transpose(1, 2), out=scores)
            _soften_gradient(probabilities[some], scores, scores, None, bits, ctx.p, ctx.period)
            for result, product, other in ((of_query, scores, key), (of_key, scores.transpose(1, 2), query)):
                torch.baddbmm(result[some], product, other[some], beta=0, alpha=scale, out=result[some])
        return of_query, of_key, of_value, *[None] * 4


class _RelativeAttention(torch.autograd.Function):
    """Attention by content and distance, some heads of all rows at a time; only the probabilities are kept."""

    @staticmethod
    def forward(
        ctx: Any, content: Tensor, distance: Tensor, key: Tensor, value: Tensor, table: Tensor, bias: Tensor | None
    ) -> Tensor:
        rows, queries = content.shape[1:3]
        probabilities, result = content.new_empty(*content.shape[:3], key.size(2)), torch.empty_like(content)
        for some, _, by_distance in _groups(probabilities.flatten(1, 2), None):
            torch.bmm(distance[some].flatten(1, 2), table[some].transpose(1, 2), out=by_distance)
            scores = probabilities[some].flatten(0, 1)
            q, k, v, attended = (x[some].flatten(0, 1) for x in (content, key, value, result))
            if bias is None:
                torch.bmm(q, k.transpose(1, 2), out=scores)
            else:
                torch.baddbmm(bias, q, k.transpose(1, 2), out=scores)
            _soften(scores, by_distance, scores, None, None, 0.0, queries)
            torch.bmm(scores, v, out=attended)
        ctx.save_for_backward(content, distance, key, value, table, probabilities)
        return result

    @staticmethod
    @_without_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        content, distance, key, value, table, probabilities = ctx.saved_tensors
        grad, results = grads[0].contiguous(), [torch.empty_like(x) for x in (content, distance, key, value, table)]
        for some, _, by_distance in _groups(probabilities.flatten(1, 2), None):
            scores = torch.empty_like(by_distance).view_as(probabilities[some].flatten(0, 1))
            of_content, of_distance, of_key, of_value, of_table = (x[some] for x in results)
            q, k, v, g, p = (x[some].flatten(0, 1) for x in (content, key, value, grad, probabilities))
            torch.bmm(p.transpose(1, 2), g, out=of_value.flatten(0, 1))
            torch.bmm(g, v.transpose(1, 2), out=scores)
            _soften_gradient(p, scores, scores, by_distance, None, 0.0, content.size(2))
            torch.bmm(scores, k, out=of_content.flatten(0, 1))
            torch.bmm(scores.transpose(1, 2), q, out=of_key.flatten(0, 1))
            torch.bmm(by_distance, table[some], out=of_distance.flatten(1, 2))
            torch.bmm(by_distance.transpose(1, 2), distance[some].flatten(1, 2), out=of_table)
        return *results, None


def _groups(probabilities: Tensor, mask: Tensor | None) -> Iterator[tuple[slice, Tensor | None, Tensor]]:
    """Some heads each of *probabilities* [N, T, S], their part of the *mask*, and room for their scores."""
    heads, each = len(probabilities), probabilities[0].numel()
    # So many heads that each part of the mask begins with a byte.
    unit = 1 if mask is None else 8 // math.gcd(each, 8)
    together = max(1, _CACHED_SCORES * torch.get_num_threads() // (unit * each)) * unit
    room = torch.empty_like(probabilities[:together])
    for start in range(0, heads, together):
        some = slice(start, min(start + together, heads))
        yield some, None if mask is None else mask[start * each // 8 :], room[: some.stop - start]


def _noise(x: Tensor, p: float) -> Tensor:
    """What decides about the elements of *x*: a mask with a bit for each where kernels read it, else sixteen bits."""
    return (
        _mask(x.numel(), p)
        if kernels(x) is not None
        else torch.from_numpy(words_of(x.numel(), draw_seed()).view(np.int64))
    )


def _mask(size: int, p: float) -> Tensor:
    # Kernels read and write up to eight bytes further than the last bit.
    mask = torch.empty(size // 8 + 8, dtype=torch.uint8, device="cpu")
    if p == 0:
        return mask.fill_(255)
    seed, dropped = draw_seed(), dropped_values(p)
    if generator() == "sfc64":
        bits = np.packbits(words_of(size, seed).view(np.int16)[:size] >= LOWEST + dropped, bitorder="little")
        mask[: len(bits)] = torch.from_numpy(bits)
    else:
        drawn = (ctypes.c_uint64(seed), ctypes.c_long(dropped))
        _compiled().draw_mask(*drawn, *_pointers(mask), ctypes.c_long(size), _threads(size))
    return mask


def _is_mask(noise: Tensor) -> bool:
    return noise.dtype == torch.uint8


def _drop(
    mode: str, x: Tensor, other: Tensor | None, mask: Tensor | None, p: float, out: Tensor | None = None
) -> Tensor:
    """The kernel ``drop`` in one of its modes."""
    x, other = x.contiguous(), None if other is None else other.contiguous()
    y = torch.empty_like(x) if out is None else out
    pointers, size = _pointers(x, other, y, mask), ctypes.c_long(x.numel())
    _compiled().drop(_type(x), ctypes.c_long(_MODES[mode]), *pointers, _factor(p), size, *_last(x))
    return y


def _soften(
    x: Tensor,
    added: Tensor | None,
    probabilities: Tensor,
    dropped: Tensor | None,
    mask: Tensor | None,
    p: float,
    period: int = 0,
) -> None:
    """The kernel ``softmax_drop``; *dropped*, and without it *probabilities*, may be *x*."""
    pointers = _pointers(x, added, probabilities, dropped, mask)
    _compiled().softmax_drop(_type(x), *pointers, _factor(p), *_shape(x), ctypes.c_long(period), *_last(x))


def _soften_gradient(
    probabilities: Tensor,
    grad: Tensor,
    result: Tensor,
    of_added: Tensor | None,
    mask: Tensor | None,
    p: float,
    period: int = 0,
) -> None:
    """The kernel ``softmax_drop_gradient``; *result* may be *grad*."""
    pointers = _pointers(probabilities, grad, result, of_added, mask)
    shape = (*_shape(grad), ctypes.c_long(period))
    _compiled().softmax_drop_gradient(_type(grad), *pointers, _factor(p), *shape, *_last(grad))


def _compiled() -> Any:
    return library("training", _SOURCE)


def _type(x: Tensor) -> ctypes.c_long:
    return ctypes.c_long(_TYPES[x.dtype])


def _pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in tensors]


def _factor(p: float) -> ctypes.c_float:
    return ctypes.c_float(scale_of(p))


def _shape(x: Tensor) -> tuple[ctypes.c_long, ctypes.c_long]:
    """Rows and columns."""
    return ctypes.c_long(x.numel() // x.size(-1)), ctypes.c_long(x.size(-1))


def _last(x: Tensor, *switches: bool) -> list[ctypes.c_long]:
    """The last arguments of a kernel: switches, and the number of threads for *x*."""
    return [*(ctypes.c_long(value) for value in switches), _threads(x.numel())]


def _threads(size: int) -> ctypes.c_long:
    """Threads for so many elements."""
    return ctypes.c_long(max(1, min(torch.get_num_threads(), size // _LEAST_WORK)))
