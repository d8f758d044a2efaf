"""Parts of the models in ``modeling_fairseq.py``: embeddings, attention, layers and output layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_fairseq import FairseqConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "linear": lambda x: x,
}


@dataclass
class Context:
    """Positions and visibility of one segment of T tokens after P earlier ones, K = P + T.

    Attributes:
        positions: number of each key in its row, padding left out: [1 or B, K].
        mask: bool [1 or B, 1, T, K], True where a query reads a key.
        shift: for each query and key the column of its distance in a table of K distances: [T, K].
    """

    positions: Tensor
    mask: Tensor
    shift: Tensor

    @classmethod
    def of(cls, tokens: int, past: int, window: int | None, real: Tensor | None, device: torch.device) -> Context:
        """Return the context; *real* [B, K] is False at padding, *window* the most keys that a query reads."""
        keys = past + tokens
        places = torch.arange(keys, device=device)
        distance = places[past:, None] - places  # (T, K)
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        shift = (keys - 1 - distance).clamp(max=keys - 1)
        if real is None:
            return cls(places[None], seen[None, None], shift)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        # A query at padding reads itself: a softmax over no keys would be NaN.
        mask = (seen & real[:, None]) | (distance == 0)
        return cls(positions, mask[:, None], shift)


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """fairseq's sinusoids: sines, then cosines, of positions [...]: [..., dim]; an odd *dim* ends in a zero."""
    half = dim // 2
    rates = torch.exp(torch.arange(half, device=positions.device).float() * -(math.log(10000.0) / max(half - 1, 1)))
    angles = positions.float()[..., None] * rates
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=-1), (0, dim % 2))


