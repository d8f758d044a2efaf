"""``fairseq.dataclass``: settings of plug-ins as dataclasses, and their translation to this
package's."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fairseq.config import fields
from fairseq.dataclass import defaults, omegaconf
from fairseq.dataclass.omegaconf import MISSING
from fairseq.system.deferred import names_of

# At import: a module of settings imports `II` of omegaconf beside this one, before it calls
# anything here.
omegaconf.stand_in()

REFERENCE = re.compile(r"\$\{(?:\w+\.)*(\w+)\}")


class StrEnum(enum.Enum):
    """Words as an enumeration, equal to the plain words."""

    def __str__(self) -> str:
        return str(self.value)

    def __eq__(self, other: object) -> bool:
        return self is other or self.value == other

    def __hash__(self) -> int:
        return hash(self.value)


def ChoiceEnum(choices: list[str]) -> type[StrEnum]:
    """The type of a setting that is one of *choices*."""
    return StrEnum("Choices", {word: word for word in choices})  # type: ignore[return-value, call-arg]


DATASET_IMPL_CHOICES = ChoiceEnum(["mmap"])
DDP_BACKEND_CHOICES = ChoiceEnum(["c10d", "fully_sharded", "legacy_ddp", "no_c10d", "pytorch_ddp", "slowmo"])
DDP_COMM_HOOK_CHOICES = ChoiceEnum(["none", "fp16"])
LOG_FORMAT_CHOICES = ChoiceEnum(["json", "none", "simple", "tqdm"])
ZERO_SHARDING_CHOICES = ChoiceEnum(["none", "os"])


@dataclasses.dataclass
class FairseqDataclass:
    """Base of a plug-in's settings; defaults may refer to other settings with omegaconf's
    ``II``."""

    _name: str | None = None

    @classmethod
    def as_config(cls) -> type:
        """The same settings as a dataclass of this package, of which the plug-in's flags are
        made."""
        hints = typing.get_type_hints(cls)
        declared = [
            # `data` is the positional argument of every task here, and `_name` is Hydra's.
            field
            for field in dataclasses.fields(cls)
            if not field.name.startswith("_") and field.name not in ("data", "seed")
        ]
        fields = [(field.name, *_translated(hints[field.name], field)) for field in declared]
        return dataclasses.make_dataclass(cls.__name__, fields, frozen=True, namespace={"__doc__": cls.__doc__})

    @classmethod
    def from_namespace(cls, args: argparse.Namespace) -> FairseqDataclass:
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in known})


OF_TASKS = ("LanguageModelingConfig", "MaskedLMConfig", "SentencePredictionConfig")
"""Settings of tasks, which in fairseq also have ``data`` and ``seed``."""


_extendable: dict[str, type] = {}


def extendable(name: str, config: type, **defaults: object) -> type:
    """The dataclass called *name*, one for each name, with the fields of *config*, which is frozen
    and so cannot be extended itself; fairseq's has other *defaults*."""
    if name not in _extendable:
        hints = typing.get_type_hints(config)
        copies = [(f.name, hints[f.name], _copied(f, **defaults)) for f in dataclasses.fields(config)]
        if name in OF_TASKS:
            copies += [("data", str | None, dataclasses.field(default=None))]
            copies += [("seed", int, dataclasses.field(default=1))]
        namespace = {"__doc__": config.__doc__}
        _extendable[name] = dataclasses.make_dataclass(name, copies, bases=(FairseqDataclass,), namespace=namespace)
    return _extendable[name]


def settings_of(module: str, names: Mapping[str, str] | None = None, **configs: type) -> Callable[[str], Any]:
    """``__getattr__`` of *module*, which has these settings for plug-ins to extend, and *names* of
    other modules as :func:`~fairseq.system.deferred.names_of` takes them."""
    find, _ = names_of(module, names or {})
    return lambda name: extendable(name, configs[name]) if name in configs else find(name)


def _copied(field: dataclasses.Field[Any], **defaults: object) -> Any:
    """*field* for another class: a ``Field`` belongs to the one that it was made for."""
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory, metadata=field.metadata)
    return dataclasses.field(default=defaults.get(field.name, field.default), metadata=field.metadata)


def _translated(hint: object, field: dataclasses.Field[Any]) -> tuple[Any, Any]:
    """Type and field of a setting in the terms of :mod:`fairseq.config.fields`."""
    metadata: Mapping[str, Any] = field.metadata
    # A field of this package's already, of a dataclass that `extendable` made.
    if "bounds" in metadata:
        return hint, _copied(field)
    default = field.default
    if default is dataclasses.MISSING:
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
    reference = REFERENCE.fullmatch(default) if isinstance(default, str) else None
    # Such settings are flags that take a Python literal, such as `--arg-overrides "{'a': 1}"`.
    if isinstance(default, dict):
        default = str(default)
    # The default of a referring setting is the other setting's value, which is known only once all
    # flags are parsed; fairseq's where no part here has that setting.
    if reference:
        default = defaults.missing().get(reference[1])
    kind, optional, choices = _kind(hint, default)
    if default == MISSING or default is None:
        default, optional = (False, False) if kind is bool else (None, True)
    elif isinstance(default, tuple):
        default = list(default)
    elif isinstance(default, enum.Enum):
        default = default.value
    alias = metadata.get("argparse_alias")
    made = fields.flag(
        default,
        str(metadata.get("help", "")).strip(),
        aliases=(alias,) if alias else (),
        choices=choices,
        const=metadata.get("argparse_const"),
        same_as=reference[1] if reference else None,
    )
    return (kind | None if optional else kind), made


def _kind(hint: object, default: object) -> tuple[Any, bool, tuple[str, ...] | None]:
    """(type, may be None, choices) of a setting annotated with *hint*."""
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        optional, hint = len(members) < len(typing.get_args(hint)), members[0]
    origin = typing.get_origin(hint)
    if origin in (list, tuple):
        item = typing.get_args(hint)[0] if typing.get_args(hint) else str
        return list[item if item in (int, float, str) else str], optional, None  # type: ignore[misc]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return str, optional, tuple(str(member.value) for member in hint)
    if hint in (bool, int, float, str):
        return hint, optional, None
    if isinstance(default, list | tuple) and default:
        return list[type(default[0])], optional, None  # type: ignore[misc]
    return (type(default) if isinstance(default, bool | int | float) else str), optional, None
