"""A device without hardware, as strict as a GPU: it computes on the host and accepts no operand
from there.

Its tensors are plain ones of torch's private device. Their memory is the host's, shared through
DLPack, so that every operator runs as the CPU's. An operand on the host raises an error as CUDA
does, except for a scalar of an elementwise operator. Random numbers come from a generator of its
own, and code in C is given no address of it. Operators that a GPU would launch a kernel for are
counted, and what the host would wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import autocast
import pytest
import runs
import torch
from torch import Tensor
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from fairseq.modules import devices, precision

NAME = "strict"
OFFSET = "source_Storage_storage_offset"
OF_SPARSE = (
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_indices",
    "_values",
    "indices",
    "values",
    "is_coalesced",
    "_nnz",
    "sparse_dim",
    "dense_dim",
    "add_.Tensor",
    "add.out",
    "_coalesce",
    "_coalesced_",
)
CPU, PRIVATE = 1, 12  # DLPack's numbers of devices
# The CPU's kernels of these read no memory.
BY_ANY_KERNEL = ("view", "as_strided", "_reshape_alias", "unfold", "set_.source_Storage", f"set_.{OFFSET}")
KERNELS = ("fairseq.kernels", "fairseq.inference")  # which hand addresses to code in C
# The host waits for the size of their results.
WAITING = ("nonzero", "masked_select", "bincount", "repeat_interleave", "_unique2", "unique_dim", "unique_consecutive")
WAITING = ("aten::_local_scalar_dense", "aten::equal", *(f"aten::{name}" for name in WAITING))
INDEXED = ("aten::index", "aten::index_put_", "aten::_index_put_impl_")  # their indices may be on the host

_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_capsule.restype, _capsule.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class Backend(_DummyBackendModule):
    """``torch.strict``: what torch asks of a device, as it asks ``torch.cuda``."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0).get_state()
        # Operators that a GPU would launch a kernel for, and how often the host would wait for one.
        self.launches = self.waits = 0
        self.has_float64 = True  # False: as on Apple's
        self.pinned: set[int] = set()  # addresses on the host

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed).get_state()

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        return self.random.clone()

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        assert state.device.type == "cpu"
        self.random = state.clone()

    def get_device_name(self, device: Any = NAME) -> str:
        return "Strict"

    def max_memory_allocated(self, device: Any = NAME) -> int:
        return 3 << 20

    @contextlib.contextmanager
    def generator(self) -> Iterator[None]:
        """Context in which the CPU's generator is the device's."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.random)
        yield
        self.random = torch.get_rng_state()
        torch.set_rng_state(before)


def _retarget(tensor: Tensor, kind: int) -> Tensor:
    """The memory of *tensor* as a tensor of another device."""
    if kind == PRIVATE and tensor.dtype in (torch.float64, torch.complex128) and not backend().has_float64:
        raise TypeError(f"{NAME} has no float64")
    capsule = torch._C._to_dlpack(tensor)  # type: ignore[attr-defined]
    # The device's number follows the address in DLPack's structure.
    ctypes.c_int32.from_address(_capsule(capsule, b"dltensor") + 8).value = kind
    return torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]


def is_strict(tensor: Tensor) -> bool:
    """Return whether *tensor* is on the device."""
    return tensor.device.type == NAME


def _by_cpu(name: str, key: str = "CPU") -> Callable[..., Tensor]:
    """The CPU's kernel of the operator *name*, whatever the device of its operands."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return functools.partial(op._op_dk, getattr(torch._C.DispatchKey, key))  # type: ignore[attr-defined]


class _Signature(NamedTuple):
    """What an operator's schema says, which takes longer to read than most operators to run."""

    name: str
    names: tuple[str, ...]
    written: frozenset[str]
    tensors: tuple[bool, ...]
    is_pointwise: bool
    is_random: bool


@functools.cache
def _signature(op: Any) -> _Signature:
    arguments = op._schema.arguments
    return _Signature(
        op._schema.name,
        tuple(argument.name for argument in arguments),
        frozenset(argument.name for argument in arguments if argument.is_write),
        tuple(str(argument.type) == "Tensor" for argument in arguments),
        torch.Tag.pointwise in op.tags,
        torch.Tag.nondeterministic_seeded in op.tags,
    )


