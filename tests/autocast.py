"""CUDA's autocast for torch's private device, which has none of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Of torch's documentation of automatic mixed precision, the operators that language models use.
LOWER = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
FLOAT32 = ("layer_norm", "softmax.int", "log_softmax.int", "nll_loss", "cross_entropy_loss", "logsumexp", "sum", "exp")
WIDEST = ("cat", "stack", "index_put", "scatter_add")


def register_autocast() -> tuple[torch.library.Library, torch.library.Library]:
    """Give torch's private device CUDA's autocast; it lasts as long as what is returned."""
    library, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, target in ((LOWER, _lower), (FLOAT32, lambda tensors: torch.float32), (WIDEST, _widest)):
        for name in names:
            _register_autocast(library, name, target)
    return library, rest


def _lower(tensors: list[Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype(torch._C._get_privateuse1_backend_name())


def _widest(tensors: list[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors], _lower(tensors))


_CASTS: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """*value* with its floating-point tensors in *dtype*; as autocast does, a weight is cast once a
    forward pass."""
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
        return value
    if not (value.is_leaf and value.requires_grad and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    key = id(value), dtype
    if key not in _CASTS:
        _CASTS[key] = value, value.to(dtype)
    return _CASTS[key][1]


def _floating(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _floating(item)]
    return [value] if isinstance(value, Tensor) and value.is_floating_point() else []


def _register_autocast(library: Any, name: str, target: Callable[[list[Tensor]], torch.dtype]) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    key = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))

    def cast_and_call(*args: Any, **named: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            dtype = target(_floating([*args, *named.values()]))
            return operator(*_cast(list(args), dtype), **{k: _cast(v, dtype) for k, v in named.items()})

    library.impl(name, cast_and_call, "AutocastPrivateUse1")


def forget_casts() -> None:
    """Forget the cast weights, as torch does with those of its own devices at the end of
    autocast."""
    _CASTS.clear()
