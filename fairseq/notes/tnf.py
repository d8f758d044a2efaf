"""Taking Notes on the Fly: an encoder that reads notes
of rare words and takes new ones (Wu et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fairseq.config.fields import typed
from fairseq.errors import UserError
from fairseq.models.bert import BertModel
from fairseq.models.electra import ElectraModel
from fairseq.notes.dictionary import NoteDictionary, generator_apart
from fairseq.notes.extension import (
    KEEP,
    NotedModel,
    dictionary_settings,
    give_notes,
    without_notes,
    words_of,
)
from fairseq.notes.settings import PREFIX, EncoderNoteConfig, TNFBertConfig, TNFElectraConfig
from fairseq.tasks.sentence_prediction import SentencePredictionTask


class NotedEncoder(NotedModel):
    """An encoder with notes."""

    encoder_class: ClassVar[Any]
    """Called as ``encoder(src_tokens, infuse=…, …)``, where *infuse* is a function of the summed
    embeddings [B, T, E]; it returns a pair of which the second holds ``hidden``, its last hidden
    states [B, T, C]."""
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
    def readers_of(args: object) -> dict[str, object]:
        """Arguments of ``forward`` that say which networks
        of an encoder with settings *args* read notes."""
        return {}

    @classmethod
    def strip_for_inference(
        cls, args: Mapping[str, Any], parameters: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Return settings and parameters of the encoder without notes, unless *args* keep them.

        Raises:
            UserError: the architecture does not name its encoder's.
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


class TNFBert(NotedEncoder):
    """BERT with notes."""

    config_class = TNFBertConfig
    encoder_class = BertModel
    decisive_settings = (*BertModel.decisive_settings, *NotedEncoder.decisive_settings)


class TNFElectra(NotedEncoder):
    """ELECTRA with notes.

    Generator and discriminator share their embeddings, but the generator alone reads notes, unless
    both are to; notes are taken from the discriminator, which is the finished model.
    """

    config_class = TNFElectraConfig
    encoder_class = ElectraModel
    decisive_settings = (*ElectraModel.decisive_settings, *NotedEncoder.decisive_settings, "note_readers")

    @staticmethod
    def readers_of(args: Any) -> dict[str, object]:
        return {"infuse_generator_only": typed(TNFElectraConfig, args).note_readers == "generator"}


def _projection(dim: int, embed_dim: int) -> nn.Linear | None:
    """Projection from notes to embeddings;
    its initialization leaves the global generator unchanged."""
    if embed_dim == dim:
        return None
    projection = nn.utils.skip_init(nn.Linear, dim, embed_dim, bias=False)
    with torch.no_grad():
        # Keeps the variance of a note: each output is a sum of C products.
        projection.weight.normal_(0, dim**-0.5, generator=generator_apart("projection"))
    return projection