def _check(op: Any, args: Any, kwargs: Any) -> None:
    """Refuse operands of *op* on the host."""
    operator = _signature(op)
    named = {**dict(zip(operator.names, args, strict=False)), **kwargs}
    for name, value in named.items():
        if name == "generator" and value is not None:
            raise RuntimeError(f"{op}: expected a {NAME!r} generator but found {value.device.type!r}")
        if name == "indices" and operator.name in INDEXED:
            continue
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if (
                isinstance(tensor, Tensor)
                and not is_strict(tensor)
                and not (operator.is_pointwise and tensor.dim() == 0 and name not in operator.written)
            ):
                raise RuntimeError(
                    f"Expected all tensors to be on {NAME}:0, but `{name}` of {op} is on {tensor.device}"
                )


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """*value* with *function* applied to the tensors in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _mapped(function, item) for name, item in value.items()}
    return type(value)(_mapped(function, item) for item in value) if type(value) in (list, tuple) else value


def _waits(op: Any, args: Any) -> bool:
    name = _signature(op).name
    by_mask = name in INDEXED and any(index is not None and index.dtype == torch.bool for index in args[1])
    return by_mask or name in WAITING


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run *op* on the host."""
    _check(op, args, kwargs)
    if _waits(op, args):
        backend().waits += 1
    else:
        backend().launches += 1
    # torch hands scalars that take a tensor's place over as numbers.
    pairs = zip(args, _signature(op).tensors, strict=False)
    args = tuple(torch.tensor(x) if tensor and isinstance(x, int | float) else x for x, tensor in pairs)
    originals: dict[int, Tensor] = {}
    views: list[Tensor] = []  # alive while their numbers are used

    def on_host(tensor: Tensor) -> Tensor:
        if not is_strict(tensor):
            return tensor
        # Memory from elsewhere cannot grow, as that of empty results does.
        views.append(_retarget(tensor, CPU) if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype))
        originals[id(views[-1])] = tensor
        return views[-1]

    def on_device(result: Tensor) -> Tensor:
        original = originals.get(id(result))
        if original is None:
            return _retarget(result, PRIVATE)
        if result.shape != original.shape:
            grown = _retarget(result, PRIVATE)
            _by_cpu(f"set_.{OFFSET}")(original, grown.untyped_storage(), 0, grown.shape, grown.stride())
        return original

    args, kwargs = _mapped(on_host, args), _mapped(on_host, kwargs)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    with backend().generator() if _signature(op).is_random else contextlib.nullcontext():
        return _mapped(on_device, op(*args, **kwargs))


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    memory_format = memory_format or torch.contiguous_format
    return _retarget(torch.empty(size, dtype=dtype, memory_format=memory_format, device="cpu"), PRIVATE)


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    return _retarget(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), PRIVATE)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if is_strict(source) and is_strict(target):
        backend().launches += 1
    else:
        is_pinned = not is_strict(source) and source.untyped_storage().data_ptr() in backend().pinned
        backend().waits += source.numel() > 0 and not (is_pinned and non_blocking)
    source, host = (_retarget(x, CPU) if is_strict(x) else x for x in (source, target))
    host.copy_(source)
    return target


def _lstm_cell(x: Tensor, h: Tensor, c: Tensor, b: Tensor | None = None, d: Tensor | None = None) -> Any:
    """The step of an LSTM that GPUs fuse and CPUs do not have, from its two products."""
    gates = x + h + (0 if b is None or d is None else b + d)
    i, f, g, o = gates.chunk(4, 1)
    cell = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell, gates.detach()


def _pinned(tensor: Tensor, device: Any = None) -> Tensor:
    assert tensor.device.type == "cpu", "only memory of the host can be pinned"
    copy = tensor.clone()
    backend().pinned.add(address := _data_ptr(copy))
    weakref.finalize(copy.untyped_storage(), backend().pinned.discard, address)
    return copy


def _empty_like(tensor: Tensor, *, pin_memory: bool = False, **settings: Any) -> Tensor:
    assert not pin_memory or torch.device(settings["device"]).type == "cpu", "only memory of the host can be pinned"
    return _as_empty(tensor, **settings)


