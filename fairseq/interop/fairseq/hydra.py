"""Hydra's command lines and fairseq's nested YAML files as flags of ``fairseq-train``, without
Hydra's code.

fairseq groups its settings (``optimization.lr``); flags have the last part of the name. A group
such as ``optimizer`` is also a choice: its ``_name`` or its option in the list of ``defaults`` is
the flag of that name. Sweeps, launchers and references to anything but one setting are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairseq.config.settings_file import NULLS, load_yaml, parse_yaml
from fairseq.dataclass.utils import GROUPS, PARTS, UNREAD
from fairseq.errors import UserError

Tree = dict[str, Any]

OTHERS = ("scoring", "bpe", "tokenizer")  # choices of translation
OUTPUTS = ("save_dir", "tensorboard_logdir", "log_file")  # relative to the folder of the run
OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[\w@-]+(?:[./][\w@-]+)*)(?:=(?P<value>.*))?", re.DOTALL)
REFERENCE = re.compile(r"\$\{(\w+)\.(\w+)\}")  # the value of another setting, as composed files have it
MISSING = "???"
NO_LAUNCHER = "launchers and sweepers are not supported; start fairseq-hydra-train where it is to run, for each value"


def training_flags(config: Path | None, overrides: Sequence[str]) -> list[str]:
    """Return the words of ``fairseq-train`` that mean the same.

    Args:
        config: the primary file (``CONFIG_DIR/CONFIG_NAME.yaml``); beside it are the folders of
            groups.
        overrides: ``group.name=value``, ``group=option``, ``+group.name=value``, ``~group.name``.

    Raises:
        UserError: a file or an override is malformed, a sweep or a launcher, or contradicts another
            setting.
    """
    parsed = [_override(text) for text in overrides]
    # A key without a dot chooses an option of a group.
    chosen = {key: None if sign == "~" else value for sign, key, value in parsed if "." not in key}
    folder, content = (config.parent, load_yaml(config, "--config-name")) if config is not None else (Path(), {})
    listed = _defaults(folder, content.pop("defaults", None) or [])
    tree: Tree = {"criterion": {"_name": "cross_entropy"}, "lr_scheduler": {"_name": "fixed"}}  # fairseq's own
    for group, option in listed.items():
        _merge(tree, _of_option(folder, group, chosen.get(group, option)))
    # After the options of the defaults: what the primary file says itself overrides them, as in
    # Hydra since 1.1.
    _merge(
        tree,
        {
            name: {"_name": value} if isinstance(value, str) and name not in GROUPS else value
            for name, value in content.items()
        },
    )
    tree.pop("_name", None)  # of a file that fairseq composed
    for group in chosen.keys() - listed.keys():
        _merge(tree, _of_option(folder, group, chosen[group]))
    for sign, key, value in parsed:
        # Values of single settings come last, whatever their order: Hydra composes groups first.
        if key not in chosen:
            _assign(tree, key.split("."), value, remove=sign == "~")
    # fairseq needs an optimizer; a command without one has the recipe of its architecture.
    if not tree.get("optimizer") and tree.get("lr_scheduler") == {"_name": "fixed"} and "lr_scheduler" not in chosen:
        del tree["lr_scheduler"]
    return _flags(tree)


def _defaults(folder: Path, entries: object) -> dict[str, object]:
    """The options by group in a list of ``defaults``."""
    options: dict[str, Any] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        if entry == "_self_":
            continue
        if not isinstance(entry, dict) or len(entry) != 1:
            raise UserError(f"--config-name: defaults: expected `group: option`, found {str(entry)[:100]}")
        [(group, option)] = entry.items()
        # Hydra writes a group as `optimizer`, `/optimizer` or `override optimizer`, with one
        # meaning here.
        name = str(group).removeprefix("override ").lstrip("/")
        _refuse_hydra(name, f"--config-name: defaults: {group}")
        options[name] = option
    return {group: option for group, option in options.items() if not group.startswith("hydra")}


def _refuse_hydra(group: str, where: str) -> None:
    """Raise UserError for a launcher or a sweeper; Hydra's loggers are no settings of a run."""
    if group in ("hydra/launcher", "hydra/sweeper"):
        raise UserError(f"{where}: {NO_LAUNCHER}")


def _override(text: str) -> tuple[str, str, object]:
    """Sign, key and value of an override on the command line."""
    import yaml

    match = OVERRIDE.fullmatch(text)
    if match is None or (match["value"] is None and match["sign"] != "~"):
        raise UserError(f"{text[:100]}: expected group.name=value")
    _refuse_hydra(match["key"], text[:100])
    if "/" in match["key"]:
        raise UserError(f"{text[:100]}: expected group.name=value, or group=option")
    value = match["value"] or ""
    # Quotes keep a value text: `'1e-3'` and `'true'` are read no further.
    if value[:1] in "'\"" and value[-1:] == value[:1] and len(value) > 1:
        return match["sign"] or "", match["key"], value[1:-1]
    if "," in value and value[:1] not in "[({":
        raise UserError(f"{text[:100]}: sweeps are not supported; start one run for each value")
    try:
        parsed = parse_yaml(value) if value[:1] != "(" else value
    except yaml.YAMLError:
        raise UserError(f"{text[:100]}: the value is not valid YAML; quote it") from None
    # An empty text, or a comment, is null to YAML, which would choose the default silently.
    if parsed is None and value.strip() not in NULLS[1:] and match["sign"] != "~":
        raise UserError(f"{text[:100]}: an empty value; give one, or leave {match['key'][:80]} out for the default")
    return match["sign"] or "", match["key"], parsed


