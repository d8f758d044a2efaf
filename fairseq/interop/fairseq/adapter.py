"""Plug-ins in fairseq's styles as this package calls its parts: what they are given is the flat
namespace.

The classes are changed in place when they are registered, so that the plug-in's own references to
them stay valid.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fairseq.config import fields
from fairseq.config.namespaces import ReadsNamespace, namespace_of
from fairseq.config.registry import is_outside
from fairseq.config.settings import Settings
from fairseq.config.shared import BlockModelConfig
from fairseq.criterions import losses as criterions
from fairseq.criterions.fairseq_criterion import FairseqCriterion
from fairseq.data import encoders
from fairseq.interop.fairseq.hooks import overrides
from fairseq.models.base import BaseFairseqModel
from fairseq.models.views import logits_model

PAD = 1  # the id of padding in every dictionary of fairseq


def adapt(kind: str, part: object) -> None:
    """Change *part*, a plug-in's part of the registry for *kind*, which calls this."""
    if kind in _ADAPTERS:
        for name in ("settings_of", "unread"):
            setattr(part, name, vars(ReadsNamespace)[name])
        _ADAPTERS[kind](part)


def adapt_model(part: Any) -> None:
    """Let *part*, a model, be called as fairseq's are."""
    _extend_args(part, _add_positions)
    parameters = inspect.signature(part.forward).parameters
    # Batches of this package's tasks carry no lengths; fairseq's always do, and its decoders take
    # them.
    if "src_lengths" not in parameters:
        _wrap(part, "forward", _without_lengths)
    elif parameters["src_lengths"].default is inspect.Parameter.empty:
        _wrap(part, "forward", _with_lengths)


def adapt_criterion(part: Any) -> None:
    """Let *part*, a criterion, be called as this package's are; one in fairseq's sense runs the
    model itself."""
    put_under(part, criterions.FairseqLoss, FairseqCriterion, first=True)
    # A criterion that overrides neither `forward` nor `compute_loss` with `reduce` is one of this
    # package with other settings, and keeps its loss without logits and the state of segments.
    if part.forward is not criterions.FairseqLoss.forward or criterions.takes_reduce(part):
        # Such a criterion reads the model's output alone, so that the state of the last segment
        # would be lost.
        part.carries_state = False
        _wrap(part, "forward", _with_logits)
        part.step = lambda self, model, sample, inputs: (self(model, sample), {})
        part.prepare = lambda self, model, sample: sample


def adapt_task(part: Any) -> None:
    """Let methods of *part*, a task, take the namespace, and call the fairseq methods that it
    overrides."""
    # Its files may have other names.
    part.checks_splits = not overrides(part, "load_dataset")
    for name in ("__init__", "setup_task", "build_model", "build_criterion"):
        _give_namespace(part, name)
    # All tasks of fairseq have the flags of encoders.
    _extend_args(part, encoders.add_flags)
    part.typed = _typed
    # Copies of fairseq's methods look here first.
    part.dataset_to_epoch_iter, part.state = {}, None


def put_under(part: type, base: type, root: type, *, first: bool = False) -> None:
    """Put *base* under the lowest class of *part*, a subclass of *root*, that is not of this
    package.

    With *first* its methods come before this package's classes, otherwise before *root*'s alone.
    """
    if issubclass(part, base):
        return
    cls: Any = [cls for cls in part.__mro__ if issubclass(cls, root) and is_outside(cls)][-1]
    # Copied from the base: with *base* in between it would inherit that one's signature, which
    # names no settings.
    if first and "__init__" not in vars(cls):
        cls.__init__ = cls.__init__
    # In place: a new class would leave references of the plug-in, such as `super(Name, self)`, at
    # the former one.
    cls.__bases__ = (base, *cls.__bases__) if first else (*(b for b in cls.__bases__ if b is not root), base)


def _wrap(part: object, name: str, call: Callable[..., object]) -> None:
    """Let *call* be the method *name* of *part*; it is given the former method, then the
    arguments."""
    method = getattr(part, name)

    @functools.wraps(method)
    def wrapped(self: object, *args: object, **options: object) -> Any:
        return call(method, self, *args, **options)

    setattr(part, name, wrapped)


