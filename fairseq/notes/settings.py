"""Settings and parameters of notes, for encoders and causal models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq.config.fields import defaults, flag, flag_name
from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel, FairseqLanguageModel
from fairseq.notes.dictionary import FORMS, CausalNoteDictionary, NoteDictionary
from fairseq.notes.words import NOTES, NoteWords, note_rule

OWN = ("notes.", "note_projection.")
"""Prefixes of parameter and buffer names that belong to notes."""


@dataclass(frozen=True)
class NoteConfig:
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

    note_read_window: bool = flag(False, "notes also read by --note-half-window tokens around the word")


@dataclass(frozen=True)
class CausalNoteConfig(NoteConfig):
    """Settings of notes in causal models."""

    note_half_window: int = flag(16, "tokens before a word that its note averages, besides the word", low=0)
    notes: bool = flag(False, "notes of rare words, from fairseq-preprocess --notes")

    def check_training(self) -> None:
        """Raise UserError for a setting that has no effect without ``--notes``."""
        for name, default in defaults(CausalNoteConfig).items():
            if not self.notes and getattr(self, name) != default:
                raise UserError(f"{flag_name(name)}: has no effect without --notes; add it")


def words_of(task: Any, flag: str) -> NoteWords:
    """The rare words of *task*.

    Raises:
        UserError: the task has none; the message names *flag*.
    """
    words = getattr(task, "note_words", None)
    if words is None:
        raise UserError(
            f"{flag}: needs {NOTES} from fairseq-preprocess --notes in the data folder, and --task tnf_masked_lm "
            "for an encoder"
        )
    return words


def give_notes(model: FairseqLanguageModel, cfg: CausalNoteConfig, task: Any, dim: int) -> None:
    """Give *model* notes for the rare words of *task*, if *cfg* enables them.

    Args:
        model: a causal model.
        cfg: its settings.
        task: with the dictionary, and with the rare words.
        dim: width of embeddings and hidden states.

    Raises:
        UserError: the task has no rare words, or the output has another width.
    """
    if not cfg.notes:
        return
    if getattr(model.decoder, "project_out_dim", None) is not None:
        raise UserError(f"--notes: need an output as wide as the embeddings; use --decoder-output-dim {dim}")
    words = words_of(task, "--notes")
    delay = 0 if note_rule(task.source_dictionary).ends_known else 1
    notes = CausalNoteDictionary(len(words), dim, **dictionary_settings(cfg), delay=delay)
    notes.name_words(words.words)
    model.notes = notes


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


def check_words(model: BaseFairseqModel, parameters: Mapping[str, Tensor]) -> None:
    """Check that the notes in *parameters* of a checkpoint are for the words of *model*.

    Raises:
        UserError: the words differ.
    """
    stored, notes = parameters.get("notes.digest"), getattr(model, "notes", None)
    if stored is not None and isinstance(notes, NoteDictionary) and not torch.equal(stored.cpu(), notes.digest.cpu()):
        raise UserError(
            f"{NOTES}: differs from the words of the notes in the checkpoint; use the data folder it was trained with"
        )
