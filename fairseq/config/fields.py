"""A setting: a dataclass field ⇄ a command-line flag ⇄ text in YAML ⇄ what a checkpoint stores.

Every registered part has a ``@dataclass`` config whose fields are made with :func:`flag`. The
flag's name follows from the field's (``decoder_layers`` → ``--decoder-layers``).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import math
import numbers
import os
import re
import types
import typing
import weakref
from collections.abc import Collection, Mapping, Sequence
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
_SETTINGS: weakref.WeakKeyDictionary[type, list[Setting]] = weakref.WeakKeyDictionary()


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
        for setting in settings_of(type(self)):
            # Fields that flag() did not make, as a plug-in's, have no bounds to check.
            if "bounds" in setting.metadata:
                value = getattr(self, setting.name)
                setting.check_type(value)
                object.__setattr__(self, setting.name, setting.read(value))
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
    rare: bool | str = False,
    training: bool = False,
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
        rare: shown under the last heading of ``--help-all``, with the flag that says the same in
            fewer words, if there is one.
        training: True for what training alone reads: evaluations do not have the flag.
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
        "rare": rare,
        "training": training,
        "stored": stored,
        "several": several,
    }
    # dataclasses reject a list as a default, which all configs would share.
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Setting:
    """A field of a dataclass: its flags, and its value from text.

    Attributes:
        flags: the flag of its name, and the aliases.
        kind: type of the value, or of the items of a list.
    """

    def __init__(self, field: dataclasses.Field[Any], hint: Any) -> None:
        self.name, self.metadata, self._field = field.name, field.metadata, field
        self.flags = [flag_name(field.name), *field.metadata.get("aliases", ())]
        self.optional = self.many = False
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            members = [member for member in typing.get_args(hint) if member is not type(None)]
            self.optional, hint = len(members) < len(typing.get_args(hint)), members[0]
        if typing.get_origin(hint) is list:
            self.many, hint = True, typing.get_args(hint)[0]
        self.kind: type = hint

    @property
    def default(self) -> Any:
        if self._field.default_factory is not dataclasses.MISSING:
            return self._field.default_factory()
        return None if self._field.default is dataclasses.MISSING else self._field.default

    def argument(self, otherwise: str | None = None) -> dict[str, Any]:
        """The options of ``add_argument`` for a flag whose value stays text.

        *otherwise* is what ``--help`` says in place of the default. Defaults stay out of the parsed
        namespace, so that what is in it was given by the user.
        """
        options: dict[str, Any] = {"dest": self.name, "default": argparse.SUPPRESS, "help": self._help(otherwise)}
        if self.kind is bool:
            negative = self.metadata.get("negative")
            return {**options, "action": argparse.BooleanOptionalAction if negative else "store_true"}
        choices = self.metadata.get("choices")
        letter = {int: "N", float: "X", str: "TEXT"}.get(self.kind, "VALUE")
        usual = (
            "{" + ",".join(map(str, choices)) + "}" if choices is not None else f"{letter},…" if self.many else letter
        )
        options["type"] = str
        options["metavar"] = self.metadata.get("metavar") or usual
        if self.metadata.get("several"):
            options.update(nargs="+", action=_Joined)
        if self.metadata.get("const") is not None:
            options.update(nargs="?", const=self.metadata["const"])
        return options

    def _help(self, otherwise: str | None) -> str:
        # argparse formats help texts with %.
        text, default = with_flags(str(self.metadata.get("help", ""))).replace("%", "%%"), self.default
        if isinstance(short := self.metadata.get("rare"), str):
            text = f"see {flag_name(short)}: {text}"
        if otherwise is not None:
            return f"{text} (default: {otherwise})"
        if "(default:" in text or default is None or default is False or default == "" or default == []:
            return text
        meaning = re.search(rf" \({re.escape(format_value(default))}: ([^()]*)\)$", text)
        if meaning:  # "(0: no limit)" of a default of 0
            return f"{text[: meaning.start()]} (default: {format_value(default)}, {meaning[1]})"
        return f"{text} (default: {format_value(default)})"

    def check_type(self, value: object) -> None:
        """Raise SettingError for text where a number is meant: Python code
        says a number as a number."""
        # Real, not float: NumPy's numbers are valid as well.
        allowed = {str: (str, os.PathLike), bool: (bool,)}.get(self.kind, (numbers.Real,))
        for item in value if self.many and isinstance(value, list | tuple) else [value]:
            wrong = not isinstance(item, allowed) or (isinstance(item, bool) and self.kind is not bool)
            if item is not None and wrong:
                raise SettingError(f"`{self.name}`: expected {TYPE_NAMES[self.kind]}, got {truncate(value)}")

    def read(self, value: Any) -> Any:
        """Return *value*, typed or as text, as the type of the field.

        Raises:
            SettingError: it has another type, or is not among the choices or within the bounds.
        """
        name = f"`{self.name}`"
        if value is None:
            if self.optional:
                return None
            raise SettingError(f"{name}: a value is needed")
        if self.kind is bool:
            # Files and old checkpoints have several texts and numbers for switches.
            value = SWITCHES.get(value.lower(), value) if isinstance(value, str) else value
            if not isinstance(value, bool | int):
                raise SettingError(f"{name}: expected true or false, got {value!r}")
            return bool(value)
        # Nearly always a shell variable that is not set.
        if not self.many and value == "" and self.kind is str and self.default != "":
            raise SettingError(f"{name}: an empty value; give one or leave the flag out")
        items = [self._item(name, item) for item in (_items(value) if self.many else [value])]
        if not items and self.default != []:
            raise SettingError(f"{name}: a value is needed")
        return items if self.many else items[0]

    def _item(self, name: str, value: object) -> Any:
        item = _number(name, self.kind, value) if self.kind is not str else str(value)
        if isinstance(item, str) and "\0" in item:
            raise SettingError(f"{name}: contains a NUL character; remove it")
        choices = self.metadata.get("choices")
        if choices is not None and item not in choices:
            raise SettingError(f"{name} {item}: choose from {', '.join(map(str, choices))}")
        low, high, above, below = self.metadata.get("bounds", (None,) * 4)
        if low is not None and item < low:
            raise SettingError(f"{name} {item}: must be at least {low}")
        if high is not None and item > high:
            raise SettingError(f"{name} {item}: must be at most {high}")
        if above is not None and item <= above:
            raise SettingError(f"{name} {item}: must be greater than {above}")
        if below is not None and item >= below:
            raise SettingError(f"{name} {item}: must be less than {below}")
        return item


class _Joined(argparse.Action):
    def __call__(self, parser: object, namespace: object, values: Any, option: object = None) -> None:
        setattr(namespace, self.dest, ",".join(values))


def settings_of(config: Any) -> list[Setting]:
    """The settings that the dataclass *config* has."""
    # Cached: the hints of a class cost more than all checks of its values.
    if config not in _SETTINGS:
        hints = typing.get_type_hints(config)
        _SETTINGS[config] = [Setting(field, hints[field.name]) for field in dataclasses.fields(config)]
    return _SETTINGS[config]


def add_flags(parser: Any, config: type, only: Collection[str] | None = None) -> list[argparse.Action]:
    """Add to *parser*, or a group of one, a flag for every field of *config*, or for *only* those
    named, that it does not have yet; return what was added."""
    added = []
    # A parser of argparse itself, as a plug-in's, does not tell what it has.
    known = getattr(parser, "by_flag", {})
    for setting in settings_of(config):
        flags = [flag for flag in setting.flags if flag not in known]
        if only is not None and setting.name not in only:
            continue
        if hasattr(parser, "adopt"):  # a command's, which may have the flag for another part
            parser.adopt(setting)
        # Two dataclasses may declare a setting, such as a model and a task; it is one flag.
        if flags[:1] == setting.flags[:1]:
            options = setting.argument()
            if setting.kind is not bool:
                options["type"] = setting.read
            with contextlib.suppress(argparse.ArgumentError):
                added.append(parser.add_argument(*flags, **options))
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
    values: Mapping[str, Any] = vars(settings) if isinstance(settings, argparse.Namespace) else settings  # type: ignore[assignment]
    kwargs = {}
    for setting in settings_of(config):
        name = setting.name if setting.name in values else setting.metadata.get("same_as", "")
        if name in values:
            kwargs[setting.name] = setting.read(values[name])
    return config(**kwargs)


def checked(config: type, values: Mapping[str, object]) -> dict[str, Any]:
    """The fields of *config*: what *values* have of them, checked and converted, and the defaults
    of the others."""
    return dataclasses.asdict(typed(config, values))


def defaults(config: type) -> dict[str, Any]:
    """Every field of *config* with its default."""
    return {setting.name: setting.default for setting in settings_of(config)}


def flag_name(name: str) -> str:
    """``decoder_layers`` → ``--decoder-layers``."""
    return "--" + name.replace("_", "-")


def format_value(value: object) -> str:
    """*value* as ``--help`` shows it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def values_differ(one: object, other: object) -> bool:
    """Return whether two values of a setting mean different things, in whichever form a checkpoint
    or a user has them.

    ``0.1``, ``[0.1]`` and ``"(0.1,)"`` do not; nor do None, False and ``""``.
    """
    return bool(_plain(one) != _plain(other))