def _address(tensor: Tensor) -> int:
    caller = sys._getframe(1).f_globals["__name__"]
    assert not (is_strict(tensor) and caller.startswith(KERNELS)), f"{caller} reads memory of the device"
    return _data_ptr(tensor)


def _forget_casts() -> None:
    autocast.forget_casts()
    _clear_autocast_cache()


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if not is_strict(tensor):
        return _deepcopy(tensor, memo)
    copy = tensor.detach().clone()
    copy = torch.nn.Parameter(copy) if isinstance(tensor, torch.nn.Parameter) else copy
    memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return copy


_as_empty = torch.empty_like
_deepcopy, _data_ptr, _clear_autocast_cache = Tensor.__deepcopy__, Tensor.data_ptr, torch.clear_autocast_cache


@functools.cache
def backend() -> Backend:
    """``torch.strict``; the device exists from the first call on."""
    module = Backend()
    _setup_privateuseone_for_python_backend(NAME, module)
    aten, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    rest.fallback(_fallback, "PrivateUse1")
    for name in BY_ANY_KERNEL:
        aten.impl(name, _by_cpu(name), "PrivateUse1")
    for name in OF_SPARSE:
        aten.impl(name, _by_cpu(name, "SparseCPU"), "SparsePrivateUse1")
    # One launch for all tensors; torch takes them apart for a device that it does not know.
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::_foreach_"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(name.removeprefix("aten::"), functools.partial(_fallback, op), "PrivateUse1")
    aten.impl("empty.memory_format", _empty, "PrivateUse1")
    aten.impl("empty_strided", _empty_strided, "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        aten.impl("_thnn_fused_lstm_cell", _lstm_cell, key)
    # What torch has no hooks for in Python: pinned memory, copies of storages, parameters
    # that are moved.
    Tensor.pin_memory, Tensor.__deepcopy__ = _pinned, _copied  # type: ignore[assignment,method-assign]
    torch.empty_like = _empty_like  # type: ignore[assignment]
    torch.accelerator.synchronize = lambda device=None: None  # it has done everything
    Tensor.data_ptr = _address  # type: ignore[method-assign]
    torch.clear_autocast_cache = _forget_casts  # type: ignore[assignment]
    torch.__future__.set_swap_module_params_on_conversion(True)
    module.libraries = aten, rest, autocast.register_autocast()  # type: ignore[attr-defined]  # they last as long as these
    return module


class Failed(Exception):
    """A test failed on the device."""


# A fork of the tests' process would not do: torch counts the devices once, in the first backward
# pass of a process.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["pytest", "torch._dynamo", "fairseq.hub", "fairseq.training.loop", "fairseq_cli.train", "fairseq_cli.common"]
    + ["fairseq.evaluation.language_models", "fairseq.evaluation.finetuning"]
    + ["fairseq.inference.generation", "fairseq.interop.exporting", "fairseq.parts", "sacremoses"]
)


def on_strict_device(test: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a test that runs on the device, in a process of its own, which cannot give the
    device back."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        if runs.DEVICE == "cuda":
            pytest.skip("--device cuda: a test of the strict device")
        reader, writer = SERVER.Pipe(duplex=False)
        process = SERVER.Process(target=_run, args=(test.__module__, test.__name__, args, kwargs, writer))
        process.start()
        writer.close()
        try:
            message = reader.recv()
        except EOFError:
            message = "its process died"
        process.join()
        if message:
            raise Failed(message)

    return run


def on_device(test: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a test that runs on the GPU with ``--device cuda``, and else on the strict
    device; ``runs.DEVICE`` names it."""
    on_strict = on_strict_device(test)

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        (test if runs.DEVICE == "cuda" else on_strict)(*args, **kwargs)

    return run


def _run(module: str, name: str, args: Any, kwargs: Any, writer: Any) -> None:
    message = ""
    with tempfile.TemporaryFile() as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        try:
            activate()
            getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)
        except BaseException:
            message = traceback.format_exc()
    writer.send(message)


def activate() -> None:
    """Let this process, from now on, compute on the device, as on a GPU that it has found."""
    backend()
    torch.set_num_threads(1)
    precision.bfloat16_is_slower = lambda: False
    runs.DEVICE = NAME
    devices.has_float64 = lambda device: device.type != NAME or backend().has_float64
