"""What a model carries from one segment to the next, as values that go into ``forward`` and come out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

Memory = list[Tensor]
"""For each layer, what its keys and values are computed from: [B, M, C], detached."""


def extend_memory(old: Tensor | None, new: Tensor, length: int) -> Tensor:
    """The last *length* positions of *old* followed by *new*, detached from the graph.

    Shape: old [B, M, C] or None, new [B, T, C] → [B, min(M + T, length), C].
    """
    new = new.detach()
    if new.size(1) >= length:
        return new[:, new.size(1) - length :].contiguous()
    if old is None:
        return new
    return torch.cat([old[:, max(0, old.size(1) + new.size(1) - length) :], new], dim=1)


def keep_rows(memory: Memory | None, rows: int) -> Memory | None:
    """The memory of the first *rows* rows: at a corpus's end, rows leave the batch from the last on."""
    if memory is None or not memory or memory[0].size(0) == rows:
        return memory
    return [layer[:rows] for layer in memory]


@dataclass
class LayerCache:
    """Projected keys and values of one layer, preallocated for the longest span, and how to add to them.

    Attributes:
        keys, values: [B, H, S, D].
        weight: the projections to query, key and value as one matrix [3C, C].
        bias: what is added to the three at each position [S, 3C]: their biases, and with position-infused attention
            the projected positions, since W(x + p) + b = Wx + (Wp + b).
        position_keys: the part of positions in the keys [1, H, S, D], None where there is none.
    """

    keys: Tensor
    values: Tensor
    weight: Tensor
    bias: Tensor
    position_keys: Tensor | None = None

    def keep_last(self, held: int, kept: int) -> None:
        """Move the last *kept* of *held* positions to the front, where they take positions 0 … kept − 1."""
        if not kept:
            return
        first = held - kept
        keys = self.keys[:, :, first:held].clone()
        if self.position_keys is not None:
            keys = keys + (self.position_keys[:, :, :kept] - self.position_keys[:, :, first:held])
        self.keys[:, :, :kept] = keys
        self.values[:, :, :kept] = self.values[:, :, first:held].clone()

    def keep_rows(self, rows: int) -> None:
        """Forget all but the first *rows* rows."""
        self.keys, self.values = self.keys[:rows], self.values[:rows]

    def select_rows(self, index: Tensor) -> None:
        """Make row *index[i]* the new row i: [new rows]; a row may be taken more than once."""
        self.keys, self.values = self.keys[index], self.values[index]


@dataclass
class RelativeLayerCache(LayerCache):
    """A :class:`LayerCache` of relative attention, whose keys stay valid wherever they move.

    Attributes:
        distance_keys: keys of the distances S − 1, …, 0: [H, S, D].
        distance_scores: scores of the distances alone [H, S], None where there are none.
    """

    distance_keys: Tensor = field(kw_only=True)
    distance_scores: Tensor | None = field(default=None, kw_only=True)


@dataclass
class KeyValueCache:
    """The state of token-by-token inference: one :class:`LayerCache` a layer, and how far they are filled.

    A *segment* of ``segment_length`` tokens follows up to ``memory_length`` tokens of memory. When the segment is
    full, :meth:`next_segment` makes the last ``memory_length`` tokens the memory of the next one: exactly what
    non-overlapping inference attends to, so the attended span grows from M to M + L and falls back to M + 1.
    """

    layers: list[LayerCache]
    segment_length: int
    memory_length: int
    held: int = 0
    in_segment: int = 0

    @property
    def room(self) -> int:
        """Tokens that still fit into the segment."""
        return self.segment_length - self.in_segment

    def next_segment(self) -> None:
        """Begin a new segment, with the last ``memory_length`` tokens as its memory."""
        kept = min(self.held, self.memory_length)
        for layer in self.layers:
            layer.keep_last(self.held, kept)
        self.held = kept
        self.in_segment = 0

    def keep_rows(self, rows: int) -> None:
        """Forget all but the first *rows* rows: at a corpus's end, rows run out from the last on."""
        if self.layers and rows < self.layers[0].keys.size(0):
            for layer in self.layers:
                layer.keep_rows(rows)

    def select_rows(self, index: Tensor) -> None:
        """Make row *index[i]* the new row i, as beams that part and end ask for: [new rows]."""
        for layer in self.layers:
            layer.select_rows(index)

    def clear(self) -> None:
        """Forget everything."""
        self.held = self.in_segment = 0

    def advance(self, count: int) -> None:
        """Note that *count* tokens were added to every layer."""
        self.held += count
        self.in_segment += count


@dataclass
class TokenCache(KeyValueCache):
    """The same for models in which a new token changes the positions of all before it: the tokens themselves [B, S]."""

    tokens: Tensor | None = None

    def append(self, tokens: Tensor) -> Tensor:
        """All tokens of the segment, *tokens* [B, T] the last of them."""
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], dim=1)
        self.advance(tokens.size(1))
        return self.tokens

    def next_segment(self) -> None:
        """Begin a new segment, with nothing before it."""
        self.clear()

    def keep_rows(self, rows: int) -> None:
        """Forget all but the first *rows* rows."""
        if self.tokens is not None:
            self.tokens = self.tokens[:rows]

    def select_rows(self, index: Tensor) -> None:
        """Make row *index[i]* the new row i: [new rows]."""
        if self.tokens is not None:
            self.tokens = self.tokens[index]

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.tokens = None
