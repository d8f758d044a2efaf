# From fairseq-short. MIT License, Copyright (c) the fairseq-short authors.
"""Transformer-XL of fairseq-short as a model of transformers (Dai et al. 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .modeling_fairseq import AdaptiveInput, NGramNotes, SegmentCache, WordNotes
from .modeling_fairseq import FairseqConfig as Config
from .modeling_fairseq import FairseqForCausalLM as CausalLM
from .modeling_fairseq import FairseqForSequenceClassification as SequenceClassification
from .modeling_fairseq import FairseqModel as Model

# Settings that config.json leaves out where they are not set.
UNSET = ("cutoffs", "d_embed", "d_head", "max_relative_length")


@dataclass
class Span:
    """The tokens of a piece of text, and the keys of memory and segment that they read.

    Attributes:
        distance: from each token back to each key, at least 0: [B, T, S], or [1, T, S] for all
            rows.
        mask: True where a token reads a key: [B, 1, T, S] or [1, 1, T, S].
        memory: zeros before the tokens, where no cache has them: [B, M, C].
        table: sinusoids of the distances 0, 1, …: [K, C].
        biases: u and v [H, D], where all layers have the same ones.
    """

    distance: Tensor
    mask: Tensor
    memory: Tensor | None
    table: Tensor
    biases: AttentionBiases | None


class AttentionBiases(nn.Module):
    """The biases u and v of the queries of content and of distance, of all layers (§3.3)."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.r_w_bias = nn.Parameter(torch.zeros(heads, head_dim))
        self.r_r_bias = nn.Parameter(torch.zeros(heads, head_dim))


class Attention(nn.Module):
    """Relative attention: softmax((q + u) k + (q + v) r), by content k and distance r (§3.3).

    ``shaw`` (Shaw et al. 2018): v is zero, and each distance has a learned r and a bias.
    """

    def __init__(self, cfg: SimpleNamespace, number: int) -> None:
        super().__init__()
        self.number, self.heads, self.dropout = number, cfg.n_head, cfg.dropatt
        self.head_dim = cfg.d_head or cfg.d_model // cfg.n_head
        width = self.heads * self.head_dim
        self.k_proj = nn.Linear(cfg.d_model, width, bias=False)
        self.v_proj = nn.Linear(cfg.d_model, width, bias=False)
        self.q_proj = nn.Linear(cfg.d_model, width, bias=False)
        self.out_proj = nn.Linear(width, cfg.d_model, bias=False)
        self.is_shaw = cfg.position_encoding == "shaw"
        if self.is_shaw:
            count = cfg.max_relative_length or cfg.tokens_per_sample + cfg.mem_len
            self.r_emb = nn.Parameter(torch.zeros(count, self.heads, self.head_dim))
            self.r_bias = nn.Parameter(torch.zeros(count, self.heads))
        else:
            self.r_proj = nn.Linear(cfg.d_model, width, bias=False)
        if self.is_shaw or cfg.untie_r:
            self.r_w_bias = nn.Parameter(torch.zeros(self.heads, self.head_dim))
        if cfg.untie_r and not self.is_shaw:
            self.r_r_bias = nn.Parameter(torch.zeros(self.heads, self.head_dim))

    def forward(
        self, x: Tensor, memory: Tensor | None, span: Span, cache: SegmentCache | None
    ) -> tuple[Tensor, Tensor]:
        """*x* [B, T, C] after *memory* [B, M, C] → [B, T, C], and weights [B, H, T, M + T]."""
        query = self._heads(self.q_proj(x))  # (B, T, H, D)
        before = x if memory is None else torch.cat([memory, x], dim=1)
        key, value = self._heads(self.k_proj(before)), self._heads(self.v_proj(before))
        if cache is not None:
            key, value = cache.add(f"keys {self.number}", key), cache.add(f"values {self.number}", value)
        biases = self if span.biases is None else span.biases
        content = torch.einsum("bthd,bshd->bhts", query + biases.r_w_bias.to(x.dtype), key)
        if self.is_shaw:
            # The first row of the table is the farthest distance, and those beyond it.
            index = (len(self.r_emb) - 1 - span.distance).clamp(min=0)
            by_distance = torch.einsum("bthd,khd->bhtk", query, self.r_emb) + self.r_bias.t()[:, None]
        else:
            index = span.distance
            distances = self._heads(self._of_distances(span.table, cache))
            by_distance = torch.einsum("bthd,khd->bhtk", query + biases.r_r_bias.to(x.dtype), distances)
        scores = content + by_distance.gather(3, index[:, None].expand_as(content))
        weights = (scores / math.sqrt(self.head_dim)).masked_fill(~span.mask, float("-inf")).softmax(-1)
        attended = torch.einsum("bhts,bshd->bthd", F.dropout(weights, self.dropout, self.training), value)
        return self.out_proj(attended.flatten(2)), weights

    def remember(self, memory: Tensor, cache: SegmentCache) -> None:
        """Let *cache* begin with *memory* [B, M, C]."""
        cache.add(f"keys {self.number}", self._heads(self.k_proj(memory)))
        cache.add(f"values {self.number}", self._heads(self.v_proj(memory)))

    def _of_distances(self, table: Tensor, cache: SegmentCache | None) -> Tensor:
        name = f"distances {self.number}"
        if cache is None:
            return self.r_proj(table)
        if name not in cache.constants:
            cache.constants[name] = self.r_proj(table)
        return cache.constants[name]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim))