def distance_sinusoids(count: int, dim: int, clamp: int, device: torch.device) -> Tensor:
    """Transformer-XL's sinusoids of the distances count - 1, ..., 0: [count, dim]."""
    distances = torch.arange(count - 1, -1, -1, device=device).float()
    if clamp > 0:
        distances = distances.clamp(max=clamp)
    angles = distances[:, None] * 10000.0 ** -(torch.arange(0, dim, 2, device=device).float() / dim)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class BandedEmbedding(nn.Module):
    """Embeddings in bands of falling word frequency, each with a projection to the model's width."""

    def __init__(self, config: FairseqConfig) -> None:
        super().__init__()
        self.bounds = [0, *config.cutoffs, config.vocab_size]
        self.shared = config.embedding_projections == "shared"
        self.embeddings: Any = nn.ModuleList()
        for band, width in enumerate(config.embedding_widths):
            parts: list[nn.Module] = [nn.Embedding(self.bounds[band + 1] - self.bounds[band], width)]
            if config.embedding_projections == "own" or (self.shared and band == 0):
                parts.append(nn.Linear(width, config.hidden_size, bias=False))
            self.embeddings.append(nn.Sequential(*parts))

    def table(self, band: int) -> Tensor:
        """Return the embeddings [words, d] of a band."""
        return self.embeddings[band][0].weight

    def projection(self, band: int) -> Any:
        """Return the projection [C, d] of a band, or None."""
        parts = self.embeddings[0 if self.shared else band]
        return parts[1].weight if len(parts) > 1 else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of *tokens* [B, T]: [B, T, C]."""
        result: Tensor | None = None
        for band, (first, last) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            found = F.embedding((tokens - first).clamp(0, last - first - 1), self.table(band))
            projection = self.projection(band)
            found = found if projection is None else F.linear(found, projection)
            result = found if result is None else torch.where((tokens >= first)[..., None], found, result)
        assert result is not None
        return result


class Attention(nn.Module):
    """Self-attention with positions in its input, infused, or relative."""

    k_proj: nn.Linear
    v_proj: nn.Linear
    q_proj: nn.Linear
    r_proj: nn.Linear
    r_w_bias: nn.Parameter
    r_r_bias: nn.Parameter

    def __init__(self, config: FairseqConfig, index: int) -> None:
        super().__init__()
        self.heads, self.positions = config.num_attention_heads, config.positions
        width = config.num_attention_heads * config.head_dim
        relative = config.positions == "relative"
        for name in ("k_proj", "v_proj", "q_proj"):
            setattr(self, name, nn.Linear(config.hidden_size, width, bias=not relative))
        self.out_proj = nn.Linear(width, config.hidden_size, bias=not relative)
        if relative:
            self.r_proj = nn.Linear(config.hidden_size, width, bias=False)
            if config.own_biases or index == 0:
                self.r_w_bias = nn.Parameter(torch.zeros(config.num_attention_heads, config.head_dim))
                self.r_r_bias = nn.Parameter(torch.zeros(config.num_attention_heads, config.head_dim))

    def split(self, x: Tensor) -> Tensor:
        """Return the heads of *x* [B, T, H D]: [B, H, T, D]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys, without positions, and values of *x* [B, T, C]: [B, H, T, D]."""
        return self.split(self.k_proj(x)), self.split(self.v_proj(x))

    def keys_of(self, table: Tensor) -> Tensor:
        """Return the keys of positions or distances [S, C]: [H, S, D]."""
        weight = (self.r_proj if self.positions == "relative" else self.k_proj).weight
        return self.split(F.linear(table.to(weight.dtype), weight)[None])[0]

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, context: Context, table: Tensor | None, shared: Attention
    ) -> Tensor:
        """Attend from *x* [B, T, C] to *keys* and *values* [B, H, K, D].

        Args:
            x: with infused positions, they are added already.
            context: of the segment.
            table: keys of positions or distances [H, S, D].
            shared: the attention with u and v.
        """
        query = self.split(self.q_proj(x))  # (B, H, T, D)
        if self.positions == "infused":
            assert table is not None
            keys = keys + table[:, context.positions].transpose(0, 1)
        if self.positions != "relative":
            attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=context.mask)
        else:
            assert table is not None
            distances = table[:, table.size(1) - keys.size(2) :]  # (H, K, D)
            by_distance = (query + shared.r_r_bias[:, None]) @ distances.transpose(1, 2)  # (B, H, T, K)
            scores = by_distance.gather(-1, context.shift.expand_as(by_distance)) / math.sqrt(query.size(-1))
            bias = scores.masked_fill(~context.mask, -torch.inf)
            content = query + shared.r_w_bias[:, None]
            attended = F.scaled_dot_product_attention(content, keys, values, attn_mask=bias)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a feed-forward network, with layer norm before or after each."""

    def __init__(self, config: FairseqConfig, index: int) -> None:
        super().__init__()
        self.pre_norm, self.activation = config.pre_norm, ACTIVATIONS[config.hidden_act]
        self.self_attn = Attention(config, index)
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)

    def attention_input(self, x: Tensor) -> Tensor:
        """Return what keys and values of the layer's input *x* [B, T, C] are computed from."""
        return self.self_attn_layer_norm(x) if self.pre_norm else x

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward network's output for *x* [B, T, C]."""
        return self.fc2(self.activation(self.fc1(x)))

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output for its input *x* and what its attention returned: [B, T, C]."""
        x = x + attended
        if self.pre_norm:
            return x + self.feed_forward(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x)
        return self.final_layer_norm(x + self.feed_forward(x))


class AdaptiveSoftmax(nn.Module):
    """fairseq's adaptive softmax (Grave et al. 2017), tied to the embeddings or not (Baevski & Auli 2019)."""

    def __init__(self, config: FairseqConfig) -> None:
        super().__init__()
        self.tied, self.tied_projections = config.tie_word_embeddings, config.tied_projections
        self.bounds = [0, *config.output_cutoffs, config.vocab_size]
        dim = config.output_widths[0]
        tails, words = len(config.output_cutoffs), config.output_cutoffs[0]
        self.head: Any = _linear(dim, words + tails)
        if self.tied:
            self.head = nn.ModuleDict({"class_proj": _linear(dim, tails)})
            if config.embedding_widths[0] != dim:
                self.head["word_proj"] = nn.Sequential(_linear(dim, config.embedding_widths[0]))
        self.tail: Any = nn.ModuleList()
        for band in range(1, tails + 1):
            width = config.output_widths[band]
            parts = nn.ModuleDict() if band in self.tied_projections else nn.ModuleDict({"0": _linear(dim, width)})
            if not self.tied:
                parts["2"] = _linear(width, self.bounds[band + 1] - self.bounds[band])
            self.tail.append(parts)

    def forward(self, hidden: Tensor, embeddings: BandedEmbedding) -> Tensor:
        """Log-probabilities [B, T, V], float32, after hidden states [B, T, C]."""
        logits = [self.head(hidden) if not self.tied else self._tied_head(hidden, embeddings)]
        for band, parts in enumerate(self.tail, 1):
            narrowed = parts["0"](hidden) if "0" in parts else hidden @ embeddings.projection(band)
            logits.append(parts["2"](narrowed) if not self.tied else F.linear(narrowed, embeddings.table(band)))
        return _banded(logits, self.bounds[1])

    def _tied_head(self, hidden: Tensor, embeddings: BandedEmbedding) -> Tensor:
        narrowed = self.head["word_proj"](hidden) if "word_proj" in self.head else hidden
        return torch.cat([F.linear(narrowed, embeddings.table(0)), self.head["class_proj"](hidden)], dim=-1)


