"""``fairseq.models.transformer``: the encoder and the decoder that plug-ins build models of."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from fairseq.errors import UserError
from fairseq.models.fairseq_decoder import FairseqEncoder, FairseqIncrementalDecoder
from fairseq.modules.adaptive_input import word_embedding
from fairseq.modules.adaptive_softmax import AdaptiveSoftmax
from fairseq.modules.fairseq_layers import TransformerDecoderLayer, TransformerEncoderLayer
from fairseq.modules.fairseq_modules import (
    FairseqDropout,
    LayerDropModuleList,
    LayerNorm,
    PositionalEmbedding,
    checkpoint_wrapper,
)
from fairseq.modules.transformer_config import (
    DEFAULT_MAX_SOURCE_POSITIONS as DEFAULT_MAX_SOURCE_POSITIONS,
)
from fairseq.modules.transformer_config import (
    DEFAULT_MAX_TARGET_POSITIONS as DEFAULT_MAX_TARGET_POSITIONS,
)
from fairseq.modules.transformer_config import (
    DEFAULT_MIN_PARAMS_TO_WRAP as DEFAULT_MIN_PARAMS_TO_WRAP,
)
from fairseq.modules.transformer_config import (
    TransformerConfig,
)
from fairseq.system.deferred import names_of
from fairseq.utils import fill_with_neg_inf


class _Stack:
    """What encoder and decoder share: the settings and the making of embeddings and layers."""

    part = ""  # first word of the names of settings
    padding_idx: Any
    layers: Any
    embed_positions: Any
    layernorm_embedding: Any
    dropout_module: Any

    def _make_embeddings(self: Any, cfg: TransformerConfig, embed_tokens: nn.Module, dim: int, positions: int) -> None:
        """Embeddings of width *dim*, and of *positions* positions."""
        self.dropout_module = FairseqDropout(cfg.dropout, type(self).__name__)
        self.padding_idx = embed_tokens.padding_idx
        self.embed_tokens = embed_tokens
        self.embed_scale = 1.0 if cfg.no_scale_embedding else math.sqrt(dim)
        for name in ("quant_noise_pq", "quant_noise_scalar", "base_layers"):
            if cfg[name]:
                raise UserError(f"`{name}` {cfg[name]}: not implemented; use 0")
        self._max_positions = positions

    def _make_positions(self: Any, cfg: TransformerConfig, dim: int) -> None:
        self.embed_positions = None
        if not cfg.no_token_positional_embeddings:
            learned = cfg[f"{self.part}_learned_pos"]
            self.embed_positions = PositionalEmbedding(self._max_positions, dim, self.padding_idx, learned)
        self.layernorm_embedding = LayerNorm(dim) if cfg.layernorm_embedding else None

    def _make_layers(self: Any, cfg: TransformerConfig, *options: object) -> None:
        drop = cfg[f"{self.part}_layerdrop"]
        self.layers = LayerDropModuleList(drop) if drop > 0 else nn.ModuleList()
        build = getattr(self, f"build_{self.part}_layer")
        for _ in range(cfg[f"{self.part}_layers"]):
            layer = build(self.args if self.is_legacy else cfg, *options)
            self.layers.append(checkpoint_wrapper(layer) if cfg.checkpoint_activations else layer)
        self.num_layers = len(self.layers)

    @property
    def is_legacy(self) -> bool:
        """Whether the flat settings are handed on, as the classes without ``Base`` in their names
        do."""
        return not type(self).__name__.endswith("Base")

    def max_positions(self: Any) -> int:
        """The most tokens of a row."""
        if self.embed_positions is None:
            return self._max_positions
        return min(self._max_positions, self.embed_positions.max_positions)


class TransformerEncoder(_Stack, FairseqEncoder):
    """An encoder of ``encoder_layers`` layers; its output is a dict, as in fairseq since 0.10."""

    part = "encoder"

    def __init__(self, args: Any, dictionary: object, embed_tokens: nn.Module, return_fc: bool = False) -> None:
        FairseqEncoder.__init__(self, dictionary)
        self.args, self.return_fc = args, return_fc
        self.cfg = cfg = TransformerConfig.from_namespace(args)
        self.register_buffer("version", torch.Tensor([3]))
        dim: int = embed_tokens.embedding_dim  # type: ignore[assignment]
        self.encoder_layerdrop, self.max_source_positions = cfg.encoder_layerdrop, cfg.max_source_positions
        self._make_embeddings(cfg, embed_tokens, dim, cfg.max_source_positions)
        self._make_positions(cfg, dim)
        self._make_layers(cfg)
        self.layer_norm = LayerNorm(dim) if cfg.encoder_normalize_before else None

    def build_encoder_layer(self, args: object) -> nn.Module:
        """A layer; plug-ins override it."""
        return TransformerEncoderLayer(args, return_fc=self.return_fc)

    def forward_embedding(self, src_tokens: Tensor, token_embedding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The sum of embeddings and positions, and the scaled embeddings: [B, T, C]."""
        embedded = self.embed_tokens(src_tokens) if token_embedding is None else token_embedding
        x = embed = self.embed_scale * embedded
        if self.embed_positions is not None:
            x = embed + self.embed_positions(src_tokens)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        return self.dropout_module(x), embed

    def forward(  # type: ignore[override]
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, Any]:
        """``encoder_out`` [T, B, C], ``encoder_padding_mask`` [B, T] and more, each in a list."""
        return self.forward_scriptable(src_tokens, src_lengths, return_all_hiddens, token_embeddings)

    def forward_scriptable(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, object]:
        padding = src_tokens.eq(self.padding_idx)
        has_padding = bool(padding.any())
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        # Always multiplied: what is NaN at padding must not pass.
        x = (x * (1 - padding.unsqueeze(-1).type_as(x))).transpose(0, 1)  # (T, B, C)
        states = [x] if return_all_hiddens else []
        networks: list[Tensor | None] = []
        for layer in self.layers:
            output = layer(x, encoder_padding_mask=padding if has_padding else None)
            x, network = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
            if return_all_hiddens:
                states.append(x)
                networks.append(network)
        x = x if self.layer_norm is None else self.layer_norm(x)
        lengths = src_tokens.ne(self.padding_idx).sum(1, dtype=torch.int32).reshape(-1, 1)
        return {
            "encoder_out": [x],
            "encoder_padding_mask": [padding],
            "encoder_embedding": [embedding],
            "encoder_states": states,
            "fc_results": networks,
            "src_tokens": [],
            "src_lengths": [lengths],
        }

    def reorder_encoder_out(self, encoder_out: dict[str, Any], new_order: Tensor) -> dict[str, object]:
        """The output of the rows *new_order*."""
        axes = {"encoder_out": 1, "encoder_states": 1}
        return {
            name: [value.index_select(axes.get(name, 0), new_order) for value in values if value is not None]
            for name, values in encoder_out.items()
        }

    def upgrade_state_dict_named(self, state_dict: dict[str, object], name: str) -> dict[str, Any]:
        for number, layer in enumerate(self.layers):
            if hasattr(layer, "upgrade_state_dict_named"):
                layer.upgrade_state_dict_named(state_dict, f"{name}.layers.{number}")
        return state_dict


