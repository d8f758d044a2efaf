"""Taking Notes on the Fly: an encoder that reads notes of rare words and takes new ones (Wu et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fairseq.config.fields import flag, typed
from fairseq.config.registry import register_model
from fairseq.errors import UserError
from fairseq.models.bert import BertConfig, BertModel
from fairseq.models.electra import ElectraConfig, ElectraModel
from fairseq.notes.dictionary import NoteDictionary, generator_apart
from fairseq.notes.extension import (
    KEEP,
    EncoderNoteConfig,
    NoteHolder,
    dictionary_settings,
    notes_of,
    without_notes,
    words_of,
)
from fairseq.tasks.sentence_prediction import SentencePredictionTask

PREFIX = "tnf_"
"""Prefix of architectures and tasks with notes; the rest is the name without notes."""


class NotedModel(NoteHolder):
    """An encoder with notes; :func:`with_notes` mixes it into the class of an encoder.

    Parameters, optimizer state and checkpoints differ from those without notes only by the names ``notes.…`` and
    ``note_projection.…``.

    Attributes:
        notes: note dictionary of width C.
        note_projection: projection of notes to the width of embeddings, if that is another; dropped with the notes.
        padding_idx: id of the padding symbol.
        readers: arguments of the encoder that say which of its networks read notes.
    """

    encoder_class: ClassVar[Any]
    """Called as ``encoder(src_tokens, infuse=…, …)``, where *infuse* is a function of the summed embeddings [B, T, E];
    it returns a pair of which the second holds ``hidden``, its last hidden states [B, T, C]."""
    decisive_settings: tuple[str, ...] = ("note_lambda", "note_form", "note_read_window")
    predicts_next_token = False
    note_projection: nn.Linear | None
    padding_idx: int
    readers: Mapping[str, Any]

    def upgrade_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the parameters of the encoder; keep the notes'."""
        return {**notes_of(state), **super().upgrade_state_dict(without_notes(state))}

    def forward(
        self,
        src_tokens: Tensor,
        spans: Tensor | None = None,
        longest_span: int | None = None,
        **inputs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Run the encoder with notes at rare words.

        Args:
            src_tokens: int64 [B, T], padded on the right.
            spans: occurrences of rare words that may read their notes, int64 [S, 4] (row, first token, end, word);
                None: no notes are read or taken.
            longest_span: most tokens of a span; None: computed from the spans, which synchronises a GPU.
            inputs: further arguments of the encoder.

        Returns:
            The output of the encoder, with ``notes`` in its extra: sums and counts of
            :meth:`~fairseq.notes.dictionary.NoteDictionary.take`.
        """
        if spans is None:
            if self.note_projection is None:
                return super().forward(src_tokens, **inputs)
            # A rank without a batch must reduce the projection's gradient, too: the graph is as without rare words.
            spans = src_tokens.new_empty(0, 4)

        def infuse(x: Tensor) -> Tensor:
            return self.notes.read(x, spans, longest_span, self.note_projection)

        output, extra = super().forward(src_tokens, infuse=infuse, **self.readers, **inputs)
        # The last token that is not padding, not their number: the text itself may contain the padding symbol.
        end = torch.arange(1, src_tokens.size(1) + 1, device=src_tokens.device)
        lengths = (src_tokens.ne(self.padding_idx) * end).amax(1)
        return output, {**extra, "notes": self.notes.take(extra["hidden"], spans, lengths, longest_span)}

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
class TNFBert(NotedModel):
    """BERT with notes."""

    encoder_class = BertModel
    decisive_settings = (*BertModel.decisive_settings, *NotedModel.decisive_settings)

    @classmethod
    def build_model(cls, args: TNFBertConfig, task: Any) -> NotedModel:
        return with_notes(cls, args, task)


@register_model("tnf_electra", dataclass=TNFElectraConfig)
class TNFElectra(NotedModel):
    """ELECTRA with notes.

    Generator and discriminator share their embeddings, but the generator alone reads notes, unless both are to; notes
    are taken from the discriminator, which is the finished model.
    """

    encoder_class = ElectraModel
    decisive_settings = (*ElectraModel.decisive_settings, *NotedModel.decisive_settings, "note_readers")

    @classmethod
    def upgrade_settings(cls, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        # Before there was this setting, both networks read notes.
        return {"note_readers": "both", **stored} if "note_lambda" in stored else stored

    @classmethod
    def build_model(cls, args: TNFElectraConfig, task: Any) -> NotedModel:
        generator_only = typed(TNFElectraConfig, args).note_readers == "generator"
        return with_notes(cls, args, task, {"infuse_generator_only": generator_only})


def with_notes(
    cls: type[NotedModel],
    args: EncoderNoteConfig,
    task: Any,
    readers: Mapping[str, Any] = MappingProxyType({}),
) -> NotedModel:
    """Return an encoder with a note for each rare word of *task*, read by the networks that *readers* say.

    Raises:
        UserError: the task has no rare words.
    """
    arch = task.settings.chosen.arch
    if isinstance(task, SentencePredictionTask):
        raise UserError(f"`arch` {arch}: fine-tuning drops notes; use `arch` {arch.removeprefix(PREFIX)}")
    words = words_of(task, f"`arch` {arch}")
    model: Any = cls.encoder_class.build_model(args, task)
    # Mixed in and not wrapped around, so that parameters keep the names of the encoder.
    model.__class__ = type(cls.__name__, (cls, type(model)), {"__module__": cls.__module__})
    cfg = typed(EncoderNoteConfig, args)
    dim = model.cfg.encoder_embed_dim
    model.notes = NoteDictionary(len(words), dim, **dictionary_settings(cfg), read_window=cfg.note_read_window)
    model.notes.name_words(words.words)
    model.note_projection = _projection(dim, model.cfg.encoder_input_dim or dim)
    model.padding_idx, model.readers = task.source_dictionary.pad(), dict(readers)
    return model


def _projection(dim: int, embed_dim: int) -> nn.Linear | None:
    """Projection from notes to embeddings; its initialization leaves the global generator unchanged."""
    if embed_dim == dim:
        return None
    projection = nn.utils.skip_init(nn.Linear, dim, embed_dim, bias=False)
    with torch.no_grad():
        # Keeps the variance of a note: each output is a sum of C products.
        projection.weight.normal_(0, dim**-0.5, generator=generator_apart("projection"))
    return projection
