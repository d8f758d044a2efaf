"""Transformer-XL: segment-level recurrence with relative
positions (Dai et al. 2019), and the paper's baselines.

The layers' inputs for the last ``mem_len`` tokens go into a segment as memory and come out of it
updated; keys are told apart by their distance, so what was computed in one segment means the same
in the next.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.config.fields import typed
from fairseq.errors import SettingError
from fairseq.models.decoder import Decoder, DecoderModel
from fairseq.models.transformer_xl_settings import BY_DISTANCE, TransformerXLConfig
from fairseq.modules.adaptive_input import AdaptiveInput
from fairseq.modules.attention import Causal, SelfAttention
from fairseq.modules.clustered_softmax import BandOutput, ClusteredSoftmax
from fairseq.modules.dropout import dropout, variational_dropout
from fairseq.modules.linear import lowered
from fairseq.modules.memory import KeyValueCache, Memory, TokenCache
from fairseq.modules.ngram_notes import NGramNotes, WordNotes
from fairseq.modules.positions import distance_sinusoids
from fairseq.modules.relative_attention import (
    AttentionBiases,
    RelativeAttention,
    RelativePositions,
    ShawAttention,
    name_as_layers_own,
)
from fairseq.modules.transformer_layer import EmbeddingHook, TransformerLayer

LARGEST_TABLE = 1 << 20  # distances that get parameters of their own without being asked for
PROJECTION_STD = 0.01  # the authors'


class TransformerXLDecoder(Decoder):
    """The decoder of a Transformer-XL, over V words.

    Args:
        padding_idx: index behind the ends of rows; -1: the vocabulary has no symbol for it.
            Absolute and learned positions count back from the end of a row.
    """

    cfg: TransformerXLConfig
    embed_tokens: AdaptiveInput

    def __init__(self, cfg: TransformerXLConfig, vocabulary: int, padding_idx: int = -1) -> None:
        super().__init__(cfg)
        self.padding_idx = padding_idx
        self.embed_tokens = AdaptiveInput(
            vocabulary,
            None,
            cfg.d_embed or cfg.d_model,
            cfg.div_val,
            cfg.d_model,
            cfg.cutoffs or [],
            # Bands of one width have one projection together, as the authors' have.
            projections="own" if cfg.div_val > 1 else "shared",
        )
        self.embed_scale = math.sqrt(cfg.d_model)
        if cfg.ngram_notes:
            self.ngram_notes = NGramNotes(
                cfg.ngram_notes, cfg.d_model, vocabulary, padding_idx, cfg.ngram_notes_dropout
            )
        if cfg.word_notes:
            self.word_notes = WordNotes(cfg.word_notes, cfg.d_model, vocabulary, cfg.ngram_notes_dropout)
        self._drop = variational_dropout if cfg.variational_dropout else dropout
        shares_biases = cfg.position_encoding == "relative" and not cfg.untie_r
        self.attention_biases = AttentionBiases(cfg.n_head, cfg.head_dim) if shares_biases else None
        self.layers = nn.ModuleList(_layer(cfg) for _ in range(cfg.n_layer))
        if cfg.position_encoding == "learned":
            self.layer_positions = nn.Parameter(torch.empty(cfg.n_layer, cfg.table_length, cfg.d_model))
        self.adaptive_softmax = ClusteredSoftmax(
            self.embed_tokens, tie_weight=cfg.tie_weight, tie_projections=cfg.tied_projections()
        )
        initialise(self)
        if self.attention_biases is not None:
            name_as_layers_own(self, "attention_biases", [f"layers.{i}.self_attn" for i in range(cfg.n_layer)])

    @property
    def segment_length(self) -> int:
        return self.cfg.tokens_per_sample

    @torch.no_grad()
    def new_cache(self, batch: int, longest: int | None = None) -> KeyValueCache:
        if self.cfg.position_encoding not in BY_DISTANCE:
            return TokenCache([], self.segment_length, 0)
        if self.cfg.memory_start == "empty":
            return super().new_cache(batch, longest)
        # Zeros are attended to from the first token on, so that short rows need all their room too.
        cache = super().new_cache(batch)
        zeros = torch.zeros(batch, self.memory_length, self.cfg.d_model, device=self._device())
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            layer.self_attn.fill(layer_cache, layer.attention_input(zeros))  # type: ignore
        cache.length = self.memory_length
        return cache

    def embed(
        self,
        tokens: Tensor,
        cache: KeyValueCache | None = None,
        infuse: EmbeddingHook | None = None,
        document_positions: Tensor | None = None,
    ) -> Tensor:
        # Without a padding symbol, −1 stands behind a row's end: any embedding will do.
        x = self.embed_scale * self.embed_tokens(tokens if self.padding_idx >= 0 else tokens.clamp(min=0))
        if infuse is not None:
            x = infuse(x)
        x = self._add_notes(x, tokens, cache)
        if self.cfg.position_encoding == "absolute":
            x = x + self._sinusoids(tokens.size(1)).flip(0)[self._tokens_behind(tokens)].to(x.dtype)
        return self._drop(lowered(x), self.cfg.dropout, self.training)

    def _first_memory(self, x: Tensor, length: int) -> Memory | None:
        if self.cfg.memory_start == "empty":
            return None
        return [x.new_zeros(x.size(0), length, x.size(2)) for _ in self.layers]

    def _positions(self, count: int | None) -> RelativePositions | None:
        if self.cfg.position_encoding not in BY_DISTANCE:
            return None
        table = None
        if self.cfg.position_encoding == "relative" and count is not None:
            # The authors drop out positions, too, at the rate of the embeddings.
            table = self._drop(self._sinusoids(count)[None], self.cfg.dropout, self.training)[0]
        if self.attention_biases is None:
            return RelativePositions(table)
        return RelativePositions(table, self.attention_biases.r_w_bias, self.attention_biases.r_r_bias)

    def _visible(self, memory_length: int) -> Causal:
        return Causal(memory_length if self.cfg.same_length else None, {})

    def _layer_input(self, number: int, x: Tensor, src_tokens: Tensor) -> Tensor:
        if self.cfg.position_encoding != "learned":
            return x
        # The table's last row belongs to the last token; a segment longer than the table repeats
        # its first row.
        index = (self.layer_positions.size(1) - 1 - self._tokens_behind(src_tokens)).clamp(min=0)
        return x + self.layer_positions[number][index].to(x.dtype)  # (B, T, C)

    def _tokens_behind(self, tokens: Tensor) -> Tensor:
        """The number of tokens behind each of *tokens* in its row, by which the authors number
        positions: [B, T]; padding at the end of a row does not count."""
        is_text = (tokens.flip(1) != self.padding_idx).cumsum(1) > 0
        return (is_text.cumsum(1) - 1).clamp(min=0).flip(1)

    def _output(self, x: Tensor) -> Tensor:
        return self._drop(x, self.cfg.dropout, self.training)

    def _sinusoids(self, count: int) -> Tensor:
        """Sinusoids of the distances count − 1, …, 0: [count, C]."""
        clamp = self.cfg.clamp_len if self.cfg.clamp_len > 0 else None
        return distance_sinusoids(count, self.cfg.d_model, self._device(), clamp)


class TransformerXL(DecoderModel):
    """A Transformer-XL; see :class:`TransformerXLDecoder`."""

    config_class = TransformerXLConfig
    decisive_settings = (
        *("pre_lnorm", "n_head", "position_encoding"),
        *("untie_r", "tie_weight", "tie_projs"),  # a checkpoint has tied parameters under each of their names
    )

    def __init__(self, decoder: TransformerXLDecoder) -> None:
        super().__init__(decoder)
        self.cfg = decoder.cfg
        self.infused_dim = decoder.cfg.d_model

    @classmethod
    def build_model(cls, args: TransformerXLConfig, task: Any) -> TransformerXL:
        """Make the model; the ``max_relative_length``
        of its settings then says how long its tables are."""
        cfg = typed(TransformerXLConfig, args)
        cfg.check_vocabulary(len(task.source_dictionary))
        if cfg.max_relative_length is None and cfg.position_encoding in ("shaw", "learned"):
            cfg = replace(cfg, max_relative_length=cfg.table_length)
            if cfg.table_length > LARGEST_TABLE:
                raise SettingError(
                    f"`mem_len` {cfg.mem_len}: with `position_encoding` {cfg.position_encoding} every distance has "
                    "learned parameters; give `max_relative_length`, beyond which distances count as the farthest"
                )
        dictionary = task.source_dictionary
        decoder = TransformerXLDecoder(cfg, len(dictionary), dictionary.pad())
        decoder.mark_words(dictionary)
        return cls(decoder)

    def check_memory_length(self, length: int) -> None:
        if self.cfg.position_encoding not in BY_DISTANCE:
            super().check_memory_length(length)
        if self.cfg.same_length and not length:
            raise ValueError("memory_length 0: the model's same_length needs memory; use at least 1")

    def upgrade_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """*state*; raise SettingError if its tables
        of positions are longer or shorter than this model's."""
        current = self.state_dict()
        for name, axis in (("decoder.layers.0.self_attn.r_emb", 0), ("decoder.layer_positions", 1)):
            if name in current and name in state and state[name].shape[axis] != current[name].shape[axis]:
                rows = state[name].shape[axis]
                raise SettingError(
                    f"`max_relative_length` {current[name].shape[axis]}: the checkpoint's tables of positions have "
                    f"{rows} rows; give `max_relative_length` {rows}"
                )
        return state


