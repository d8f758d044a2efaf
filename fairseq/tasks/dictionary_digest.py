"""The dictionary of a checkpoint: its digest,
and its comparison with the dictionary of a run or a command."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fairseq.checkpoint.manager import DICTIONARY
from fairseq.errors import UserError
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.dictionary import Dictionary

KEY = "dictionary"  # of a checkpoint
ADVICE = "use the data or dict.txt it was trained with"


def dictionary_of(task: FairseqTask) -> Dictionary | None:
    """Return the dictionary of *task*; None if it has none of its own."""
    try:
        dictionary = task.source_dictionary
    # `source_dictionary` of the base class: a task need not have one.
    except NotImplementedError:
        return None
    return dictionary if isinstance(dictionary, Dictionary) else None


def stored_digest(state: Mapping[str, object], path: str | Path) -> str | None:
    """Return the digest of the dictionary that the checkpoint *state*, read from *path*, was
    trained with, or None.

    Checkpoints of earlier versions and of fairseq have none; theirs is the digest of the
    ``dict.txt`` beside them.
    """
    if state.get(KEY) is not None:
        return str(state[KEY])
    # The first choice is the digest in the checkpoint: the file beside it may have been replaced.
    beside = Path(path).parent / DICTIONARY
    return Dictionary.load(beside).digest() if os.path.isfile(beside) else None


def check_dictionary(state: Mapping[str, object], path: str | Path, dictionary: Dictionary | None) -> None:
    """Raise UserError if the checkpoint *state*,
    read from *path*, was trained with another dictionary."""
    if dictionary is None:
        return
    stored = stored_digest(state, path)
    if stored is not None and not dictionary.has_digest(stored):
        raise UserError(f"{path}: was trained with another dictionary than {dictionary.path or 'the data'}; {ADVICE}")


def check_save_dir(folder: str | Path, dictionary: Dictionary | None) -> None:
    """Raise UserError if *folder* has checkpoints beside
    another ``dict.txt``, which a run must not replace."""
    path = Path(folder) / DICTIONARY
    # Without checkpoints the file is what an earlier attempt left behind, and may be replaced.
    if dictionary is None or not os.path.isfile(path) or not any(Path(folder).glob("checkpoint*.pt")):
        return
    beside = Dictionary.load(path)
    # The task may have added symbols, which are in no file.
    read = dictionary if dictionary.path is None else Dictionary.load(dictionary.path)
    if beside.digest() not in (dictionary.digest(), read.digest()):
        raise UserError(
            f"`save_dir` {folder}: has checkpoints of another dictionary than {dictionary.path or 'the data'}; "
            "choose another folder or the data of these checkpoints"
        )
