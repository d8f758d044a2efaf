"""Settings and parameters of notes, for encoders and causal models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq.config.fields import Config, flag
from fairseq.errors import UserError
from fairseq.notes.dictionary import FORMS, NoteDictionary
from fairseq.notes.words import NOTES

KEEP = "keep_notes"
"""Name of the setting that keeps notes in a model that is loaded."""
OWN = ("notes.", "note_projection.")
"""Prefixes of parameter and buffer names that belong to notes."""


@dataclass(frozen=True)
class NoteConfig(Config):
    """Settings of notes."""

    note_lambda: float = flag(0.5, "weight of a note in the input of a rare word", above=0, below=1, python=(0, 1))
    note_gamma: float = flag(0.1, "weight of an update's notes in the table", above=0, below=1, python=(0, 1))
    note_half_window: int = flag(16, "tokens on either side of a word that its note averages", low=0)
    note_form: str = flag(
        "literal", "notes as they are (the paper's), or centred and scaled to embeddings", choices=FORMS
    )
    note_until: int | None = flag(None, "last update that reads or takes notes (default: all)", low=1)


@dataclass(frozen=True)
class EncoderNoteConfig(NoteConfig):
    """Settings of notes in encoders."""

    note_read_window: bool = flag(False, "notes also read by `note_half_window` tokens around the word")


def dictionary_settings(cfg: NoteConfig) -> dict[str, Any]:
    """The keyword arguments of a note dictionary that *cfg* gives."""
    return {
        "note_lambda": cfg.note_lambda,
        "note_gamma": cfg.note_gamma,
        "note_half_window": cfg.note_half_window,
        "form": cfg.note_form,
        "until": cfg.note_until,
    }


def notes_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The *parameters* that belong to notes."""
    return {name: value for name, value in parameters.items() if name.startswith(OWN)}


def without_notes(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The *parameters* that do not belong to notes."""
    return {name: value for name, value in parameters.items() if not name.startswith(OWN)}


def of_other_words(notes: NoteDictionary, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The notes among *parameters* if they are for other words than *notes*."""
    stored = parameters.get("notes.digest")
    return {} if stored is None or torch.equal(stored.cpu(), notes.digest.cpu()) else notes_of(parameters)


def check_words(notes: NoteDictionary, parameters: Mapping[str, Tensor]) -> None:
    """Check that the notes in *parameters* of a checkpoint are for the words of *notes*.

    Raises:
        UserError: the words differ.
    """
    if of_other_words(notes, parameters):
        raise UserError(
            f"{NOTES}: differs from the words of the notes in the checkpoint; use the data folder it was trained with"
        )
