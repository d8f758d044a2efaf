"""Dataclass fields ⇄ command-line flags ⇄ YAML ⇄ what a checkpoint stores.

Every registered part has a ``@dataclass`` config whose fields are made with :func:`flag`. The
flag's name follows from the field's (``decoder_layers`` → ``--decoder-layers``). A parsed command
line holds only what the user gave; what is missing comes from ``--config``, then the architecture,
then the dataclass's defaults.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import math
import numbers
import os
import re
import types
import typing
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fairseq.errors import SettingError, UserError, with_flags

C = TypeVar("C")
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}

SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

# Of any setting: sums and products of a few stay within 64 bits.
LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 3.4e38  # of float32, in which optimizers and losses compute

UNSTORED: set[str] = set()
"""Settings that name files and folders: checkpoints neither store nor set them."""
_FIELDS: weakref.WeakKeyDictionary[type, list[tuple[dataclasses.Field[Any], Any]]] = weakref.WeakKeyDictionary()


class Config:
    """Base of all dataclasses of settings: what is made of one is valid.

    Raises:
        SettingError: a value has another type than its field, or is not among its choices or within
            its bounds; or the settings contradict each other.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        declared = {name: value for name, value in vars(cls).items() if isinstance(value, dataclasses.Field)}
        UNSTORED.update(name for name, field in declared.items() if not field.metadata.get("stored", True))

    def __post_init__(self) -> None:
        for field, hint in _fields(type(self)):
            # Fields that flag() did not make, as a plug-in's, have no bounds to check.
            if "bounds" in field.metadata:
                value = getattr(self, field.name)
                object.__setattr__(self, field.name, coerce(field, hint, _of_kind(field.name, hint, value)))
        self.check()

    def check(self) -> None:
        """Check that the settings, each valid by itself,
        fit together; SettingError if they do not."""


def flag(
    default: object,
    help: str,
    *,
    aliases: Sequence[str] = (),
    choices: Sequence[object] | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    metavar: str | None = None,
    negative: bool = False,
    const: object = None,
    same_as: str | None = None,
    stored: bool = True,
    several: bool = False,
) -> Any:
    """A dataclass field that is also a command-line flag.

    Args:
        default: value when neither the user nor the architecture gives one.
        help: what ``--help`` says; other settings stand in backticks.
        aliases: further names of the flag, e.g. ``("--max-sentences",)``.
        choices: the values allowed.
        low, high: closed bounds of a number (or of each number of a list).
        above, below: open bounds.
        metavar: how ``--help`` shows the value.
        negative: a bool that also has a ``--no-…`` form.
        const: the value where the flag is given without one.
        same_as: the setting whose value it has unless it is given.
        stored: False for a path: it is neither written to checkpoints nor taken from them, where it
            would be the path of somebody else's choice.
        several: several words, as a shell makes of ``*.txt``, are one value with commas.
    """
    metadata = {
        "help": help,
        "aliases": tuple(aliases),
        "choices": choices,
        "bounds": (low, high, above, below),
        "metavar": metavar,
        "negative": negative,
        "const": const,
        "same_as": same_as,
        "stored": stored,
        "several": several,
    }
    # dataclasses reject a list as a default, which all configs would share.
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(name: str) -> str:
    """``decoder_layers`` → ``--decoder-layers``."""
    return "--" + name.replace("_", "-")


class _Joined(argparse.Action):
    def __call__(self, parser: object, namespace: object, values: Any, option: object = None) -> None:
        setattr(namespace, self.dest, ",".join(values))


def add_flags(
    parser: Any,
    config: type,
    only: Sequence[str] | None = None,
    otherwise: str | None = None,
) -> list[argparse.Action]:
    """Add to *parser*, or a group of one, a flag for every field of *config*, or for *only* those
    named, that it does not have yet; return what was added.

    *otherwise* is what ``--help`` says in place of the default, where something else than the
    dataclass decides. Defaults stay out of the parsed namespace (``argparse.SUPPRESS``), so that
    what is in it was given by the user.
    """
    added = []
    # A parser of argparse itself, as a plug-in's, does not tell what it has.
    known = getattr(getattr(parser, "root", parser), "by_flag", {})
    for field, hint in _fields(config):
        names = [flag_name(field.name), *field.metadata.get("aliases", ())]
        # Two dataclasses may declare a setting, such as a model and a task; it is one flag.
        if names[0] in known or (only is not None and field.name not in only):
            continue
        kind, many, _ = _kind(hint)
        default = _default(field)
        options: dict[str, Any] = {
            "dest": field.name,
            "default": argparse.SUPPRESS,
            "help": _help_text(field, default, otherwise),
        }
        if kind is bool:
            negative = field.metadata.get("negative")
            options["action"] = argparse.BooleanOptionalAction if negative else "store_true"
        else:
            options["type"] = functools.partial(coerce, field, hint)
            options["metavar"] = field.metadata.get("metavar") or _metavar(field, kind, many)
            if field.metadata.get("several"):
                options.update(nargs="+", action=_Joined)
            if field.metadata.get("const") is not None:
                options.update(nargs="?", const=field.metadata["const"])
        with contextlib.suppress(argparse.ArgumentError):
            added.append(parser.add_argument(*[n for n in names if n not in known], **options))
    return added


