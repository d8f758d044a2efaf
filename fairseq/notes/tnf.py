"""Taking Notes on the Fly: an encoder that reads notes of rare words and takes new ones (Wu et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fairseq.config.fields import flag, typed
from fairseq.config.registry import ARCHITECTURES, Architecture, register_model
from fairseq.errors import UserError
from fairseq.models.bert import BertConfig, BertModel
from fairseq.models.electra import ElectraConfig, ElectraModel
from fairseq.models.recipes import OBJECTIVES, RECIPES
from fairseq.notes.dictionary import NoteDictionary, generator_apart
from fairseq.notes.extension import (
    KEEP,
    EncoderNoteConfig,
    NotedModel,
    dictionary_settings,
    give_notes,
    without_notes,
    words_of,
)
from fairseq.tasks.sentence_prediction import SentencePredictionTask

PREFIX = "tnf_"
"""Prefix of architectures and tasks with notes; the rest is the name without notes."""
SIZES = ("bert", "bert_base", "bert_small", "bert_tiny", "electra", "electra_base", "electra_small", "electra_tiny")


class NotedEncoder(NotedModel):
    """An encoder with notes."""

    encoder_class: ClassVar[Any]
    """Called as ``encoder(src_tokens, infuse=…, …)``, where *infuse* is a function of the summed embeddings [B, T, E];
    it returns a pair of which the second holds ``hidden``, its last hidden states [B, T, C]."""
    decisive_settings: tuple[str, ...] = ("note_lambda", "note_form", "note_read_window")
    predicts_next_token = False

    @classmethod
    def build_model(cls, args: Any, task: Any) -> NotedEncoder:
        """Make an encoder with a note for each rare word of *task*.

        Raises:
            UserError: the task has no rare words.
        """
        arch = task.settings.chosen.arch
        if isinstance(task, SentencePredictionTask):
            raise UserError(f"`arch` {arch}: fine-tuning drops notes; use `arch` {arch.removeprefix(PREFIX)}")
        words = words_of(task, f"`arch` {arch}")
        model: Any = cls.encoder_class.build_model(args, task)
        cfg = typed(EncoderNoteConfig, args)
        dim = model.cfg.encoder_embed_dim
        notes = NoteDictionary(len(words), dim, **dictionary_settings(cfg), read_window=cfg.note_read_window)
        give_notes(
            model,
            notes.name_words(words.words),
            cls,
            projection=_projection(dim, model.cfg.encoder_input_dim or dim),
            readers=cls.readers_of(args),
            padding_idx=task.source_dictionary.pad(),
        )
        return model

    @staticmethod
    def readers_of(args: Any) -> dict[str, Any]:
        """Arguments of ``forward`` that say which networks of an encoder with settings *args* read notes."""
        return {}

    @classmethod
    def finished(
        cls, args: Mapping[str, Any], parameters: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Return settings and parameters of the encoder without notes, unless *args* keep them.

        Raises:
            UserError: the architecture of a plug-in does not name its encoder's.
        """
        if args.get(KEEP):
            return args, parameters
        arch = str(args.get("arch"))
        if not arch.startswith(PREFIX):
            raise UserError(
                f"`arch` {arch}: unknown architecture without notes; register the model as {PREFIX}NAME, where NAME is "
                "the architecture of its encoder, or give `keep_notes`"
            )
        changed = {name: args[name].removeprefix(PREFIX) for name in ("arch", "task") if name in args}
        return {**args, **changed}, without_notes(parameters)


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


@register_model("tnf_bert", dataclass=TNFBertConfig)
class TNFBert(NotedEncoder):
    """BERT with notes."""

    encoder_class = BertModel
    decisive_settings = (*BertModel.decisive_settings, *NotedEncoder.decisive_settings)


@register_model("tnf_electra", dataclass=TNFElectraConfig)
class TNFElectra(NotedEncoder):
    """ELECTRA with notes.

    Generator and discriminator share their embeddings, but the generator alone reads notes, unless both are to; notes
    are taken from the discriminator, which is the finished model.
    """

    encoder_class = ElectraModel
    decisive_settings = (*ElectraModel.decisive_settings, *NotedEncoder.decisive_settings, "note_readers")

    @classmethod
    def upgrade_settings(cls, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        # Before there was this setting, both networks read notes.
        return {"note_readers": "both", **stored} if "note_lambda" in stored else stored

    @staticmethod
    def readers_of(args: Any) -> dict[str, Any]:
        return {"infuse_generator_only": typed(TNFElectraConfig, args).note_readers == "generator"}


def _projection(dim: int, embed_dim: int) -> nn.Linear | None:
    """Projection from notes to embeddings; its initialization leaves the global generator unchanged."""
    if embed_dim == dim:
        return None
    projection = nn.utils.skip_init(nn.Linear, dim, embed_dim, bias=False)
    with torch.no_grad():
        # Keeps the variance of a note: each output is a sum of C products.
        projection.weight.normal_(0, dim**-0.5, generator=generator_apart("projection"))
    return projection


# The architectures of encoders with notes, with the recipes of encoders without.
for _name in SIZES:
    _model = f"{PREFIX}{_name.split('_')[0]}"
    ARCHITECTURES.register(PREFIX + _name)(Architecture(_model, ARCHITECTURES[_name].complete))

for _name in ("bert", "electra"):
    RECIPES[PREFIX + _name] = RECIPES[_name]
    OBJECTIVES[PREFIX + _name] = (PREFIX + OBJECTIVES[_name][0], OBJECTIVES[_name][1])
