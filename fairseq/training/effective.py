"""The effective settings of a run: in its log, and in a file that ``--config`` takes."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any, cast

from fairseq.checkpoint import CheckpointManager
from fairseq.checkpoint.manager import DICTIONARY, LAST
from fairseq.config.fields import Config, format_value, settings_of
from fairseq.config.settings import RESETS, TrainingSettings
from fairseq.config.settings_file import OUTPUTS
from fairseq.system.files import atomic_file
from fairseq.system.terminal import printable
from fairseq.tasks.dictionary_digest import check_save_dir, dictionary_of
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.dictionary import Dictionary

logger = logging.getLogger(__name__)

SETTINGS_FILE = "settings.yaml"


def plain_settings(settings: TrainingSettings) -> dict[str, Any]:
    """The settings by flag name with underscores, sorted;
    without the data folder and what Python objects have."""
    plain = (bool, int, float, str, list, tuple)
    # Python callers may pass objects, which no YAML file can hold.
    values = {name: value for name, value in settings.flat.items() if value is None or isinstance(value, plain)}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in sorted(values.items()) if name != "data"}


def describe(settings: TrainingSettings) -> str:
    """The data folder and the settings that are not empty, as one line."""
    # A 0 is equal to False, but it is a value.
    empty: tuple[object, ...] = (None, False, "", [])
    values = {
        n: value for n, value in plain_settings(settings).items() if type(value) in (int, float) or value not in empty
    }
    return ", ".join(
        [f"data={settings.data_path}", *(f"{name}={format_value(value)}" for name, value in values.items())]
    )


def record(settings: TrainingSettings, task: FairseqTask, manager: CheckpointManager, has_work: bool) -> None:
    """Log the *settings* of all stages and write them and the dictionary to the checkpoint folder.

    A run that *has_work* to do: another one leaves the file,
    like the checkpoints, as of the last update.
    """
    dictionary = dictionary_of(task)
    if dictionary is not None and dictionary.path is not None:
        check_save_dir(manager.folder, dictionary)
        manager.keep_dictionary(dictionary.path)
        # No checkpoint names the file of codes: the folder of the run has the tokenizer instead.
        if getattr(settings.task, "bpe_codes", None) and not settings.checkpoint.no_save:
            cast(Any, task).encode.tokenizer.save(manager.folder, Dictionary.load(manager.folder / DICTIONARY).symbols)
    # A screenful: in the log file and settings.yaml, not on a terminal.
    logger.info("settings: %s", describe(settings), extra={"only_in_files": True})
    if has_work and not settings.checkpoint.no_save:
        write_settings(settings, manager.folder / SETTINGS_FILE)


def write_settings(settings: TrainingSettings, path: Path) -> None:
    """Write the settings to the YAML file at *path*, which is read in any folder: the run's own
    paths are absolute."""
    import yaml

    values = plain_settings(settings)
    if settings.origins:  # of a command line: without the defaults of fairseq that a plug-in reads and no flag sets
        values = {name: value for name, value in values.items() if name in settings.origins}
    if settings.checkpoint.restore_file == LAST:
        # What this start of the run left out of its checkpoint; a later one goes on with all of it.
        values = {name: value for name, value in values.items() if name not in RESETS.values()}
    values |= {name: os.path.abspath(values[name]) for name in ("save_dir", *OUTPUTS) if values.get(name)}
    with atomic_file(path) as file:
        text = yaml.safe_dump(values, allow_unicode=True)  # libyaml knows no surrogates
        # Names of folders may hold line ends, and bytes that are not UTF-8.
        data = printable("\\n".join(str(settings.data_path).splitlines()))
        content = f"# Settings of a run on {data}; use: --config {path.name}\n{text}"
        file.write(content.encode("utf-8", "backslashreplace"))


def commented_settings(settings: TrainingSettings) -> str:
    """Return a file for ``--config`` with these *settings* and what each of them is; defaults are
    comments."""
    import yaml

    parts = [part for part in (*vars(settings).values(), *settings.extensions.values()) if isinstance(part, Config)]
    helps = {s.name: str(s.metadata["help"]).replace("`", "") for part in parts for s in settings_of(type(part))}
    chosen, open_ = [], []
    for name, value in plain_settings(settings).items():
        if (origin := settings.origins.get(name)) is None:
            continue
        line = f"{name}: {yaml.safe_dump(value, allow_unicode=True, default_flow_style=True, width=math.inf)}"
        line = line.removesuffix("...\n").rstrip() + "\n"
        comment = f"# {helps[name]}\n" if name in helps else ""
        if origin == "default":
            open_.append(f"{comment}# {line}")
        else:
            chosen.append(f"{comment}{line.rstrip()}  # {origin}\n")
    heading = f"# Settings of a run on {printable(str(settings.data_path))}; use: --config FILE\n"
    return "\n".join([heading, *chosen, "# Defaults: remove the # before a name to change one.\n", *open_])
