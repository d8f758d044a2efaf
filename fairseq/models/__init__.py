"""Models and their architectures: named sets of defaults.

A model is registered with :func:`register_model`, an architecture with :func:`register_model_architecture` on a
function that fills in what the user left open in a ``Namespace``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fairseq.limits import ModelLimit, limited_models
from fairseq.models.base import BaseFairseqModel, FairseqDecoder, FairseqLanguageModel, ModelConfig
from fairseq.registry import Registry, is_plugin
from fairseq.settings import Settings

M = TypeVar("M", bound=type)
Fill = Callable[[argparse.Namespace], None]


@dataclass(frozen=True)
class Architecture:
    """A model's name, and the function that fills in what the user left open."""

    model: str
    fill: Fill


MODELS: Registry[Any] = Registry("model", "--arch")
ARCHITECTURES: Registry[Architecture] = Registry("architecture", "--arch")


def register_model(name: str, dataclass: type | None = None) -> Callable[[M], M]:
    """Class decorator: keep a model under *name*, with the dataclass of its settings if it has one.

    A plug-in's dataclass also makes an architecture of that name, with the dataclass's defaults.
    """

    def keep(model: M) -> M:
        if dataclass is not None and is_plugin(model) and name not in ARCHITECTURES:
            ARCHITECTURES.register(name)(Architecture(name, _defaults_of_the_dataclass))
        return MODELS.register(name, dataclass)(model)

    return keep


def _defaults_of_the_dataclass(args: argparse.Namespace) -> None:
    """Fill in nothing."""


def build_model(settings: Settings, task: Any) -> BaseFairseqModel:
    """The model of the architecture that *settings* choose, for *task*'s dictionary."""
    cls = MODELS[ARCHITECTURES[settings.chosen.arch].model]
    with limited_models(ModelLimit.of_machine()):
        return cls.build_model(settings.given_to(cls, settings.model), task)


def register_model_architecture(model_name: str, arch_name: str) -> Callable[[Fill], Fill]:
    """Decorator for a function that sets on a ``Namespace`` the defaults of an architecture."""

    def keep(fill: Fill) -> Fill:
        known = ARCHITECTURES[arch_name].fill if arch_name in ARCHITECTURES else None
        if known is _defaults_of_the_dataclass:
            ARCHITECTURES.replace(arch_name, Architecture(model_name, fill))
        elif known is None or (known.__module__, known.__qualname__) != (fill.__module__, fill.__qualname__):
            ARCHITECTURES.register(arch_name)(Architecture(model_name, fill))
        return fill

    return keep


from fairseq.models import architectures, bert, electra, lstm_lm, tnf, transformer_lm, transformer_xl  # noqa: E402  (register themselves)

__all__ = [
    "ARCHITECTURES",
    "MODELS",
    "Architecture",
    "BaseFairseqModel",
    "FairseqDecoder",
    "FairseqLanguageModel",
    "ModelConfig",
    "architectures",
    "bert",
    "build_model",
    "electra",
    "lstm_lm",
    "register_model",
    "register_model_architecture",
    "tnf",
    "transformer_lm",
    "transformer_xl",
]
