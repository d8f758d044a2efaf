"""Plug-ins' models that extend one of this package's decoder models, but may have a decoder of
their own."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from fairseq.config.registry import is_outside
from fairseq.models.base import FairseqLanguageModel
from fairseq.models.decoder import Decoder, DecoderModel


class AnyDecoder:
    """The constructor of a plug-in's model that extends one of this package's decoder models: it
    takes any decoder, as fairseq's does."""

    def __init__(self, decoder: Any, *rest: Any, **options: Any) -> None:
        if isinstance(decoder, Decoder):
            parent: Any = super()
            parent.__init__(decoder, *rest, **options)
            return
        model: Any = self
        kind: Any = type(self)
        model.__class__ = _without_ours(kind)
        FairseqLanguageModel.__init__(model, decoder)


def take_any_decoder(part: Any) -> None:
    """Let *part*, a plug-in's subclass of :class:`DecoderModel`, be made with any decoder."""
    cls: Any = [cls for cls in part.__mro__ if issubclass(cls, DecoderModel) and is_outside(cls)][-1]
    cls.__bases__ = (AnyDecoder, *cls.__bases__)


@functools.cache
def _without_ours(cls: type[nn.Module]) -> type[nn.Module]:
    """*cls* without the methods that it inherits from models of this package's decoders."""
    ours = [base for base in cls.__mro__ if issubclass(base, DecoderModel) and not is_outside(base)]
    before = cls.__mro__[: cls.__mro__.index(ours[0])]
    behind = cls.__mro__[cls.__mro__.index(ours[-1]) + 1 :]
    attributes = {name for base in before for name in vars(base)}
    inherited: dict[str, Any] = {}
    for base in reversed(behind):
        inherited.update(vars(base))
    methods = {
        name: inherited[name]
        for base in ours
        for name, value in vars(base).items()
        if name in inherited and name not in attributes and (inspect.isfunction(value) or isinstance(value, property))
    }
    return type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})
