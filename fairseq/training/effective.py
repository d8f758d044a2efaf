"""The effective settings of a run: in its log, and in a file that ``--config`` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairseq.config import shown
from fairseq.files import atomic_file
from fairseq.settings import TrainingSettings

SETTINGS_FILE = "settings.yaml"


def effective(settings: TrainingSettings) -> dict[str, Any]:
    """The settings by flag name with underscores, sorted; without the data folder and what Python objects have."""
    plain = (bool, int, float, str, list, tuple)
    given = vars(settings.namespace)
    found = {name: value for name, value in given.items() if value is None or isinstance(value, plain)}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in sorted(found.items()) if name != "data"}


def describe(settings: TrainingSettings) -> str:
    """The data folder and the settings that are not empty, as one line."""
    values = {name: value for name, value in effective(settings).items() if value not in (None, False, "", [])}
    return ", ".join([f"data={settings.data_path}", *(f"{name}={shown(value)}" for name, value in values.items())])


def write_settings(settings: TrainingSettings, path: Path) -> None:
    """Write the settings to the YAML file at *path*."""
    import yaml

    with atomic_file(path) as file:
        text = yaml.safe_dump(effective(settings), sort_keys=True, allow_unicode=True)
        file.write(f"# Settings of a run on {settings.data_path}; use: --config {path.name}\n{text}".encode())
