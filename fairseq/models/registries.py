"""fairseq's registries of models and architectures, and the functions of its architectures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fairseq.config.fields import defaults
from fairseq.config.registry import ARCHITECTURES, MODELS, completed
from fairseq.models import loading
from fairseq.models.architectures.transformer_lm import BASE
from fairseq.models.base import BaseFairseqModel
from fairseq.models.transformer_lm_settings import TransformerLMConfig


def build_model(cfg: Any, task: Any, from_checkpoint: bool = False) -> BaseFairseqModel:
    """The model that the settings *cfg* choose, for the dictionary of *task*."""
    return loading.build_model(cfg, task)


def base_lm_architecture(args: object) -> None:
    """Set on *args* what all architectures of fairseq but ``transformer_lm`` begin with."""
    vars(args).update(completed(BASE, vars(args)))


def base_gpt3_architecture(args: Any) -> None:
    """Set on *args* what the architectures ``transformer_lm_gpt3_…`` share."""
    usual = defaults(TransformerLMConfig)
    sizes = {name: usual[name] for name in ("decoder_layers", "decoder_embed_dim", "decoder_attention_heads")}
    vars(args).update({**sizes, **vars(args)})
    ARCHITECTURES["transformer_lm_gpt3_small"].fill(args)


class _Live(Mapping[str, Any]):
    """A registry of fairseq: of each of *names*, also of later ones, what *value* gives."""

    def __init__(self, names: Iterable[str], value: Callable[[str], Any]) -> None:
        self.names, self.value = names, value

    def __getitem__(self, name: str) -> Any:
        if name not in set(self.names):
            raise KeyError(name)
        return self.value(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(set(self.names))


def _architectures_of(model: str) -> list[str]:
    return [name for name in ARCHITECTURES if ARCHITECTURES[name].model == model]


ARCH_MODEL_REGISTRY = _Live(ARCHITECTURES, lambda name: MODELS[ARCHITECTURES[name].model])
ARCH_MODEL_NAME_REGISTRY = _Live(ARCHITECTURES, lambda name: ARCHITECTURES[name].model)
ARCH_MODEL_INV_REGISTRY = _Live(MODELS, _architectures_of)
ARCH_CONFIG_REGISTRY = _Live(ARCHITECTURES, lambda name: ARCHITECTURES[name].fill)
MODEL_DATACLASS_REGISTRY = _Live(MODELS, lambda name: MODELS[name].config_class)


def __getattr__(name: str) -> Callable[[Any], None]:
    """The function that sets the defaults of an architecture on a namespace, for plug-ins to call
    in their own."""
    architecture = name.removesuffix("_architecture")
    if architecture not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return ARCHITECTURES[architecture].fill
