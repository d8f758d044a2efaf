"""Notes among a model's settings and parameters, for encoders and for causal models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq.config import flag
from fairseq.data.note_words import NOTES, NoteWords
from fairseq.errors import UserError
from fairseq.modules.notes import NoteDictionary

OWN = ("notes.", "note_projection.")
"""First parts of the names of what a model has only while it has notes."""


@dataclass(frozen=True)
class NoteConfig:
    """Settings of notes."""

    note_lambda: float = flag(0.5, "weight of a note in the input of a rare word", above=0, below=1)
    note_gamma: float = flag(0.1, "weight of an update's notes in the table", above=0, below=1)
    note_half_window: int = flag(16, "tokens on either side of a word that its note averages", low=0)
    note_read_window: bool = flag(False, "notes also read by --note-half-window tokens around the word")


def words_of(task: Any, flag: str) -> NoteWords:
    """The rare words of *task*.

    Raises:
        UserError: it has none; the message names *flag*.
    """
    words = getattr(task, "note_words", None)
    if words is None:
        raise UserError(
            f"{flag}: needs {NOTES} of a data folder made by fairseq-preprocess --notes, and --task tnf_masked_lm "
            "for an encoder"
        )
    return words


def notes_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of *parameters* that belong to notes."""
    return {name: value for name, value in parameters.items() if name.startswith(OWN)}


def without_notes(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of *parameters* that do not belong to notes."""
    return {name: value for name, value in parameters.items() if not name.startswith(OWN)}


def check_words(notes: NoteDictionary, parameters: Mapping[str, Tensor]) -> None:
    """See that a checkpoint's *parameters* hold notes of the same words.

    Raises:
        UserError: they hold notes of other words.
    """
    stored = parameters.get("notes.digest")
    if stored is not None and not torch.equal(stored.cpu(), notes.digest.cpu()):
        raise UserError(
            f"{NOTES}: has other words than those that the checkpoint's notes were taken for; use the data folder it "
            "was trained with"
        )
