"""Transformer language models of fairseq-short for Hugging Face transformers.

The baseline of Baevski & Auli 2019 (adaptive input and softmax), the Shortformer (Press et al. 2021), Transformer-XL
(Dai et al. 2019) and plain decoders such as GPT-2. This file, its layers and its
configuration need torch and transformers only.

Without a cache, ``forward`` reads a row as one segment. With one, as in ``generate``, it reads segments of
``config.segment_length`` tokens. A model with memory keeps the last ``config.memory_length`` tokens of what it has read
when a segment is full; a model without memory reads the second half of its window again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_fairseq import FairseqConfig
from .layers_fairseq import (
    AdaptiveSoftmax,
    BandedEmbedding,
    ClusteredSoftmax,
    Context,
    Layer,
    distance_sinusoids,
    sinusoids,
)


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
