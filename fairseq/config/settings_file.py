"""Settings from a YAML file (``--config``), read within bounds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq.config.fields import shortened
from fairseq.errors import UserError, read_failure

LARGEST = 1 << 16  # bytes of a file; PyYAML reads some 100 kB a second
DEPTH = 20
OUTPUTS = ("metrics_file", "log_file", "tensorboard_logdir")  # what a run writes beside its checkpoints


def read_yaml(path: str | Path) -> dict[str, object]:
    """The settings in a ``--config`` file, by name (dashes
    or underscores); UserError if it is no flat mapping."""
    settings = load_yaml(path, "--config")
    for name, value in settings.items():
        _check_setting(path, name, value)
    return {name.replace("-", "_"): value for name, value in settings.items()}


def load_yaml(path: str | Path, flag: str) -> dict[str, object]:
    """The mapping in a YAML file that *flag* names.

    Raises:
        UserError: the file is missing, larger than 64 KiB,
            no YAML, nested deeply, or not a mapping.
    """
    # Imported here: most command lines name no file.
    import yaml

    try:
        with open(path, "rb") as file:
            # One byte more tells a larger file, without reading it.
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UserError(f"{flag} {path}: larger than 64 KiB; give a file of flags")
        text = content.decode("utf-8")
        _check_depth(yaml.parse(text, Loader=yaml.SafeLoader))
        settings = yaml.safe_load(text)
    except OSError as error:
        raise UserError(f"{flag} {path}: {read_failure(error)}; give a YAML file of settings") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{flag} {path}: byte offset {error.start}: not UTF-8; convert the file") from None
    # Constructors of tagged values fail in every way.
    except Exception as error:
        if isinstance(error, UserError):
            raise
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = f" at line {line + 1}" if line is not None else f" ({type(error).__name__}: {str(error)[:100]})"
        raise UserError(f"{flag} {path}: not valid YAML{where}") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UserError(f"{flag} {path}: expected `name: value` lines, found {type(settings).__name__}")
    return settings


def for_another_run(settings: Mapping[str, object], save_dir: str) -> dict[str, object]:
    """*settings* of a run as a run with *save_dir* takes them: what they write beside checkpoints
    lies there, too.

    A file in the first run's checkpoint folder has the same place in the new one, another one its
    name; unchanged for the first run itself, or where *settings* name no checkpoint folder.
    """
    # YAML makes a number of a name such as 2024; flags take any value as text.
    former = os.path.abspath(str(settings.get("save_dir") or save_dir))
    if former == os.path.abspath(save_dir):
        return dict(settings)
    moved = dict(settings)
    for name in OUTPUTS:
        if settings.get(name):
            path = Path(os.path.abspath(str(settings[name])))
            inside = path.relative_to(former) if path.is_relative_to(former) else path.name
            moved[name] = str(Path(save_dir) / inside)
    return moved


def _check_depth(events: Any) -> None:
    """Raise ValueError for YAML that is nested deeply or refers to parts of itself, before anything
    is built of it."""
    depth = 0
    for event in events:
        # A few lines of aliases to aliases make a value of any size.
        if "anchor" in vars(event) and event.anchor is not None:
            raise ValueError("anchors and aliases are not supported")
        depth += type(event).__name__.endswith("StartEvent") - type(event).__name__.endswith("EndEvent")
        if depth > DEPTH:
            raise ValueError(f"nested deeper than {DEPTH} levels")


def _check_setting(path: str | Path, name: object, value: object) -> None:
    """Raise UserError unless *value* is a number,
    text, a switch, or a flat list or dict of such."""
    simple = (str, int, float, bool, type(None))
    items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    if not isinstance(name, str) or not all(isinstance(item, simple) for item in items):
        raise UserError(
            f"--config {path}: {shortened(name)}: expected a number, text, true, false, or a flat list or dict of "
            f"them, found {type(value).__name__}"
        )
