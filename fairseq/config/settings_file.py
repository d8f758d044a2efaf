"""Settings in YAML files: every value is text, which is converted as a flag's is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq.errors import UserError, read_failure

NULLS = ("", "~", "null", "Null", "NULL")
OUTPUTS = ("metrics_file", "log_file", "tensorboard_logdir")  # what a run writes beside its checkpoints


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The settings in a ``--config`` file, by name (dashes
    or underscores); UserError if it is no flat mapping."""
    return {name.replace("-", "_"): value for name, value in load_yaml(path, "--config").items()}


def load_yaml(path: str | Path, flag: str) -> dict[str, Any]:
    """The mapping in a YAML file that *flag* names; see :func:`parse_yaml`.

    Raises:
        UserError: the file is missing, no YAML, or no mapping.
    """
    import yaml  # most command lines name no file

    try:
        settings = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{flag} {path}: {read_failure(error)}; give a YAML file of settings") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{flag} {path}: byte offset {error.start}: not UTF-8; convert the file") from None
    except (yaml.YAMLError, RecursionError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = f" at line {line + 1}" if line is not None else ""
        raise UserError(f"{flag} {path}: not valid YAML{where}") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UserError(f"{flag} {path}: expected `name: value` lines, found {type(settings).__name__}")
    return settings


def parse_yaml(text: str) -> Any:
    """The value in YAML *text*: dicts and lists of texts; None for null and for nothing.

    YAML 1.1 would read ``10:20`` as 620 and ``0012`` as 10: only the reader of a setting knows its
    type.
    """
    import yaml

    node = yaml.compose(text, Loader=yaml.BaseLoader)
    return None if node is None else _value(node)


def _value(node: Any) -> Any:
    if node.id == "mapping":
        return {str(_value(key)): _value(value) for key, value in node.value}
    if node.id == "sequence":
        return [_value(item) for item in node.value]
    return None if node.style is None and node.value in NULLS else node.value  # quoted, it is a text


def for_another_run(settings: Mapping[str, Any], save_dir: str) -> dict[str, Any]:
    """*settings* of a run as a run with *save_dir* takes them: what they write beside checkpoints
    lies there, too.

    A file in the first run's checkpoint folder has the same place in the new one, another one its
    name; unchanged for the first run itself, or where *settings* name no checkpoint folder.
    """
    former = os.path.abspath(settings.get("save_dir") or save_dir)
    if former == os.path.abspath(save_dir):
        return dict(settings)
    moved = dict(settings)
    for name in OUTPUTS:
        if settings.get(name):
            path = Path(os.path.abspath(settings[name]))
            inside = path.relative_to(former) if path.is_relative_to(former) else path.name
            moved[name] = str(Path(save_dir) / inside)
    return moved
