"""Transformer language models of fairseq-short for Hugging Face transformers.

The baseline of Baevski & Auli 2019 (adaptive input and softmax), the Shortformer (Press et al. 2021), Transformer-XL
(Dai et al. 2019) and plain decoders such as GPT-2. This file and its configuration need torch and
transformers only.

Without a cache, ``forward`` reads a row as one segment. With one, as in ``generate``, it reads segments of
``config.segment_length`` tokens. A model with memory keeps the last ``config.memory_length`` tokens of what it has read
when a segment is full; a model without memory reads the second half of its window again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

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


class FairseqCache(Cache):
    """Keys and values of what has been read, without their positions, so that they stay valid as memory.

    Attributes:
        keys, values: for each layer [B, H, held, D].
        table_keys: for each layer the keys of all positions or distances [H, S, D]; None where there are none.
        real: bool [B, held], False at padding; None without padding.
        tokens: those of the window [B, in_segment], for a model without memory.
        held: positions in the cache.
        in_segment: tokens of the current segment.
        read: tokens read in all.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.table_keys: list[Tensor | None] = [None] * layers
        self.real: Tensor | None = None
        self.tokens: Tensor | None = None
        self.held = self.in_segment = self.read = 0

    def __len__(self) -> int:
        return len(self.keys)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens have been read."""
        return self.read

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("a cache with memory cannot be cropped; use greedy search, sampling or beam search")

    def keep_last(self, count: int) -> None:
        """Begin a segment with the last *count* positions as memory."""
        first = self.held - min(self.held, count)
        self.keys = [key if key is None else key[:, :, first:] for key in self.keys]
        self.values = [value if value is None else value[:, :, first:] for value in self.values]
        self.real = self.real if self.real is None else self.real[:, first:]
        self.held, self.in_segment, self.tokens = self.held - first, 0, None

    def batch_select_indices(self, indices: Tensor) -> None:
        """Make row *indices[i]* the new row i."""
        for states in (self.keys, self.values):
            states[:] = [
                state if state is None else state.index_select(0, indices.to(state.device)) for state in states
            ]
        self.real = self.real if self.real is None else self.real.index_select(0, indices)
        self.tokens = self.tokens if self.tokens is None else self.tokens.index_select(0, indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = next((key.size(0) for key in self.keys if key is not None), 0)
        self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))


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


class Decoder(nn.Module):
    """Embeddings and layers; the output layer is beside them under fairseq's names."""

    def __init__(self, config: FairseqConfig) -> None:
        super().__init__()
        self.config = config
        dim, width = config.hidden_size, config.embedding_widths[0]
        self.embed_tokens: Any = (
            nn.Embedding(config.vocab_size, width) if config.cutoffs is None else BandedEmbedding(config)
        )
        widen = config.cutoffs is None and width != dim
        self.project_in_dim = nn.Linear(width, dim, bias=False) if widen else None
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.first_position + config.max_position_embeddings, dim)
        self.layernorm_embedding = nn.LayerNorm(dim) if config.embedding_norm else None
        self.layers: Any = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.layer_norm = nn.LayerNorm(dim) if config.final_norm else None
        narrow = config.output != "clustered" and config.output_widths[0] != dim
        self.project_out_dim = nn.Linear(dim, config.output_widths[0], bias=False) if narrow else None
        if config.output == "linear":
            if not config.tie_word_embeddings:
                self.output_projection = nn.Linear(config.output_widths[0], config.vocab_size, bias=False)
        else:
            self.adaptive_softmax = AdaptiveSoftmax(config) if config.output == "adaptive" else ClusteredSoftmax(config)

    def new_cache(self, rows: int) -> FairseqCache:
        """Return the cache of *rows* texts at their start."""
        config, weight = self.config, self.layers[0].fc1.weight
        cache = FairseqCache(len(self.layers))
        table = self._table(config.segment_length + config.memory_length, weight.device)
        if table is not None:
            cache.table_keys = [layer.self_attn.keys_of(table).detach() for layer in self.layers]
        if config.zero_memory:
            zeros = weight.new_zeros(rows, config.memory_length, config.hidden_size)
            for i, layer in enumerate(self.layers):
                cache.keys[i], cache.values[i] = layer.self_attn.keys_and_values(layer.attention_input(zeros))
            cache.held = config.memory_length
        return cache

    def _table(self, count: int, device: torch.device) -> Tensor | None:
        """Positions 0 to count - 1, or distances count - 1 to 0: [count, C]; None where attention needs none."""
        config = self.config
        if config.positions == "relative":
            return distance_sinusoids(count, config.hidden_size, config.clamp_length, device)
        if config.positions == "infused":
            return sinusoids(torch.arange(count, device=device) + config.first_position, config.hidden_size)
        return None

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the first layer's input for *tokens* [B, T] at *positions* [1 or B, T]: [B, T, C]."""
        config = self.config
        x = config.embedding_scale * self.embed_tokens(tokens)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if config.positions == "learned":
            x = x + self.embed_positions(positions + config.first_position)
        elif config.positions == "sinusoidal":
            x = x + sinusoids(positions + config.first_position, config.hidden_size).to(x.dtype)
        return x if self.layernorm_embedding is None else self.layernorm_embedding(x)

    def forward(self, tokens: Tensor, real: Tensor | None = None, cache: FairseqCache | None = None) -> Tensor:
        """Hidden states of a segment.

        Args:
            tokens: [B, T].
            real: False at padding: bool [B, T]; None without padding.
            cache: what was read before; *tokens* are added to it.

        Returns:
            [B, T, C].
        """
        config, past = self.config, cache.held if cache is not None else 0
        real = _joined(cache.real if cache is not None else None, real, past, tokens)
        window = config.memory_length if config.same_length else None
        context = Context.of(tokens.size(1), past, window, real, tokens.device)
        now = context.positions[:, past:]
        if config.positions == "learned" and int(now.max()) >= config.max_position_embeddings:
            raise ValueError(
                f"input_ids {list(tokens.shape)}: expected {config.max_position_embeddings} tokens at most"
            )
        x = self.embed(tokens, now)
        infused = None
        if config.positions == "infused":
            infused = sinusoids(now + config.first_position, config.hidden_size).to(x.dtype)
        table = self._table(context.positions.size(1), tokens.device) if cache is None else None
        for i, layer in enumerate(self.layers):
            attention, h = layer.self_attn, layer.attention_input(x)
            keys, values = attention.keys_and_values(h)
            if cache is not None:
                keys, values = cache.keys[i], cache.values[i] = _appended(cache, i, keys, values)
            table_keys = cache.table_keys[i] if cache is not None else None
            if table is not None:
                table_keys = attention.keys_of(table)
            queried = h if infused is None else h + infused
            shared = attention if config.own_biases else self.layers[0].self_attn
            x = layer.after_attention(x, attention(queried, keys, values, context, table_keys, shared))
        if cache is not None:
            cache.real = real
            cache.held, cache.in_segment = cache.held + tokens.size(1), cache.in_segment + tokens.size(1)
        x = x if self.layer_norm is None else self.layer_norm(x)
        return x if self.project_out_dim is None else self.project_out_dim(x)

    def read(self, tokens: Tensor, real: Tensor | None, cache: FairseqCache) -> Tensor:
        """Hidden states of *tokens* [B, T] that continue *cache*, read in segments: [B, T, C]."""
        config, parts, start = self.config, [], 0
        while start < tokens.size(1):
            if cache.in_segment >= config.segment_length:
                self._next_segment(cache)
            room = config.segment_length - cache.in_segment
            piece = tokens[:, start : start + room]
            parts.append(self.forward(piece, None if real is None else real[:, start : start + room], cache))
            if not config.memory_length:
                cache.tokens = piece if cache.tokens is None else torch.cat([cache.tokens, piece], dim=1)
            start += room
        cache.read += tokens.size(1)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _next_segment(self, cache: FairseqCache) -> None:
        """Keep the memory of a full cache, or read the second half of its window again."""
        half = self.config.segment_length // 2
        window, real = cache.tokens, cache.real
        cache.keep_last(self.config.memory_length)
        if window is not None and half:
            cache.tokens = window[:, -half:]
            self.forward(cache.tokens, None if real is None else real[:, -half:], cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the plain softmax, log-probabilities of an adaptive one: [B, T, C] -> [B, T, V]."""
        if self.config.output != "linear":
            return self.adaptive_softmax(hidden, self.embed_tokens)
        if self.config.tie_word_embeddings:
            return F.linear(hidden, self.embed_tokens.weight)
        return self.output_projection(hidden)


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


class FairseqForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model; dropout is left out: to train it further, import it back with ``fairseq-import``."""

    config_class = FairseqConfig
    _no_split_modules = ["Layer"]
    _is_stateful = True  # a cache cannot be cropped: no assisted generation

    def __init__(self, config: FairseqConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(config)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: ``generate`` then takes the cache that ``forward`` returns."""
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: FairseqCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the next token; log-probabilities where the output is adaptive.

        Args:
            input_ids: [B, T]; with *past_key_values*, those that follow what it holds.
            attention_mask: 0 at padding, which stands at the left: [B, T] or more columns, of which the last T count.
            past_key_values: what an earlier call returned; it is changed in place.
            labels: targets [B, T], those of ``input_ids``; -100 is left out of the loss.
            use_cache: return a cache (default: if one is given).
            logits_to_keep: compute logits for the last of so many tokens, or for these places; 0: for all.
        """
        real = None
        if attention_mask is not None:
            real = attention_mask[:, -input_ids.size(1) :].bool()
            real = None if bool(real.all()) else real
        if past_key_values is not None and not isinstance(past_key_values, FairseqCache):
            raise ValueError(f"past_key_values {type(past_key_values).__name__}: expected what this model returned")
        cache = past_key_values
        if cache is None and (use_cache or self.config.zero_memory):
            cache = self.decoder.new_cache(input_ids.size(0))
        if cache is not None and (use_cache or past_key_values is not None):
            hidden = self.decoder.read(input_ids, real, cache)
        else:
            hidden = self.decoder(input_ids, real, cache)
            cache = None
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        logits = self.decoder.logits(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        return output if return_dict is not False else output.to_tuple()


def _rows(states: list[Tensor | None], indices: Tensor) -> list[Tensor | None]:
    return [state if state is None else state.index_select(0, indices.to(state.device)) for state in states]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _banded(logits: list[Tensor], words: int) -> Tensor:
    """Log-probabilities of all words from the logits of the head, its last ones those of bands, and of each tail."""
    head = logits[0].float().log_softmax(-1)
    tails = [tail.float().log_softmax(-1) + head[..., words + band, None] for band, tail in enumerate(logits[1:])]
    return torch.cat([head[..., :words], *tails], dim=-1)


def _joined(held: Tensor | None, real: Tensor | None, past: int, tokens: Tensor) -> Tensor | None:
    """Which of *past* positions and *tokens* [B, T] are not padding, bool [B, past + T]; None: all."""
    if held is None and real is None:
        return None
    rows, count = tokens.shape
    ones = torch.ones(rows, past + count, dtype=torch.bool, device=tokens.device)
    return torch.cat([ones[:, :past] if held is None else held, ones[:, past:] if real is None else real], dim=1)


def _appended(cache: FairseqCache, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """*keys* and *values* after those of *cache*, which pass no gradient on."""
    old, old_values = cache.keys[layer], cache.values[layer]
    if old is None or old_values is None:
        return keys, values
    return torch.cat([old.detach(), keys], dim=2), torch.cat([old_values.detach(), values], dim=2)
