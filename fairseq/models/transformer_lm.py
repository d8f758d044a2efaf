"""Transformer language models: the Baevski & Auli baseline and the Shortformer, one decoder.

With ``position_infused_attention`` positions leave the bottom of the network and enter queries and
keys of every layer; with ``tokens_from_prev`` a layer also attends to its cached inputs of previous
tokens (Press et al. 2021, §5).
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.config.fields import typed
from fairseq.dataclass import extendable
from fairseq.errors import SettingError
from fairseq.models.architectures.transformer_lm import PLAIN
from fairseq.models.decoder import Decoder, DecoderModel
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.modules.adaptive_input import AdaptiveInput, bare_linear, word_embedding
from fairseq.modules.adaptive_softmax import AdaptiveSoftmax
from fairseq.modules.attention import Causal, PositionInfusedAttention, RotaryAttention, SelfAttention
from fairseq.modules.dropout import dropout
from fairseq.modules.linear import lowered
from fairseq.modules.memory import KeyValueCache
from fairseq.modules.ngram_notes import NGramNotes, WordNotes
from fairseq.modules.norms import layer_norm
from fairseq.modules.output_layer import LinearOutput
from fairseq.modules.positions import LearnedPositions, Rotation, SinusoidalPositions, TokenShift, sinusoids
from fairseq.modules.transformer_layer import EmbeddingHook, TransformerLayer, skips_layer
from fairseq.system.deferred import names_of


class TransformerDecoder(Decoder):
    """The decoder of the baseline and of the Shortformer, over V words.

    Args:
        padding_idx: index of the padding symbol; -1: there is none.
        embed_tokens: embeddings to use instead of new ones.
    """

    cfg: TransformerLMConfig
    adaptive_softmax: AdaptiveSoftmax | None
    output_projection: LinearOutput | None

    def __init__(
        self, cfg: TransformerLMConfig, vocabulary: int, padding_idx: int, embed_tokens: nn.Module | None = None
    ) -> None:
        super().__init__(cfg)
        dim = cfg.decoder_embed_dim
        input_dim = cfg.decoder_input_dim or dim
        output_dim = cfg.decoder_output_dim or dim
        self.infused, self.rotation = cfg.position_infused_attention, _rotation(cfg)
        self.first_position = padding_idx + 1
        # A marker that fairseq's checkpoints have; they load strictly.
        self.register_buffer("version", torch.tensor([3.0]))

        padding = padding_idx if padding_idx >= 0 else None
        if embed_tokens is not None:
            self.embed_tokens = embed_tokens
        elif cfg.adaptive_input:
            cutoffs = cfg.adaptive_input_cutoff or []
            self.embed_tokens = AdaptiveInput(
                vocabulary,
                padding,
                input_dim,
                cfg.adaptive_input_factor,
                dim,
                cutoffs,
                init_std=cfg.embed_init_std,
            )
        else:
            self.embed_tokens = word_embedding(vocabulary, input_dim, padding, cfg.embed_init_std)
        # Vaswani et al. 2017, §3.4. Sinusoids have the norm √(C/2), beside which vectors of norm 1
        # would be lost.
        self.embed_scale = 1.0 if cfg.no_scale_embedding else math.sqrt(dim)
        widen = input_dim != dim and not cfg.adaptive_input
        self.project_in_dim = bare_linear(input_dim, dim) if widen else None
        self.embed_positions: SinusoidalPositions | LearnedPositions | None = None
        if cfg.decoder_learned_pos and not cfg.no_token_positional_embeddings:
            self.embed_positions = LearnedPositions(self.max_positions(), dim, padding_idx)
        elif not cfg.no_token_positional_embeddings and self.rotation is None:
            self.embed_positions = SinusoidalPositions(dim, padding_idx)
        if cfg.ngram_notes:
            self.ngram_notes = NGramNotes(cfg.ngram_notes, dim, vocabulary, padding_idx, cfg.ngram_notes_dropout)
        if cfg.word_notes:
            self.word_notes = WordNotes(cfg.word_notes, dim, vocabulary, cfg.ngram_notes_dropout)
        self.token_shift = TokenShift(dim, cfg.token_shift) if cfg.token_shift else None
        self.layernorm_embedding = _norm(cfg) if cfg.layernorm_embedding else None
        layers = cfg.decoder_layers if cfg.decoder_layers_to_keep is None else len(cfg.decoder_layers_to_keep)
        self.layers = nn.ModuleList(_layer(cfg) for _ in range(layers))
        # With pre-norm the last layer gives a sum
        # that no norm has seen; post-norm layers end in a norm.
        final_norm = cfg.decoder_normalize_before and not cfg.no_decoder_final_norm
        self.layer_norm = _norm(cfg) if final_norm else None
        needs_projection = output_dim != dim and not cfg.tie_adaptive_weights
        self.project_out_dim = bare_linear(dim, output_dim) if needs_projection else None

        if cfg.adaptive_softmax_cutoff is not None:
            self.adaptive_softmax = AdaptiveSoftmax(
                vocabulary,
                output_dim if not cfg.tie_adaptive_weights else dim,
                cfg.adaptive_softmax_cutoff,
                dropout=cfg.adaptive_softmax_dropout,
                factor=cfg.adaptive_softmax_factor,
                adaptive_inputs=self.embed_tokens if cfg.tie_adaptive_weights else None,  # type: ignore[arg-type]
                tie_proj=cfg.tie_adaptive_proj,
            )
        elif cfg.share_decoder_input_output_embed:
            self.output_projection = LinearOutput(self.embed_tokens.weight)  # type: ignore[arg-type]
        else:
            weight = nn.Parameter(torch.empty(vocabulary, output_dim))
            nn.init.normal_(weight, std=output_dim**-0.5)
            self.output_projection = LinearOutput(weight)

    def max_positions(self) -> int:
        return self.cfg.max_target_positions or self.cfg.tokens_per_sample

    @property
    def segment_length(self) -> int:
        # Positions from the start of a row limit it;
        # those in queries and keys start anew with each block.
        return self.cfg.tokens_per_sample if self.infused or self.memory_length else self.max_positions()

    def embed(
        self,
        tokens: Tensor,
        cache: KeyValueCache | None = None,
        infuse: EmbeddingHook | None = None,
        document_positions: Tensor | None = None,
    ) -> Tensor:
        # Without a padding symbol, −1 stands behind a row's end: any embedding will do.
        x = self.embed_scale * self.embed_tokens(tokens if self.first_position else tokens.clamp(min=0))
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if self.embed_positions is not None and not self.infused:
            of_positions = self.embed_positions(tokens.size(1), cache.length if cache else 0)
            if document_positions is not None:
                of_positions = F.embedding(document_positions, of_positions)
            x = x + of_positions.to(x.dtype)
        if infuse is not None:
            x = infuse(x)
        x = self._add_notes(x, tokens, cache, document_positions)
        if self.token_shift is not None:
            x, before = self.token_shift(x, cache.before if cache else None, document_positions)
            if cache is not None:
                cache.before = before
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        return dropout(lowered(x), self.cfg.dropout, self.training)

    def _positions(self, count: int | None) -> Tensor | None:
        """Rotations, [count, 2, R/2]; or sinusoids, numbered as everywhere in fairseq from
        ``padding_idx + 1``: [count, C]."""
        if count is not None and self.rotation is not None:
            return self.rotation.table(count, self._device())
        if not self.infused or count is None:
            return None
        return sinusoids(count, self.cfg.decoder_embed_dim, self._device(), self.first_position)

    def _document_positions(self, positions: Tensor | None, document_positions: Tensor) -> Tensor | None:
        # Rotations depend on distances alone.
        return F.embedding(document_positions, positions) if self.infused and positions is not None else positions

    def _visible(self, memory_length: int) -> Causal:
        return Causal(self.cfg.attention_window, {})

    def _skips_layer(self) -> bool:
        return skips_layer(self.cfg.decoder_layerdrop, self.training)

    def _output(self, x: Tensor) -> Tensor:
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return x if self.project_out_dim is None else self.project_out_dim(x)


def _rotation(cfg: TransformerLMConfig) -> Rotation | None:
    """The rotary positions of a head; None without them."""
    if not cfg.rotary_fraction:
        return None
    return Rotation(cfg.rotary_channels, cfg.rotary_base, cfg.rotary_scaling, cfg.rotary_trained_positions)


def _norm(cfg: TransformerLMConfig) -> nn.Module:
    """A norm of hidden states."""
    bias = cfg.decoder_biases == "all"
    return layer_norm(cfg.decoder_embed_dim, not cfg.no_apex, cfg.decoder_norm_eps, cfg.decoder_norm, bias)


def _layer(cfg: TransformerLMConfig) -> TransformerLayer:
    """A layer."""
    attention = _attention_class(cfg)(
        cfg.decoder_embed_dim,
        cfg.decoder_attention_heads,
        cfg.attention_dropout,
        kv_heads=cfg.decoder_kv_heads,
        bias=cfg.decoder_biases != "none",
        out_bias=cfg.decoder_biases == "all",
        qk_norm=cfg.qk_norm,
    )
    layer = TransformerLayer(
        attention,
        cfg.decoder_embed_dim,
        cfg.decoder_ffn_embed_dim,
        dropout=cfg.dropout,
        activation_dropout=cfg.activation_dropout,
        activation_fn=cfg.activation_fn,
        normalize_before=cfg.decoder_normalize_before,
        apex=not cfg.no_apex,
        layer_norm_eps=cfg.decoder_norm_eps,
        norm=cfg.decoder_norm,
        bias=cfg.decoder_biases == "all",
        gated=cfg.decoder_gated_ffn,
        parallel=cfg.decoder_parallel_residual,
    )
    # Each layer begins as the identity (Zhang et al. 2019, "Fixup").
    if cfg.zero_init_residual:
        for projection in (attention.out_proj, layer.fc2):
            nn.init.zeros_(projection.weight)
    return layer


def _attention_class(cfg: TransformerLMConfig) -> type[SelfAttention]:
    if cfg.rotary_fraction:
        return RotaryAttention
    return PositionInfusedAttention if cfg.position_infused_attention else SelfAttention


class TransformerLanguageModel(DecoderModel):
    """A transformer language model; see :class:`TransformerDecoder`, and :class:`DecoderModel` for
    other decoders."""

    config_class = TransformerLMConfig
    decisive_settings = (
        "decoder_normalize_before",
        "decoder_attention_heads",
        "activation_fn",
        "no_scale_embedding",
        "no_token_positional_embeddings",
        "share_decoder_input_output_embed",
        "tie_adaptive_proj",
        "position_infused_attention",
        "qk_norm",
        "decoder_norm",
        "decoder_norm_eps",
        "decoder_parallel_residual",
        "rotary_fraction",
        "rotary_base",
        "rotary_scaling",
        "rotary_trained_positions",
        "attention_window",
    )

    def __init__(self, decoder: Any) -> None:
        super().__init__(decoder)
        if isinstance(decoder, TransformerDecoder):
            self.cfg = decoder.cfg
            self.infused_dim = decoder.cfg.decoder_embed_dim
            self.reads_documents = not decoder.memory_length
            self.skips_parameters = decoder.cfg.decoder_layerdrop > 0

    @classmethod
    def build_embedding(cls, args: object, dictionary: Any, embed_dim: int, path: object = None) -> nn.Embedding:
        """Embeddings of the words of *dictionary*, which plug-ins make their decoders of."""
        return word_embedding(len(dictionary), embed_dim, dictionary.pad())

    @classmethod
    def build_model(cls, args: TransformerLMConfig, task: Any) -> TransformerLanguageModel:
        cfg = typed(TransformerLMConfig, args)
        cfg.check_vocabulary(len(task.source_dictionary))
        dictionary = task.source_dictionary
        decoder = TransformerDecoder(cfg, len(dictionary), dictionary.pad())
        decoder.mark_words(dictionary)
        return cls(decoder)

    def check_memory_length(self, length: int) -> None:
        # A cache of any length will do: positions are given to it anew with each segment.
        if not self.memory_length:
            super().check_memory_length(length)

    def upgrade_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Names and markers of fairseq's several versions, as this one has them."""
        if not isinstance(self.decoder, TransformerDecoder):
            return super().upgrade_state_dict(state)
        state = dict(state)
        current = self.state_dict()
        # The name in fairseq 0.9.
        if "decoder.embed_out" in state:
            state["decoder.output_projection.weight"] = state.pop("decoder.embed_out")
        shared = self.cfg.share_decoder_input_output_embed and not self.cfg.adaptive_softmax_cutoff
        # fairseq stores a tied matrix under both names from some version on.
        if shared and "decoder.embed_tokens.weight" in state:
            state.setdefault("decoder.output_projection.weight", state["decoder.embed_tokens.weight"])
        # Markers say nothing that the model needs,
        # and fairseq's versions differ in which they store.
        for name in [*current, *state]:
            if name.rsplit(".", 1)[-1] in ("version", "_float_tensor"):
                if name in current:
                    state.setdefault(name, current[name])
                else:
                    state.pop(name, None)
        if self.cfg.decoder_layers_to_keep is not None:
            return _pruned(state, self.cfg.decoder_layers_to_keep)
        return state