class Layer(nn.Module):
    """Attention, then a feed-forward network; with norms before or after them."""

    def __init__(self, cfg: SimpleNamespace, number: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.self_attn = Attention(cfg, number)
        self.self_attn_layer_norm = nn.LayerNorm(cfg.d_model)
        self.fc1 = nn.Linear(cfg.d_model, cfg.d_inner)
        self.fc2 = nn.Linear(cfg.d_inner, cfg.d_model)
        self.final_layer_norm = nn.LayerNorm(cfg.d_model)

    def normed(self, x: Tensor) -> Tensor:
        """What attention reads of *x*."""
        return self.self_attn_layer_norm(x) if self.cfg.pre_lnorm else x

    def forward(self, x: Tensor, span: Span, cache: SegmentCache | None = None) -> tuple[Tensor, Tensor]:
        memory = None if span.memory is None else self.normed(span.memory)
        attended, weights = self.self_attn(self.normed(x), memory, span, cache)
        x = x + drop(attended, self.cfg, self.training)
        x = x if self.cfg.pre_lnorm else self.self_attn_layer_norm(x)
        inner = F.relu(self.fc1(self.final_layer_norm(x) if self.cfg.pre_lnorm else x))
        x = x + drop(self.fc2(drop(inner, self.cfg, self.training)), self.cfg, self.training)
        return x if self.cfg.pre_lnorm else self.final_layer_norm(x), weights


def drop(x: Tensor, cfg: SimpleNamespace, training: bool) -> Tensor:
    """Dropout; variational, with one mask for all time steps (Gal & Ghahramani 2016)."""
    if not cfg.variational_dropout:
        return F.dropout(x, cfg.dropout, training)
    return x * F.dropout(x.new_ones(x.size(0), 1, x.size(2)), cfg.dropout, training)


class BandOutput(nn.Module):
    """The words of a band: h P Wᵀ + b. Where W or P are the embeddings', they are no parameters
    here."""

    def __init__(self, weight: torch.Size | None, projection: torch.Size | None, words: int) -> None:
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(torch.empty(weight))
        self.projection = None if projection is None else nn.Parameter(torch.empty(projection))
        self.bias = nn.Parameter(torch.zeros(words))


class ClusteredSoftmax(nn.Module):
    """A softmax over words, or over frequent ones and bands of rare ones (Grave et al. 2017), with
    biases."""

    def __init__(self, cfg: SimpleNamespace, embeddings: AdaptiveInput) -> None:
        super().__init__()
        bands = range(len(embeddings.embeddings))
        by_name = {"none": range(0), "tails": range(1, len(bands)), "all": bands}
        tied = by_name.get(cfg.tie_projs) or [int(band) for band in cfg.tie_projs.split(",") if band.isdecimal()]
        self.bands: Any = nn.ModuleList()
        for band in bands:
            weight, *projections = embeddings.weights(band)
            own = projections[0].shape if projections and band not in tied else None
            self.bands.append(BandOutput(None if cfg.tie_weight else weight.shape, own, len(weight)))
        if len(bands) > 1:
            self.cluster_weight = nn.Parameter(torch.empty(len(bands) - 1, embeddings.weights(0)[0].size(1)))
            self.cluster_bias = nn.Parameter(torch.zeros(len(bands) - 1))

    def forward(self, hidden: Tensor, embeddings: AdaptiveInput) -> Tensor:
        """Log-probabilities of all words after *hidden* [..., C]."""
        words = embeddings.bounds[1]
        parts: list[Tensor] = []
        for number, band in enumerate(self.bands):
            weight, *projections = embeddings.weights(number)
            weight, bias = weight if band.weight is None else band.weight, band.bias
            if projections:
                projection = projections[0] if band.projection is None else band.projection
                narrow = F.linear(hidden, projection.t())
            else:
                narrow = hidden
            if number == 0 and len(self.bands) > 1:
                weight, bias = torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
            log_probs = F.linear(narrow, weight, bias).float().log_softmax(-1)
            parts.append(log_probs + parts[0][..., words + number - 1, None] if number else log_probs)
        return torch.cat([parts[0][..., :words], *parts[1:]], dim=-1)


class Decoder(nn.Module):
    """From the embeddings of tokens to hidden states, and from these to log-probabilities."""

    _gradient_checkpointing_func: Any

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.cfg = cfg = SimpleNamespace(**{**dict.fromkeys(UNSET), **config.settings})
        self.gradient_checkpointing, self.width = False, cfg.d_model
        self.embed_tokens = AdaptiveInput(
            config.vocab_size,
            cfg.d_embed or cfg.d_model,
            cfg.div_val,
            cfg.d_model,
            cfg.cutoffs or [],
            shares=cfg.div_val == 1,
        )
        self.ngram_notes = NGramNotes(cfg.ngram_notes, cfg.d_model, config) if cfg.ngram_notes else None
        self.word_notes = WordNotes(cfg.word_notes, cfg.d_model, config) if cfg.word_notes else None
        shares_biases = cfg.position_encoding == "relative" and not cfg.untie_r
        head_dim = cfg.d_head or cfg.d_model // cfg.n_head
        self.attention_biases = AttentionBiases(cfg.n_head, head_dim) if shares_biases else None
        self.layers: Any = nn.ModuleList(Layer(cfg, number) for number in range(cfg.n_layer))
        self.adaptive_softmax = ClusteredSoftmax(cfg, self.embed_tokens)

    def forward(
        self,
        embedded: Tensor,
        tokens: Tensor | None = None,
        cache: SegmentCache | None = None,
        states: list[Tensor] | None = None,
        attentions: list[Tensor] | None = None,
        eager: bool = False,
    ) -> Tensor:
        """Hidden states [B, T, C] of *embedded* [B, T, C], which go to *states*, too; notes are
        those of *tokens* [B, T]."""
        for notes in (self.ngram_notes, self.word_notes):
            if notes is not None and tokens is not None:
                embedded = embedded + notes(tokens, cache)
        x = drop(math.sqrt(self.cfg.d_model) * embedded, self.cfg, self.training)
        span = self._span(x, cache)
        for layer in self.layers:
            if states is not None:
                states.append(x)
            if self.gradient_checkpointing and self.training:
                x, weights = self._gradient_checkpointing_func(layer.__call__, x, span)
            else:
                x, weights = layer(x, span, cache)
            if attentions is not None:
                attentions.append(weights)
        x = drop(x, self.cfg, self.training)
        if states is not None:
            states.append(x)
        return x

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words after *hidden* [..., C]: float32."""
        return self.adaptive_softmax(hidden, self.embed_tokens)

    def begin(self, cache: SegmentCache) -> None:
        """Prepare a new *cache*: its memory begins empty, or with zeros as in transformers' former
        Transformer-XL."""
        if self.cfg.memory_start == "empty" or not cache.memory:
            return
        rows = torch.full_like(cache.lengths, cache.memory)
        zeros = self.layers[0].self_attn_layer_norm.weight.new_zeros(len(rows), cache.memory, self.cfg.d_model)
        cache.begin(rows, cache.memory)
        for layer in self.layers:
            layer.self_attn.remember(layer.normed(zeros), cache)
        cache.lengths = cache.starts = rows

    def _span(self, x: Tensor, cache: SegmentCache | None) -> Span:
        memory = None
        if cache is None:
            if self.cfg.memory_start == "zeros":
                memory = x.new_zeros(x.size(0), self.cfg.mem_len, x.size(2))
            before = 0 if memory is None else memory.size(1)
            keys = torch.arange(before + x.size(1), device=x.device)[None]
            queries = keys[:, before:]
        else:
            queries, keys = cache.queries, cache.keys
        distance = queries[..., None] - keys[:, None]
        mask = (keys[:, None] >= 0) & (distance >= 0)
        if self.cfg.same_length:
            mask = mask & (distance < self.cfg.mem_len)
        count = keys.size(1) if cache is None else cache.segment + cache.memory
        if cache is None:
            table = self._sinusoids(count, x)
        elif "table" in cache.constants:
            table = cache.constants["table"]
        else:
            table = cache.constants["table"] = self._sinusoids(count, x)
        return Span(distance.clamp(0, count - 1), mask[:, None], memory, table, self.attention_biases)

    def _sinusoids(self, count: int, x: Tensor) -> Tensor:
        distances = torch.arange(count, dtype=torch.float32, device=x.device)
        if self.cfg.clamp_len > 0:
            distances = distances.clamp(max=self.cfg.clamp_len)
        channels = torch.arange(0, self.cfg.d_model, 2, dtype=torch.float32, device=x.device)
        angles = distances[:, None] * 10000.0 ** -(channels / self.cfg.d_model)
        table = torch.cat([angles.sin(), angles.cos()], dim=1).to(x.dtype)
        # The authors drop out positions, too.
        return drop(table[None], self.cfg, self.training)[0]


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