def _of_option(folder: Path, group: str, option: object) -> Tree:
    """The settings that *option* of *group* stands for: those in its file, or a part of this
    package by that name."""
    if option is None:
        return {group: {}}
    path = folder / group / f"{option}.yaml"
    name = str(option).rpartition("/")[2]
    # Options of a group such as `optimization` exist as files only; for parts, the registered name
    # is enough.
    if group not in PARTS and group not in OTHERS:
        return {group: load_yaml(path, f"{group}={option}")}
    return {group: {"_name": name, **(load_yaml(path, f"{group}={option}") if os.path.isfile(path) else {})}}


def _merge(tree: Tree, other: Mapping[str, object]) -> None:
    """Put *other* into *tree*; a part of another name replaces the former part with all its
    settings."""
    for name, value in other.items():
        former = tree.get(name)
        if isinstance(value, dict) and isinstance(former, dict) and value.get("_name") in (None, former.get("_name")):
            _merge(former, value)
        else:
            tree[name] = value


def _assign(tree: Tree, names: Sequence[str], value: object, *, remove: bool) -> None:
    for name in names[:-1]:
        inner = tree.setdefault(name, {})
        if not isinstance(inner, dict):
            raise UserError(f"{'.'.join(names)}: {name} is a value, not a group")
        tree = inner
    if not remove:
        tree[names[-1]] = value
    elif names[-1] in tree:
        del tree[names[-1]]
    else:
        raise UserError(f"~{'.'.join(names)}: is not set; leave it out")


def _flags(tree: Tree) -> list[str]:
    """The words of the command line for a composed *tree*."""
    folder = _run_folder(tree)
    settings = _by_name(tree)
    if folder:
        settings.setdefault("save_dir", "")
        settings |= {name: str(Path(folder, settings[name])) for name in OUTPUTS if name in settings}
    data = settings.pop("data", MISSING)
    if data == MISSING:
        raise UserError("task.data: missing; give the folder of the binarised data, task.data=DIR")
    flags = {f"--{name.replace('_', '-')}": text for name, text in settings.items()}
    # `--flag=value` in one word: a value such as -1 would be read as a flag of its own.
    return [data, *(flag if text == "true" else f"{flag}={text}" for flag, text in flags.items())]


def _run_folder(tree: Tree) -> str:
    """Take Hydra's own settings out of *tree*, and return ``hydra.run.dir``; empty without one."""
    sections = tree.pop("hydra", {})
    if not isinstance(sections, dict):
        raise UserError(f"hydra: expected settings, found {str(sections)[:100]}")
    for name in ("launcher", "sweeper", "sweep"):
        if name in sections:
            raise UserError(f"hydra.{name}: {NO_LAUNCHER}")
    match sections.get("run"):
        case {"dir": str() | int() as text}:
            return _text("hydra.run.dir", text) or ""
        case None:
            return ""
        case other:
            raise UserError(f"hydra.run: expected hydra.run.dir=DIR, found {str(other)[:100]}")


def _by_name(tree: Tree) -> dict[str, str]:
    """The settings of all groups, as text; several groups may give one the same value."""
    settings: dict[str, str] = {}
    keys: dict[str, str] = {}
    for group, values in tree.items():
        # A composed file has all of `ema`, with values that mean nothing while it is off.
        if group in UNREAD or (
            group == "ema" and isinstance(values, dict) and str(values.get("store_ema")).lower() != "true"
        ):
            continue
        if group not in (*PARTS, *GROUPS, *OTHERS):
            raise UserError(f"{group}: no such group of settings; one of {', '.join([*PARTS, *GROUPS])}")
        if group in GROUPS and not isinstance(values, dict):
            raise UserError(f"{group}: expected settings, {group}.name=value, found {str(values)[:100]}")
        for name, value in values.items() if isinstance(values, dict) else [("_name", values)]:
            key = f"{group}.{name}"
            if isinstance(value, str) and (reference := REFERENCE.fullmatch(value)):
                value = (tree.get(reference[1]) or {}).get(reference[2])
            name = PARTS.get(group, group) if name == "_name" else name
            text = _text(key, value)
            if text is None:
                continue
            # Groups share names (`tokens_per_sample` of task and model): equal values are one flag,
            # others a contradiction.
            if settings.get(name, text) != text:
                raise UserError(f"{key}={text}: {keys[name]} is {settings[name]}; give both the same value")
            settings[name], keys[name] = text, key
    return settings


def _text(key: str, value: object) -> str | None:
    """*value* as a flag takes it, None where it is no setting; lists are separated by commas."""
    if value == MISSING and key != "task.data":
        raise UserError(f"{key}: missing; give {key}=VALUE")
    if isinstance(value, list):
        return ",".join(_text(key, item) or "" for item in value)
    text = str(value).lower() if value in ("True", "False", "TRUE", "FALSE") else str(value)
    if "${" in text:
        raise UserError(f"{key}={text[:100]}: only ${{group.name}} as a whole is read; give the value, {key}=VALUE")
    return None if value is None else text