def typed(config: type[C], settings: C | Mapping[str, object] | argparse.Namespace) -> C:
    """*settings* if they are a *config* already;
    else a *config* of the ones that it has, and of defaults.

    Values may be typed or be the strings a command line, a YAML file or an old checkpoint holds.

    Raises:
        SettingError: a value has the wrong type or is out of range.
    """
    # Entry points that a plug-in calls with fairseq's flat namespace (`build_model`, constructors
    # of optimizers, …) accept both.
    if isinstance(settings, config):
        return settings
    values_by_name: Mapping[str, Any] = vars(settings) if isinstance(settings, argparse.Namespace) else settings  # type: ignore[assignment]
    kwargs = {}
    for field, hint in _fields(config):
        name = field.name if field.name in values_by_name else field.metadata.get("same_as", "")
        if name in values_by_name:
            kwargs[field.name] = coerce(field, hint, values_by_name[name])
    return config(**kwargs)


def defaults(config: type) -> dict[str, Any]:
    """Every field of *config* with its default."""
    return {field.name: _default(field) for field, _ in _fields(config)}


def shown(value: object) -> str:
    """*value* as ``--help`` shows it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def differ(one: object, other: object) -> bool:
    """Return whether two values of a setting mean different things, in whichever form a checkpoint
    or a user has them.

    ``0.1``, ``[0.1]`` and ``"(0.1,)"`` do not; nor do None, False and ``""``.
    """
    return bool(_plain(one) != _plain(other))


def shortened(value: object) -> str:
    """The beginning of *value*, as an error message quotes it."""
    try:
        text = repr(value)
    # `repr` raises it for an integer of more digits than Python prints.
    except ValueError:
        return "a number of thousands of digits"
    # In a SettingError backticks enclose names of settings.
    text = text.replace("`", "'")
    return text if len(text) <= 80 else f"{text[:80]}…"


def checked(config: type, values: Mapping[str, object]) -> dict[str, Any]:
    """The fields of *config*: what *values* have of them, checked and converted, and the defaults
    of the others."""
    return dataclasses.asdict(typed(config, values))


def coerce(field: dataclasses.Field[Any], hint: object, value: object) -> Any:
    """*value* as the type of *field*, checked against its choices and its bounds.

    Raises:
        SettingError: *value* is invalid.
    """
    kind, many, optional = _kind(hint)
    name = f"`{field.name}`"
    if value is None:
        if optional:
            return None
        raise SettingError(f"{name}: a value is needed")
    if kind is bool:
        # Files and old checkpoints have several texts and numbers for switches.
        value = SWITCHES.get(value.lower(), value) if isinstance(value, str) else value
        if not isinstance(value, bool | int):
            raise SettingError(f"{name}: expected true or false, got {value!r}")
        return bool(value)
    # Nearly always a shell variable that is not set.
    if not many and value == "" and kind is str and _default(field) != "":
        raise SettingError(f"{name}: an empty value; give one or leave the flag out")
    items = [_number(name, kind, item) for item in (_split(value) if many else [value])]
    if not items and _default(field) != []:
        raise SettingError(f"{name}: a value is needed")
    for item in items:
        _check(name, field, item)
    return items if many else items[0]


def parse_dict(flag: str, text: str | Mapping[str, object]) -> dict[str, object]:
    """The dict in a Python literal, of which nothing is run; UserError if *text* is none."""
    if isinstance(text, Mapping):
        return dict(text)
    try:
        value = ast.literal_eval(text or "{}")
    # Text that is nested deeply exhausts the memory or the stack of the parser.
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{flag} {text[:200]}: expected a dict with quoted names, e.g. \"{{'name': 0.1}}\"")
    return value


def _fields(config: Any) -> list[tuple[dataclasses.Field[Any], object]]:
    # Cached: the hints of a class cost more than all checks of its values.
    if config not in _FIELDS:
        hints = typing.get_type_hints(config)
        _FIELDS[config] = [(field, hints[field.name]) for field in dataclasses.fields(config)]
    return _FIELDS[config]


def _kind(hint: Any) -> tuple[type, bool, bool]:
    """(element type, is it a list, may it be None) of a field's annotation."""
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [m for m in typing.get_args(hint) if m is not type(None)]
        optional = len(members) < len(typing.get_args(hint))
        hint = members[0]
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True, optional
    return hint, False, optional


