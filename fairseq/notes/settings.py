"""Settings of notes, and the architectures of encoders with them. Nothing here imports torch:
command lines are parsed without it."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import Config, flag
from fairseq.config.shared import LanguageModelingTaskConfig
from fairseq.errors import SettingError
from fairseq.models.architectures.bert import BERT, ELECTRA
from fairseq.models.encoder_settings import BertConfig, ElectraConfig
from fairseq.models.recipes import OBJECTIVES, TNF
from fairseq.tasks.settings import MaskedLMTaskConfig

NAME = "notes"
FORMS = ("literal", "centred")
PREFIX = "tnf_"
"""Prefix of architectures and tasks with notes; the rest is the name without notes."""
SIZES = ("bert", "bert_base", "bert_small", "bert_tiny", "electra", "electra_base", "electra_small", "electra_tiny")
# Encoders with notes have the sizes, recipes and objectives of encoders without.
TNF_BERT = {PREFIX + name: BERT[name] for name in SIZES if name in BERT}
TNF_ELECTRA = {PREFIX + name: ELECTRA[name] for name in SIZES if name in ELECTRA}
TNF_RECIPES = {PREFIX + name: TNF for name in ("bert", "electra")}
TNF_OBJECTIVES = {PREFIX + name: (PREFIX + OBJECTIVES[name][0], OBJECTIVES[name][1]) for name in ("bert", "electra")}


@dataclass(frozen=True)
class NoteConfig(Config):
    """Settings of notes."""

    note_lambda: float = flag(0.5, "weight of a note in the input of a rare word", low=0, high=1)
    note_gamma: float = flag(0.1, "weight of an update's notes in the table", low=0, high=1)
    note_half_window: int = flag(16, "tokens on either side of a word that its note averages", low=0)
    note_context: bool = flag(False, "notes average the tokens around their word, without its own")
    note_form: str = flag(
        "literal", "notes as they are (the paper's), or centred and scaled to embeddings", choices=FORMS
    )
    note_until: int | None = flag(None, "last update that reads or takes notes (default: all)", low=1)

    def check(self) -> None:
        if self.note_context and self.note_half_window == 0:
            raise SettingError("`note_half_window` 0: must be at least 1 with `note_context`")
        super().check()


@dataclass(frozen=True)
class EncoderNoteConfig(NoteConfig):
    """Settings of notes in encoders."""

    note_read_window: bool = flag(False, "notes also read by `note_half_window` tokens around the word")


@dataclass(frozen=True)
class CausalNoteConfig(NoteConfig):
    """Settings of notes in causal models."""

    note_half_window: int = flag(16, "previous tokens that a note averages, in addition to its word", low=0)
    notes: bool = flag(False, "notes of rare words, from fairseq-preprocess --notes")

    @staticmethod
    def extends(task: object) -> bool:
        """Return whether *task*, a class or its declaration,
        is language modelling or a kind of it."""
        kinds = getattr(task, "__mro__", [task])
        return any(getattr(kind, "config_class", None) is LanguageModelingTaskConfig for kind in kinds)


@dataclass(frozen=True)
class TNFMaskedLMConfig(MaskedLMTaskConfig):
    """Settings of masked language modelling with notes."""


@dataclass(frozen=True)
class TNFBertConfig(EncoderNoteConfig, BertConfig):
    """Settings of BERT with notes."""


@dataclass(frozen=True)
class TNFElectraConfig(EncoderNoteConfig, ElectraConfig):
    """Settings of ELECTRA with notes."""

    note_readers: str = flag(
        "generator",
        "networks that read notes; a note shows the discriminator that its word is original",
        choices=("both", "generator"),
    )