def truncate(value: object) -> str:
    """The beginning of *value*, as an error message quotes it."""
    try:
        text = repr(value)
    # `repr` raises it for an integer of more digits than Python prints.
    except ValueError:
        return "a number of thousands of digits"
    # In a SettingError backticks enclose names of settings.
    text = text.replace("`", "'")
    return text if len(text) <= 80 else f"{text[:80]}…"


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


def _items(value: Any) -> list[Any]:
    """``"1,2"``, ``"(0.9, 0.98)"``, ``5`` or ``[1, 2]`` as a list of items."""
    if isinstance(value, str):
        text = value.strip().strip("()[]").strip().removesuffix(",")  # a tuple's
        return text.split(",") if text else []
    if isinstance(value, int | float):
        return [value]
    return list(value)


def _number(name: str, kind: type, value: Any) -> Any:
    expected = TYPE_NAMES[kind]
    try:
        # Files may say 1000.0 for a whole number.
        if kind is int and isinstance(value, float):
            if not value.is_integer():
                raise ValueError
            return int(value)
        converted = kind(value)
    except (TypeError, ValueError, OverflowError):
        raise SettingError(f"{name}: expected {expected}, got {truncate(value)}") from None
    limit = LARGEST_INT if kind is int else LARGEST_FLOAT
    if abs(converted) > limit or math.isnan(converted):
        raise SettingError(f"{name}: expected {expected} up to {limit}, got {truncate(value)}")
    return converted


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool):
        return value or None
    try:
        # Numbers compare as numbers: a checkpoint may hold "0.1" where a user gives 0.10.
        return [float(item) for item in _items(value)] or None
    except (ValueError, TypeError, OverflowError):
        return value or None