@torch.no_grad()
def initialise(decoder: TransformerXLDecoder) -> None:
    """The authors' initial values: N(0, init_std²),
    projections N(0, 0.01²), gains N(1, init_std²), biases 0."""
    bands = range(len(decoder.embed_tokens.bounds) - 1)
    # By identity: the parts give their tensors, not the names that these have in the decoder.
    projections = {id(p) for band in bands for p in decoder.embed_tokens.weights_for_band(band)[1:]}
    projections |= {id(m.projection) for m in decoder.modules() if isinstance(m, BandOutput)}
    std = decoder.cfg.init_std
    for name, parameter in decoder.named_parameters():
        if name.endswith("layer_norm.weight"):
            nn.init.normal_(parameter, 1.0, std)
        # `r_bias` is [rows, heads], and yet a bias.
        elif parameter.dim() == 1 or name.endswith("self_attn.r_bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, 0.0, PROJECTION_STD if id(parameter) in projections else std)


def _layer(cfg: TransformerXLConfig) -> TransformerLayer:
    attention: SelfAttention
    if cfg.position_encoding == "relative":
        attention = RelativeAttention(
            cfg.d_model, cfg.n_head, cfg.dropatt, head_dim=cfg.head_dim, own_biases=cfg.untie_r
        )
    elif cfg.position_encoding == "shaw":
        attention = ShawAttention(cfg.d_model, cfg.n_head, cfg.dropatt, head_dim=cfg.head_dim, count=cfg.table_length)
    else:
        attention = SelfAttention(cfg.d_model, cfg.n_head, cfg.dropatt, head_dim=cfg.head_dim, bias=False)
    return TransformerLayer(
        attention,
        cfg.d_model,
        cfg.d_inner,
        dropout=cfg.dropout,
        # The authors have one rate for everything in a layer but the attention weights.
        activation_dropout=cfg.dropout,
        normalize_before=cfg.pre_lnorm,
        apex=not cfg.no_apex,
        remember_input=True,
        variational=cfg.variational_dropout,
    )
