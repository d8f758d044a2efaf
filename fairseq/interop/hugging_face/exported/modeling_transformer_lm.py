# From fairseq-short. MIT License, Copyright (c) the fairseq-short authors.
"""Transformer language models of fairseq-short for transformers, among them the Shortformer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .modeling_fairseq import AdaptiveInput, Matrix, NGramNotes, SegmentCache, WordNotes
from .modeling_fairseq import FairseqConfig as Config
from .modeling_fairseq import FairseqForCausalLM as CausalLM
from .modeling_fairseq import FairseqForSequenceClassification as SequenceClassification
from .modeling_fairseq import FairseqModel as Model

ACTIVATIONS = {
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_accurate": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "linear": lambda x: x,
}
# Settings that config.json leaves out where they are not set.
CUTOFFS = ("adaptive_input_cutoff", "adaptive_softmax_cutoff")
UNSET = (*CUTOFFS, "attention_window", "decoder_input_dim", "decoder_kv_heads", "decoder_output_dim")


@dataclass
class Span:
    """Where the tokens of a piece of text stand, and the keys of memory and segment.

    Attributes:
        queries: position of each token in memory and segment: [B, T], or [1, T] for all rows.
        keys: the same of each key: [B, S], or [1, S].
        mask: True where a token reads a key: [B, 1, T, S]; None: each reads those before it.
        table: of all positions, sinusoids [P, C] or cosines and sines of rotations [P, 2, R/2].
        explicit: compute attention weights, and return them.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None
    table: Tensor | None
    explicit: bool


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def norm(cfg: SimpleNamespace) -> nn.Module:
    if cfg.decoder_norm == "rms":
        return RMSNorm(cfg.decoder_embed_dim, cfg.decoder_norm_eps)
    return nn.LayerNorm(cfg.decoder_embed_dim, cfg.decoder_norm_eps, bias=cfg.decoder_biases == "all")


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """Sines, then cosines, with fairseq's frequencies: [...] → [..., dim]."""
    half = dim // 2
    channels = torch.arange(half, dtype=torch.float32, device=positions.device)
    angles = positions[..., None] * torch.exp(channels * -(math.log(10000.0) / max(half - 1, 1)))
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=-1), (0, dim % 2))