class TransformerDecoder(_Stack, FairseqIncrementalDecoder):
    """A decoder of ``decoder_layers`` layers without attention to an encoder; it returns logits.

    With an adaptive softmax it returns hidden states, as in fairseq: ``adaptive_softmax`` makes
    probabilities of them.
    """

    part = "decoder"

    def __init__(
        self,
        args: Any,
        dictionary: object,
        embed_tokens: nn.Module,
        no_encoder_attn: bool = False,
        output_projection: nn.Module | None = None,
    ) -> None:
        FairseqIncrementalDecoder.__init__(self, dictionary)
        if not no_encoder_attn:
            raise UserError(f"{type(self).__name__}: attention to an encoder is not implemented; no_encoder_attn=True")
        self.args = args
        self.cfg = cfg = TransformerConfig.from_namespace(args)
        self.register_buffer("version", torch.Tensor([3]))
        self._future_mask = torch.empty(0)
        self.decoder_layerdrop, self.max_target_positions = cfg.decoder_layerdrop, cfg.max_target_positions
        self.share_input_output_embed = cfg.share_decoder_input_output_embed
        width: int = embed_tokens.embedding_dim  # type: ignore[assignment]
        self.embed_dim = dim = cfg.decoder_embed_dim
        self.output_embed_dim = cfg.decoder_output_dim
        self._make_embeddings(cfg, embed_tokens, dim, cfg.max_target_positions)
        self.project_in_dim = Linear(width, dim, bias=False) if width != dim else None
        self._make_positions(cfg, dim)
        self._make_layers(cfg, no_encoder_attn)
        normalizes = cfg.decoder_normalize_before and not cfg.no_decoder_final_norm
        self.layer_norm = LayerNorm(dim) if normalizes else None
        projects = dim != self.output_embed_dim and not cfg.tie_adaptive_weights
        self.project_out_dim = Linear(dim, self.output_embed_dim, bias=False) if projects else None
        self.adaptive_softmax: Any = None
        self.output_projection = output_projection
        if output_projection is None:
            self.build_output_projection(cfg, dictionary, embed_tokens)

    def build_output_projection(self, args: Any, dictionary: Any, embed_tokens: nn.Module) -> None:
        """Set ``output_projection``, or ``adaptive_softmax``; plug-ins override it."""
        cfg = TransformerConfig.from_namespace(args)
        words, embeddings = len(dictionary), cast(Any, embed_tokens)
        if cfg.adaptive_softmax_cutoff is not None:
            cutoff = cfg.adaptive_softmax_cutoff
            self.adaptive_softmax = AdaptiveSoftmax(
                words,
                self.output_embed_dim,
                [int(part) for part in (cutoff.split(",") if isinstance(cutoff, str) else cutoff)],
                dropout=cfg.adaptive_softmax_dropout,
                adaptive_inputs=embeddings if cfg.tie_adaptive_weights else None,
                factor=cfg.adaptive_softmax_factor,
                tie_proj=cfg.tie_adaptive_proj,
            )
        elif self.share_input_output_embed:
            weight: Any = self.embed_tokens.weight
            self.output_projection = nn.Linear(weight.size(1), weight.size(0), bias=False)
            self.output_projection.weight = weight
        else:
            self.output_projection = nn.Linear(self.output_embed_dim, words, bias=False)
            nn.init.normal_(self.output_projection.weight, std=self.output_embed_dim**-0.5)

    def build_decoder_layer(self, args: object, no_encoder_attn: bool = False) -> nn.Module:
        """A layer; plug-ins override it."""
        return TransformerDecoderLayer(args, no_encoder_attn)

    def forward(  # type: ignore[override]
        self,
        prev_output_tokens: Tensor,
        encoder_out: object = None,
        incremental_state: object = None,
        features_only: bool = False,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
        src_lengths: object = None,
        return_all_hiddens: bool = False,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits [B, T, V], or hidden states; and ``inner_states`` [T, B, C] and ``attn``."""
        x, extra = self.extract_features(
            prev_output_tokens,
            encoder_out=encoder_out,
            incremental_state=incremental_state,
            full_context_alignment=full_context_alignment,
            alignment_layer=alignment_layer,
            alignment_heads=alignment_heads,
        )
        return x if features_only else self.output_layer(x), extra

    def extract_features(  # type: ignore[override]
        self,
        prev_output_tokens: Tensor,
        encoder_out: object = None,
        incremental_state: object = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Hidden states [B, T, C], and a dict as in :meth:`forward`."""
        return self.extract_features_scriptable(
            prev_output_tokens, encoder_out, incremental_state, full_context_alignment, alignment_layer, alignment_heads
        )

    def extract_features_scriptable(
        self,
        prev_output_tokens: Tensor,
        encoder_out: object = None,
        incremental_state: object = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, object]]:
        positions = None
        if self.embed_positions is not None:
            positions = self.embed_positions(prev_output_tokens, incremental_state=incremental_state)
        if incremental_state is not None:
            # The newest token alone: the attention has kept the others.
            prev_output_tokens = prev_output_tokens[:, -1:]
            positions = None if positions is None else positions[:, -1:]
        padding = prev_output_tokens.eq(self.padding_idx)
        x = self.embed_scale * self.embed_tokens(prev_output_tokens)  # (B, T, C)
        x = x if self.project_in_dim is None else self.project_in_dim(x)
        x = x if positions is None else x + positions
        x = x if self.layernorm_embedding is None else self.layernorm_embedding(x)
        x = self.dropout_module(x).transpose(0, 1)  # (T, B, C)
        masked = bool(padding.any())
        states = [x]
        for layer in self.layers:
            future = incremental_state is None and not full_context_alignment
            x, _, _ = layer(
                x,
                encoder_out,
                None,
                incremental_state,
                self_attn_mask=self.buffered_future_mask(x) if future else None,
                self_attn_padding_mask=padding if masked else None,
                need_attn=False,
                need_head_weights=False,
            )
            states.append(x)
        x = x if self.layer_norm is None else self.layer_norm(x)
        x = x.transpose(0, 1)  # (B, T, C)
        x = x if self.project_out_dim is None else self.project_out_dim(x)
        return x, {"attn": [None], "inner_states": states}

    def output_layer(self, features: Tensor, **options: object) -> Tensor:
        """Logits of hidden states; with an adaptive softmax the states themselves."""
        return features if self.output_projection is None else self.output_projection(features)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """−∞ above the diagonal: [T, T] for hidden states [T, B, C]."""
        length = tensor.size(0)
        if self._future_mask.size(0) < length or self._future_mask.device != tensor.device:
            self._future_mask = torch.triu(fill_with_neg_inf(torch.zeros(length, length)), 1)
        self._future_mask = self._future_mask.to(tensor)
        return self._future_mask[:length, :length]

    def upgrade_state_dict_named(self, state_dict: dict[str, object], name: str) -> dict[str, Any]:
        """Add to *state_dict* what files of former versions lack."""
        table = f"{name}.embed_tokens.weight"
        projection = f"{name}.output_projection.weight"
        if self.output_projection is not None and table in state_dict and projection not in state_dict:
            if self.share_input_output_embed:
                state_dict[projection] = state_dict[table]
            elif f"{name}.embed_out" in state_dict:
                state_dict[projection] = state_dict.pop(f"{name}.embed_out")
        for number, layer in enumerate(self.layers):
            if hasattr(layer, "upgrade_state_dict_named"):
                layer.upgrade_state_dict_named(state_dict, f"{name}.layers.{number}")
        return state_dict


class TransformerEncoderBase(TransformerEncoder):
    """The encoder whose layers are made of a :class:`TransformerConfig`."""


class TransformerDecoderBase(TransformerDecoder):
    """The decoder whose layers are made of a :class:`TransformerConfig`."""


def Embedding(num_embeddings: int, embedding_dim: int, padding_idx: int) -> nn.Embedding:
    """Embeddings with fairseq's initial values; padding's row is zero."""
    return word_embedding(num_embeddings, embedding_dim, padding_idx)


def Linear(in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    """A linear layer with fairseq's initial values."""
    module = nn.Linear(in_features, out_features, bias)
    nn.init.xavier_uniform_(module.weight)
    if bias:
        nn.init.zeros_(module.bias)
    return module


__getattr__, _ = names_of(
    __name__,
    {
        "fairseq.models.inert": "TransformerModel",
        "fairseq.modules.inert": "CharacterTokenEmbedder",
    },
)