def _of_kind(name: str, hint: object, value: object) -> Any:
    """*value*, unless it is of a kind that only a flag's text is read from: Python code says a
    number as a number."""
    kind, many, _ = _kind(hint)
    for item in value if many and isinstance(value, list | tuple) else [value]:
        # Real, not float: NumPy's numbers are valid as well.
        allowed = (str, os.PathLike) if kind is str else (bool,) if kind is bool else (numbers.Real,)
        wrong = not isinstance(item, allowed) or (isinstance(item, bool) and kind is not bool)
        if item is not None and wrong:
            raise SettingError(f"`{name}`: expected {TYPE_NAMES[kind]}, got {shortened(value)}")
    return value


def _split(value: Any) -> list[Any]:
    """``"1,2"``, ``"(0.9, 0.98)"``, ``5`` or ``[1, 2]`` as a list of items."""
    if isinstance(value, str):
        text = value.strip().strip("()[]").strip().removesuffix(",")  # a tuple's
        return text.split(",") if text else []
    if isinstance(value, int | float):
        return [value]
    return list(value)


def _number(name: str, kind: type, value: object) -> Any:
    expected = TYPE_NAMES[kind]
    if kind is str:
        if "\0" in str(value):
            raise SettingError(f"{name}: contains a NUL character; remove it")
        return str(value)
    try:
        # Files may say 1000.0 for a whole number.
        if kind is int and isinstance(value, float):
            if not value.is_integer():
                raise ValueError
            return int(value)
        converted = kind(value)
    except (TypeError, ValueError, OverflowError):
        raise SettingError(f"{name}: expected {expected}, got {shortened(value)}") from None
    limit = LARGEST_INT if kind is int else LARGEST_FLOAT
    if abs(converted) > limit or math.isnan(converted):
        raise SettingError(f"{name}: expected {expected} up to {limit}, got {shortened(value)}")
    return converted


def _check(name: str, field: dataclasses.Field[Any], value: Any) -> None:
    choices = field.metadata.get("choices")
    if choices is not None and value not in choices:
        raise SettingError(f"{name} {value}: choose from {', '.join(map(str, choices))}")
    low, high, above, below = field.metadata.get("bounds", (None,) * 4)
    if low is not None and value < low:
        raise SettingError(f"{name} {value}: must be at least {low}")
    if high is not None and value > high:
        raise SettingError(f"{name} {value}: must be at most {high}")
    if above is not None and value <= above:
        raise SettingError(f"{name} {value}: must be greater than {above}")
    if below is not None and value >= below:
        raise SettingError(f"{name} {value}: must be less than {below}")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _help_text(field: dataclasses.Field[Any], default: object, otherwise: str | None = None) -> str:
    # argparse formats help texts with %.
    text = with_flags(str(field.metadata.get("help", ""))).replace("%", "%%")
    if otherwise is not None:
        return f"{text} (default: {otherwise})"
    if "(default:" in text or default is None or default is False or default == "" or default == []:
        return text
    meaning = re.search(rf" \({re.escape(shown(default))}: ([^()]*)\)$", text)
    if meaning:  # "(0: no limit)" of a default of 0
        return f"{text[: meaning.start()]} (default: {shown(default)}, {meaning[1]})"
    return f"{text} (default: {shown(default)})"


def _metavar(field: dataclasses.Field[Any], kind: type, many: bool) -> str:
    choices = field.metadata.get("choices")
    if choices is not None:
        return "{" + ",".join(map(str, choices)) + "}"
    letter = {int: "N", float: "X", str: "TEXT"}.get(kind, "VALUE")
    return f"{letter},…" if many else letter


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool):
        return value or None
    try:
        # Numbers compare as numbers: a checkpoint may hold "0.1" where a user gives 0.10.
        return [float(item) for item in _split(value)] or None
    except (ValueError, TypeError, OverflowError):
        return value or None