def rotations(count: int, cfg: SimpleNamespace, device: torch.device) -> Tensor:
    """Cosines and sines of rotary positions (Su et al. 2021): [count, 2, R/2]."""
    dim = int(cfg.rotary_fraction * (cfg.decoder_embed_dim // cfg.decoder_attention_heads))
    frequencies = 1.0 / cfg.rotary_base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    # In Llama 3 only slow frequencies are divided, those of fewer than one turn in the training's
    # length; those of more than four are not.
    turns = cfg.rotary_trained_positions * frequencies / (2 * math.pi)
    fast = ((turns - 1.0) / 3.0).clamp(0, 1)
    frequencies = frequencies * (fast + (1 - fast) / cfg.rotary_scaling)
    exact = torch.device("cpu") if device.type == "mps" else device  # which has no float64
    angles = torch.arange(count, dtype=torch.float64, device=exact)[:, None] * frequencies.to(exact)
    return torch.stack([angles.cos(), angles.sin()], dim=1).float().to(device)


def rotated(x: Tensor, table: Tensor) -> Tensor:
    """The first R channels of *x* [B, S, H, D], turned by *table* [B, S, 2, R/2]."""
    cosines, sines = table[:, :, None, 0], table[:, :, None, 1]
    half = cosines.size(-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat([*(part.to(x.dtype) for part in turned), rest], dim=-1)


class Attention(nn.Module):
    """Causal self-attention; positions may enter queries and keys here (Press et al. 2021, §5)."""

    def __init__(self, cfg: SimpleNamespace, number: int) -> None:
        super().__init__()
        self.number, self.heads, self.infused = number, cfg.decoder_attention_heads, cfg.position_infused_attention
        self.head_dim, self.dropout = cfg.decoder_embed_dim // self.heads, cfg.attention_dropout
        width, shared = cfg.decoder_embed_dim, (cfg.decoder_kv_heads or self.heads) * self.head_dim
        self.k_proj = nn.Linear(width, shared, bias=cfg.decoder_biases != "none")
        self.v_proj = nn.Linear(width, shared, bias=cfg.decoder_biases != "none")
        self.q_proj = nn.Linear(width, width, bias=cfg.decoder_biases != "none")
        self.out_proj = nn.Linear(width, width, bias=cfg.decoder_biases == "all")
        self.q_norm = RMSNorm(self.head_dim, 1e-6) if cfg.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, 1e-6) if cfg.qk_norm else None

    def forward(self, x: Tensor, span: Span, cache: SegmentCache | None) -> tuple[Tensor, Tensor | None]:
        """*x* [B, T, C] → [B, T, C], and the weights [B, H, T, S] if they are wanted."""
        query, key, value = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        # A cache holds keys without their positions, which change where a new segment begins.
        if cache is not None:
            key, value = cache.add(f"keys {self.number}", key), cache.add(f"values {self.number}", value)
        if self.infused:
            of_queries, of_keys = self._projected_positions(span, cache)
            query, key = query + of_queries[span.queries], key + of_keys[span.keys]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if span.table is not None and not self.infused:
            query, key = rotated(query, span.table[span.queries]), rotated(key, span.table[span.keys])
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))  # (B, H, ·, D)
        if key.size(1) < self.heads:
            key, value = (x.repeat_interleave(self.heads // x.size(1), dim=1) for x in (key, value))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if span.explicit:
            scores = query @ key.transpose(-1, -2) / math.sqrt(self.head_dim)
            mask = scores.new_ones(scores.shape[-2:]).tril().bool() if span.mask is None else span.mask
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            attended = F.dropout(weights, dropout) @ value
        else:
            causal = span.mask is None
            attended = F.scaled_dot_product_attention(query, key, value, span.mask, dropout, is_causal=causal)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), weights

    def _projected_positions(self, span: Span, cache: SegmentCache | None) -> tuple[Tensor, Tensor]:
        """What positions add to queries and keys, since W (x + p) = W x + W p: [P, H, D] each."""
        name = f"positions {self.number}"
        if cache is not None and name in cache.constants:
            return cache.constants[name]
        assert span.table is not None
        zero = torch.zeros_like(span.table[:1])
        query, key = (project(span.table) - project(zero) for project in (self.q_proj, self.k_proj))
        result = self._heads(query), self._heads(key)
        if cache is not None:
            cache.constants[name] = result
        return result

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class Layer(nn.Module):
    """Attention and a feed-forward network, one after the other or in parallel."""

    def __init__(self, cfg: SimpleNamespace, number: int) -> None:
        super().__init__()
        self.cfg, self.activation = cfg, ACTIVATIONS[cfg.activation_fn]
        width, inner, bias = cfg.decoder_embed_dim, cfg.decoder_ffn_embed_dim, cfg.decoder_biases == "all"
        self.self_attn = Attention(cfg, number)
        self.self_attn_layer_norm = norm(cfg)
        self.fc1 = nn.Linear(width, inner, bias)
        self.fc2 = nn.Linear(inner, width, bias)
        self.final_layer_norm = norm(cfg)
        self.fc3 = nn.Linear(width, inner, bias) if cfg.decoder_gated_ffn else None

    def forward(self, x: Tensor, span: Span, cache: SegmentCache | None = None) -> tuple[Tensor, Tensor | None]:
        before = self.cfg.decoder_normalize_before
        attended, weights = self.self_attn(self.self_attn_layer_norm(x) if before else x, span, cache)
        if self.cfg.decoder_parallel_residual:
            return x + self._drop(attended) + self._drop(self._feed_forward(self.final_layer_norm(x))), weights
        x = x + self._drop(attended)
        x = x if before else self.self_attn_layer_norm(x)
        x = x + self._drop(self._feed_forward(self.final_layer_norm(x) if before else x))
        return x if before else self.final_layer_norm(x), weights

    def _feed_forward(self, x: Tensor) -> Tensor:
        inner = self.activation(self.fc1(x))
        inner = inner if self.fc3 is None else inner * self.fc3(x)
        return self.fc2(F.dropout(inner, self.cfg.activation_dropout, self.training))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.cfg.dropout, self.training)