class BandOutput(nn.Module):
    """What a band of Transformer-XL's softmax has for itself: weight [n, d], bias [n], projection [C, d]."""

    def __init__(self, words: int, width: int, dim: int, tied: bool, projects: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(words))
        self.weight = None if tied else nn.Parameter(torch.zeros(words, width))
        self.projection = nn.Parameter(torch.zeros(dim, width)) if projects else None


class ClusteredSoftmax(nn.Module):
    """Transformer-XL's softmax over one band of words, or its adaptive softmax over several (Dai et al. 2019)."""

    def __init__(self, config: FairseqConfig) -> None:
        super().__init__()
        bounds = [0, *config.output_cutoffs, config.vocab_size]
        self.words, self.tied_projections = bounds[1], config.tied_projections
        self.bands: Any = nn.ModuleList()
        for band, width in enumerate(config.output_widths):
            projects = config.embedding_projections != "none" and band not in config.tied_projections
            words, dim = bounds[band + 1] - bounds[band], config.hidden_size
            self.bands.append(BandOutput(words, width, dim, config.tie_word_embeddings, projects))
        tails = len(config.output_cutoffs)
        self.cluster_weight: Any = nn.Parameter(torch.zeros(tails, config.output_widths[0])) if tails else None
        self.cluster_bias: Any = nn.Parameter(torch.zeros(tails)) if tails else None

    def forward(self, hidden: Tensor, embeddings: BandedEmbedding) -> Tensor:
        """Log-probabilities [B, T, V], float32, after hidden states [B, T, C]."""
        logits = []
        for band, output in enumerate(self.bands):
            projection = embeddings.projection(band) if band in self.tied_projections else output.projection
            narrowed = hidden if projection is None else hidden @ projection
            weight = embeddings.table(band) if output.weight is None else output.weight
            logits.append(F.linear(narrowed, weight, output.bias))
            if band == 0 and self.cluster_weight is not None:
                logits[0] = torch.cat([logits[0], F.linear(narrowed, self.cluster_weight, self.cluster_bias)], dim=-1)
        return _banded(logits, self.words)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _banded(logits: list[Tensor], words: int) -> Tensor:
    """Log-probabilities of all words from the logits of the head, its last ones those of bands, and of each tail."""
    head = logits[0].float().log_softmax(-1)
    tails = [tail.float().log_softmax(-1) + head[..., words + band, None] for band, tail in enumerate(logits[1:])]
    return torch.cat([head[..., :words], *tails], dim=-1)
