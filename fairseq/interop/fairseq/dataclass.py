"""``fairseq.dataclass``: settings of plug-ins as dataclasses, and their translation to this
package's."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from fairseq.config import fields
from fairseq.interop.fairseq import defaults, hydra, names
from fairseq.interop.fairseq.omegaconf import MISSING, DictConfig
from fairseq.models.architectures.transformer_lm import PLAIN
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.modules import devices

# At import: a module of settings imports `II` of omegaconf beside this one, before it calls
# anything here.
names.before_import()

REFERENCE = re.compile(r"\$\{(?:\w+\.)*(\w+)\}")
_ENCODERS = {"bpe": "bpe", "tokenizer": "tokenizer"}  # groups of settings: the setting that chooses one


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


@functools.cache
def extendable(name: str, config: type) -> type:
    """A dataclass called *name* with the fields of *config*, which is frozen and so cannot be
    extended itself."""
    hints = typing.get_type_hints(config)
    # Defaults of fairseq's dataclass that differ.
    defaults = PLAIN if config is TransformerLMConfig else {}
    copies = [(f.name, hints[f.name], _copied(f, **defaults)) for f in dataclasses.fields(config)]
    if name in OF_TASKS:
        copies += [("data", str | None, dataclasses.field(default=None)), ("seed", int, dataclasses.field(default=1))]
    return dataclasses.make_dataclass(name, copies, bases=(FairseqDataclass,), namespace={"__doc__": config.__doc__})


def _copied(field: dataclasses.Field[Any], **defaults: object) -> Any:
    """*field* for another class: a ``Field`` belongs to the one that it was made for."""
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory, metadata=field.metadata)
    return dataclasses.field(default=defaults.get(field.name, field.default), metadata=field.metadata)


class ComposedConfig(DictConfig):
    """Settings in fairseq's groups; the flat ones that they were made of are attributes, too, as
    before 0.10."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in vars(self)["_completed"]:
            raise AttributeError(f"the settings have no {name!r}")
        return vars(self)["_completed"][name]

    def __repr__(self) -> str:
        # Each group has all settings: a script's log has them once.
        return repr(DictConfig(**vars(self)["_completed"]))

    def flattened(self) -> argparse.Namespace:
        """The flat settings, with what was changed since."""
        flat, completed = (dict(vars(self)[name]) for name in ("_flat", "_completed"))
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        changed = {
            name: value
            for group in public.values()
            if isinstance(group, DictConfig)
            for name, value in vars(group).items()
            if not name.startswith("_") and value is not completed.get(name)
        }
        added = {name: value for name, value in public.items() if not isinstance(value, DictConfig)}
        return argparse.Namespace(**{**flat, **changed, **added})


def convert_namespace_to_omegaconf(args: argparse.Namespace) -> DictConfig:
    """The flat *args* under the names of fairseq's groups, each of which has all settings."""
    if isinstance(args, ComposedConfig):
        return args
    defaults.complete(completed := argparse.Namespace(**vars(args)))
    flat = vars(completed)
    # As fairseq's default: scripts compare it with 1.
    flat["distributed_world_size"] = flat.get("distributed_world_size") or max(devices.count(), 1)
    parts = {group: str(flat.get(flag) or "") for group, flag in (hydra.PARTS | _ENCODERS).items()}
    # Plug-ins read a setting from the group in which their version of fairseq had it, which differs
    # between versions.
    groups = {
        group: DictConfig(**{**flat, "_name": parts.get(group)}) for group in (*hydra.GROUPS, *hydra.UNREAD, *parts)
    }
    return ComposedConfig(**groups, _flat=vars(args), _completed=flat)


def gen_parser_from_dataclass(
    parser: argparse.ArgumentParser,
    dataclass_instance: FairseqDataclass,
    delete_default: bool = False,
    with_prefix: str | None = None,
) -> None:
    """Add the flags of *dataclass_instance* to *parser*, without defaults where an architecture has
    them."""
    settings = type(dataclass_instance).as_config()
    values = {} if delete_default else fields.defaults(settings)
    for action in fields.add_flags(parser, settings):
        # This package's flags have no default in the parser, so that given values can be told from
        # an architecture's; a parser of fairseq's has them.
        if action.dest in values:
            action.default = values[action.dest]


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
        default = defaults.MISSING.get(reference[1])
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