class AdaptiveSoftmax(nn.Module):
    """A softmax over frequent words and bands of rare ones, and one over the words of each band
    (Grave et al. 2017)."""

    def __init__(self, cfg: SimpleNamespace, vocabulary: int, dim: int, embeddings: Any) -> None:
        super().__init__()
        cutoffs = cfg.adaptive_softmax_cutoff
        self.bounds, self.tied_projections = [0, *cutoffs, vocabulary], cfg.tie_adaptive_proj
        self.head: Any = Matrix(dim, cutoffs[0] + len(cutoffs))
        if embeddings is not None:
            narrow = embeddings[0][0].embedding_dim
            self.head = nn.ModuleDict({"class_proj": Matrix(dim, len(cutoffs))})
            if narrow != dim:
                self.head["word_proj"] = nn.ModuleList([Matrix(dim, narrow)])
        self.tail: Any = nn.ModuleList()
        for band, (first, last) in enumerate(zip(cutoffs, self.bounds[2:], strict=True), 1):
            tied = None if embeddings is None else embeddings[band][0]
            narrow = int(dim // cfg.adaptive_softmax_factor**band) if tied is None else tied.embedding_dim
            parts = nn.ModuleDict()
            if tied is None or not self.tied_projections:
                parts["0"] = Matrix(dim, narrow)
            if tied is None:
                parts["2"] = Matrix(narrow, last - first)
            self.tail.append(parts)

    def forward(self, hidden: Tensor, embeddings: Any) -> Tensor:
        """Log-probabilities of all words after *hidden* [..., C].

        *embeddings*: the input's bands, if their weights are the output's, too.
        """
        words = self.bounds[1]
        if embeddings is None:
            head = self.head(hidden)
        else:
            narrow = self.head["word_proj"][0](hidden) if "word_proj" in self.head else hidden
            head = torch.cat([F.linear(narrow, embeddings[0][0].weight), self.head["class_proj"](hidden)], dim=-1)
        head = head.float().log_softmax(-1)
        parts = [head[..., :words]]
        for band, modules in enumerate(self.tail, 1):
            narrow = modules["0"](hidden) if "0" in modules else F.linear(hidden, embeddings[band][1].weight.t())
            logits = modules["2"](narrow) if "2" in modules else F.linear(narrow, embeddings[band][0].weight)
            parts.append(logits.float().log_softmax(-1) + head[..., words + band - 1, None])
        return torch.cat(parts, dim=-1)


class TokenShift(nn.Module):
    """Adds to each input those of the tokens before it in the segment, weighted by channel."""

    def __init__(self, dim: int, reach: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(reach, 1, dim))

    def forward(self, x: Tensor, cache: SegmentCache | None) -> Tensor:
        reach, tokens = self.weight.size(0), x.size(1)
        before = x.new_zeros(x.size(0), reach, x.size(2)) if cache is None or cache.before is None else cache.before
        padded = torch.cat([before, x], dim=1)  # (B, R + T, C)
        if cache is not None:
            last = cache.taken[:, None] + torch.arange(reach, device=x.device)
            cache.before = padded.gather(1, last[..., None].expand(-1, -1, x.size(2)))
        return x + sum(padded[:, reach - i : reach - i + tokens] * self.weight[i - 1] for i in range(1, reach + 1))


class Decoder(nn.Module):
    """From the embeddings of tokens to hidden states, and from these to log-probabilities."""

    embed_tokens: Any
    output_projection: Matrix | None
    _gradient_checkpointing_func: Any

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.cfg = cfg = SimpleNamespace(**{**dict.fromkeys(UNSET), **config.settings})
        self.gradient_checkpointing, self.first_position = False, config.padding_idx + 1
        dim, vocabulary = cfg.decoder_embed_dim, config.vocab_size
        width, out = cfg.decoder_input_dim or dim, cfg.decoder_output_dim or dim
        self.embed_scale = 1.0 if cfg.no_scale_embedding else math.sqrt(dim)
        self.embed_tokens = (
            AdaptiveInput(vocabulary, width, cfg.adaptive_input_factor, dim, cfg.adaptive_input_cutoff, shares=False)
            if cfg.adaptive_input
            else nn.Embedding(vocabulary, width)
        )
        self.project_in_dim = Matrix(width, dim) if width != dim and not cfg.adaptive_input else None
        at_bottom = not cfg.no_token_positional_embeddings and not cfg.position_infused_attention
        self.sinusoidal = at_bottom and not cfg.decoder_learned_pos and not cfg.rotary_fraction
        rows = config.max_position_embeddings + self.first_position
        self.embed_positions = nn.Embedding(rows, dim) if at_bottom and cfg.decoder_learned_pos else None
        self.ngram_notes = NGramNotes(cfg.ngram_notes, dim, config) if cfg.ngram_notes else None
        self.word_notes = WordNotes(cfg.word_notes, dim, config) if cfg.word_notes else None
        self.token_shift = TokenShift(dim, cfg.token_shift) if cfg.token_shift else None
        self.layernorm_embedding = norm(cfg) if cfg.layernorm_embedding else None
        self.layers = nn.ModuleList(Layer(cfg, number) for number in range(config.num_hidden_layers))
        self.layer_norm = norm(cfg) if cfg.decoder_normalize_before and not cfg.no_decoder_final_norm else None
        self.project_out_dim = Matrix(dim, out) if out != dim and not cfg.tie_adaptive_weights else None
        self.width = dim if self.project_out_dim is None else out
        self.adaptive_softmax = self.output_projection = None
        if cfg.adaptive_softmax_cutoff is not None:
            tied = self.embed_tokens.embeddings if cfg.tie_adaptive_weights else None
            self.adaptive_softmax = AdaptiveSoftmax(cfg, vocabulary, self.width, tied)
        elif not cfg.share_decoder_input_output_embed:
            self.output_projection = Matrix(out, vocabulary)

    def forward(
        self,
        embedded: Tensor,
        tokens: Tensor | None = None,
        cache: SegmentCache | None = None,
        states: list[Tensor] | None = None,
        attentions: list[Tensor | None] | None = None,
        eager: bool = False,
    ) -> Tensor:
        """Hidden states [B, T, C] of *embedded* [B, T, E], which go to *states*, too; notes are
        those of *tokens* [B, T]."""
        x = self.embed_scale * embedded
        x = x if self.project_in_dim is None else self.project_in_dim(x)
        span = self._span(x, cache, eager or attentions is not None)
        if self.embed_positions is not None:
            x = x + self.embed_positions(span.queries + self.first_position)
        if self.sinusoidal:
            x = x + sinusoids(span.queries + self.first_position, x.size(2)).to(x.dtype)
        for notes in (self.ngram_notes, self.word_notes):
            if notes is not None and tokens is not None:
                x = x + self.embed_scale * notes(tokens, cache)
        x = x if self.token_shift is None else self.token_shift(x, cache)
        x = x if self.layernorm_embedding is None else self.layernorm_embedding(x)
        x = F.dropout(x, self.cfg.dropout, self.training)
        for layer in self.layers:
            if states is not None:
                states.append(x)
            if self.gradient_checkpointing and self.training:
                x, weights = self._gradient_checkpointing_func(layer.__call__, x, span)
            else:
                x, weights = layer(x, span, cache)
            if attentions is not None:
                attentions.append(weights)
        x = x if self.layer_norm is None else self.layer_norm(x)
        x = x if self.project_out_dim is None else self.project_out_dim(x)
        if states is not None:
            states.append(x)
        return x

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words after *hidden* [..., C]: float32."""
        if self.adaptive_softmax is not None:
            return self.adaptive_softmax(
                hidden, self.embed_tokens.embeddings if self.cfg.tie_adaptive_weights else None
            )
        output = self.embed_tokens if self.output_projection is None else self.output_projection
        return F.linear(hidden, output.weight).float().log_softmax(-1)

    def begin(self, cache: SegmentCache) -> None:
        """Prepare a new *cache*: its memory begins empty."""

    def _span(self, x: Tensor, cache: SegmentCache | None, explicit: bool) -> Span:
        if cache is None:
            queries = keys = torch.arange(x.size(1), device=x.device)[None]
            mask, count = None, x.size(1)
        else:
            queries, keys, count = cache.queries, cache.keys, cache.segment + cache.memory
        if cache is not None or self.cfg.attention_window is not None:
            distance = queries[..., None] - keys[:, None]
            mask = (keys[:, None] >= 0) & (distance >= 0) & (distance < (self.cfg.attention_window or count))
            mask = mask[:, None]
        # Columns behind the end of a row, and keys before the memory, have no positions.
        queries, keys = queries.clamp(max=count - 1), keys.clamp(0, count - 1)
        return Span(queries, keys, mask, self._table(count, x, cache), explicit)

    def _table(self, count: int, x: Tensor, cache: SegmentCache | None) -> Tensor | None:
        if not self.cfg.position_infused_attention and not self.cfg.rotary_fraction:
            return None
        if cache is not None and "table" in cache.constants:
            return cache.constants["table"]
        if self.cfg.rotary_fraction:
            table = rotations(count, self.cfg, x.device)
        else:
            positions = torch.arange(count, device=x.device) + self.first_position
            table = sinusoids(positions, x.size(2)).to(x.dtype)
        if cache is not None:
            cache.constants["table"] = table
        return table


class FairseqConfig(Config):
    """Settings of this family: transformers finds a model's class by that of its settings."""


# `save_pretrained` of transformers 4.51 copies this file for classes that have `_auto_class`.


class FairseqModel(Model):
    config_class = FairseqConfig
    decoder_class = Decoder
    _auto_class = "AutoModel"


class FairseqForCausalLM(CausalLM):
    config_class = FairseqConfig
    decoder_class = Decoder
    _auto_class = "AutoModelForCausalLM"


class FairseqForSequenceClassification(SequenceClassification):
    config_class = FairseqConfig
    decoder_class = Decoder
    _auto_class = "AutoModelForSequenceClassification"
