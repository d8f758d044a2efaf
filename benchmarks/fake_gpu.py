"""A GPU without memory or arithmetic: what a step would launch on one, from shapes and types alone.

torch's fake tensors have a device but no data. CUDA's device needs a build with CUDA, so that a
private one stands for it here, with what the operators of a model see of CUDA: its autocast, its
fused dropout, its fused attention.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from fairseq.modules import attention

NAME = "gpu"
# Of torch's documentation of automatic mixed precision, the operators that language models use.
LOWER = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
FLOAT32 = ("layer_norm", "softmax.int", "log_softmax.int", "nll_loss", "cross_entropy_loss", "logsumexp", "sum", "exp")
WIDEST = ("cat", "stack", "index_put", "scatter_add")


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@functools.cache
def device() -> torch.device:
    """The fake device; it exists from the first call on."""
    _setup_privateuseone_for_python_backend(NAME, _Backend())
    device.libraries = library, _ = register_autocast()  # type: ignore[attr-defined]
    of_cuda = attention.has_flash
    attention.has_flash = lambda query: _is_half(query) if query.device.type == NAME else of_cuda(query)
    library.impl("dropout", _dropout, "AutogradPrivateUse1")
    library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    return torch.device(NAME)


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
    return functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])


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


def move(module: nn.Module) -> None:
    """Put *module*, of fake tensors, on the device, where it stays; tied parameters stay tied."""
    moved: dict[int, Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in moved:
                        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device())
                        is_parameter = isinstance(tensor, nn.Parameter)
                        moved[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    tensors[name] = moved[id(tensor)]  # type: ignore[assignment]
    module.to = lambda *args, **kwargs: module  # type: ignore[method-assign]  # fake parameters cannot be swapped


def _is_half(query: Tensor) -> bool:
    return query.dtype in (torch.bfloat16, torch.float16)


class _Values(TorchDispatchMode):
    """What fake tensors do not give: values that the host reads, copies to the device, and a fused
    optimizer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name == "aten::_local_scalar_dense" and args[0].device.type == NAME:
            return 1.0 if args[0].is_floating_point() else 1  # finite is true
        if (
            name == "aten::_to_copy"
            and args[0].device.type == "cpu"
            and torch.device(kwargs.get("device") or "cpu").type == NAME
        ):
            return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=device())
        return None if name == "aten::_fused_sgd_" else func(*args, **kwargs)


@functools.cache
def _fake_tensors() -> FakeTensorMode:
    # One of the process: tensors that modules cache outlive a step.
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Context in which operators compute shapes only."""
    with _fake_tensors(), _Values():
        yield


@contextlib.contextmanager
def autocast_cache() -> Iterator[None]:
    """Context of one update, at whose end the cast weights are forgotten."""
    forget_casts()
    yield
    forget_casts()


def forget_casts() -> None:
    """Forget the cast weights, as torch does with those of its own devices at the end of
    autocast."""
    _CASTS.clear()


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return torch.ops.aten.native_dropout(x, p, train)[0] if train and p else x


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's choice on Ampere and later: flash in half precision and without a mask, else
    memory-efficient."""
    if attn_mask is None and _is_half(query):
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.size(2))
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, training, dropout_p, is_causal, scale=scale
    )[0]