def _with_lengths(method: Any, self: Any, src_tokens: Any, src_lengths: Any = None, *rest: Any, **inputs: Any) -> Any:
    """The output of a model that asks for the lengths of rows, where they are not given."""
    lengths = _lengths(src_tokens) if src_lengths is None else src_lengths
    return method(self, src_tokens, lengths, *rest, **inputs)


def _without_lengths(method: Any, self: Any, *rest: Any, **inputs: Any) -> Any:
    """The output of a model that does not name the lengths of rows; it, or its decoder, may take
    them among others."""
    decoder = getattr(self, "decoder", None)
    if "src_lengths" in inputs and not all(
        map(_takes_lengths, [method, *([type(decoder).forward] if decoder else [])])
    ):
        del inputs["src_lengths"]
    return method(self, *rest, **inputs)


@functools.cache
def _takes_lengths(forward: Callable[..., object]) -> bool:
    parameters = inspect.signature(forward).parameters
    return "src_lengths" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _lengths(tokens: Tensor) -> Tensor:
    return tokens.ne(PAD).sum(1)


def _with_logits(method: Any, self: Any, model: BaseFairseqModel, sample: Any, *rest: Any, **options: Any) -> Any:
    """The loss of a criterion whose model returns logits, and whose batches have lengths."""
    inputs = sample.get("net_input")
    if isinstance(inputs, dict) and isinstance(inputs.get("src_tokens"), Tensor):
        inputs.setdefault("src_lengths", _lengths(inputs["src_tokens"]))
    return method(self, logits_model(model), sample, *rest, **options)


def _extend_args(part: Any, add: Callable[[Any], None]) -> None:
    """Let *add* add flags after the ones of ``add_args`` of *part*."""
    method = inspect.getattr_static(part, "add_args")

    def add_args(cls: Any, parser: object) -> None:
        method.__get__(None, cls)(parser)
        add(parser)

    part.add_args = classmethod(add_args)


def _add_positions(parser: argparse.ArgumentParser) -> None:
    """Add a flag that in fairseq all language models have, by their task."""
    fields.add_flags(parser, BlockModelConfig, ["max_target_positions"])


def _give_namespace(part: object, name: str) -> None:
    """Let the method *name* of *part* have the namespace as its first argument where it is called
    with settings."""
    # Static: a class method must be bound to the class that is called, which may be a subclass of
    # *part*.
    method = inspect.getattr_static(part, name)
    bound = isinstance(method, classmethod | staticmethod)

    @functools.wraps(method.__func__ if bound else method)
    def call(self: object, settings: object, *rest: object, **options: object) -> Any:
        # A plug-in's own call of `super()` passes the namespace on, which goes through unchanged.
        flat = namespace_of(settings) if isinstance(settings, Settings) else settings
        return (method.__get__(None, self) if bound else functools.partial(method, self))(flat, *rest, **options)

    setattr(part, name, classmethod(call) if bound else call)


def _typed(self: Any, cls: type) -> Any:
    """The settings of the task as *cls*; with a dataclass of its own the namespace, which has the
    settings of *cls*."""
    if isinstance(self.settings.task, cls):
        return self.settings.task
    return _namespace_with_methods(cls)(**{**vars(self.args), **vars(fields.typed(cls, self.args))})


@functools.cache
def _namespace_with_methods(cls: type) -> type[argparse.Namespace]:
    """A namespace with the methods of the settings *cls*."""
    methods: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        methods |= {
            name: value for name, value in vars(base).items() if not name.startswith("__") and _is_method(value)
        }
    return type(cls.__name__, (argparse.Namespace,), methods)


def _is_method(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, property)


_ADAPTERS: dict[str, Callable[[Any], None]] = {
    "model": adapt_model,
    "task": adapt_task,
    "criterion": adapt_criterion,
    # Their constructors are called as fairseq's are.
    "optimizer": lambda part: None,
    "learning-rate schedule": lambda part: None,
}