def _pruned(state: dict[str, Tensor], keep: list[int]) -> dict[str, Tensor]:
    """*state* with the decoder's layers *keep* only, numbered from 0: LayerDrop's pruning (Fan et
    al. 2020, §3.2)."""
    layered = [(name, match) for name in state if (match := re.match(r"decoder\.layers\.(\d+)(\..+)", name))]
    layers = {int(match[1]) for _, match in layered}
    # A state with no more layers than are named has been pruned before.
    if len(layers) <= len(keep):
        return state
    if missing := sorted(set(keep) - layers):
        numbers = ",".join(map(str, keep))
        raise SettingError(
            f"`decoder_layers_to_keep` {numbers}: the checkpoint has layers 0 to {max(layers)}, no {missing[0]}"
        )
    order = sorted(keep)
    names = {name: f"decoder.layers.{order.index(int(m[1]))}{m[2]}" for name, m in layered if int(m[1]) in keep}
    dropped = {name for name, match in layered if int(match[1]) not in keep}
    return {names.get(name, name): value for name, value in state.items() if name not in dropped}


_FUNCTIONS = """
    base_lm_architecture transformer_lm_big transformer_lm_baevski_wiki103 transformer_lm_baevski_gbw
    transformer_lm_gpt transformer_lm_gpt2_small transformer_lm_gpt2_tiny transformer_lm_gpt2_medium
    transformer_lm_gpt2_big transformer_lm_gpt2_big_wide transformer_lm_gpt2_bigger transformer_lm_gpt3_small
    transformer_lm_gpt3_medium transformer_lm_gpt3_large transformer_lm_gpt3_xl transformer_lm_gpt3_2_7
    transformer_lm_gpt3_6_7 transformer_lm_gpt3_13 transformer_lm_gpt3_175 base_gpt3_architecture
"""
_find = names_of(
    __name__,
    {"fairseq.models.registries": _FUNCTIONS, "fairseq.modules.transformer_config": "DEFAULT_MAX_TARGET_POSITIONS"},
)[0]


def __getattr__(name: str) -> Any:
    """fairseq's names: its settings, whose defaults differ, and functions of architectures."""
    if name == "TransformerLanguageModelConfig":
        return extendable(name, TransformerLMConfig, **PLAIN)
    return _find(name)
