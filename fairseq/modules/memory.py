"""Memory and key-value caches: the state passed
from one segment to the next through ``forward``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fairseq.modules.positions import rotated

Memory = list[Tensor]
"""For each layer, the input of its keys and values in earlier segments: [B, M, C], detached."""

KVChunks = Sequence[Tensor]
"""Keys or values [B, H, ·, D] that follow one another in time, a memory's and a segment's: S in
all."""


def extend_memory(old: Tensor | None, new: Tensor, length: int) -> Tensor:
    """The last *length* positions of *old* followed by *new*, detached from the graph.

    Shape: old [B, M, C] or None, new [B, T, C] → [B, min(M + T, length), C].
    """
    new = new.detach()
    if new.size(1) >= length:
        # A part is copied: a view of it would keep the activations of the whole segment.
        return new[:, new.size(1) - length :].contiguous()
    if old is None:
        return new
    return torch.cat([old[:, max(0, old.size(1) + new.size(1) - length) :], new], dim=1)


def keep_rows(memory: Memory | None, rows: int, first: int = 0) -> Memory | None:
    """The memory of *rows* rows from *first* on; the last rows
    of a batch run out first at the end of a corpus."""
    if memory is None or not memory or memory[0].size(0) == rows:
        return memory
    return [layer[first : first + rows] for layer in memory]


@dataclass
class LayerCache:
    """Projected keys and values of one layer, preallocated
    for the longest span, with the packed projection weights.

    Attributes:
        keys, values: [B, G, S, D] of G heads, which H heads of queries may share; keys as they are
            before a norm, unless they are turned.
        weight: the projections to query, key and value as one matrix [(H + 2G) D, C].
        bias: the three biases at each position [S, (H + 2G) D]; with position-infused attention
            plus the projected positions, since W(x + p) + b = Wx + (Wp + b).
        position_keys: contribution of the positions to the keys [1, G, S, D], or None.
        rotation: cosines and sines by which the keys of each position are turned already,
            [S, 2, R/2], or None.
    """

    keys: Tensor
    values: Tensor
    weight: Tensor
    bias: Tensor
    position_keys: Tensor | None = None
    rotation: Tensor | None = None

    def keep_last(self, length: int, count: int) -> None:
        """Move the last *count* of *length* positions to the front, as positions 0 … count − 1."""
        first = length - count
        # Copied first, because both ends of the move may overlap.
        keys = self.keys[:, :, first:length].clone()
        # The content stays as it is; only what the position contributes is exchanged.
        if self.position_keys is not None:
            keys = keys + (self.position_keys[:, :, :count] - self.position_keys[:, :, first:length])
        # Back by the angle of position `first`: angles grow in proportion to the position.
        if self.rotation is not None:
            cosines, sines = self.rotation[first]
            keys = rotated(keys, torch.stack([cosines, -sines]).expand(count, -1, -1))
        self.keys[:, :, :count] = keys
        self.values[:, :, :count] = self.values[:, :, first:length].clone()


@dataclass
class RelativeLayerCache(LayerCache):
    """A :class:`LayerCache` of relative attention; its keys do not depend on their position.

    Attributes:
        distance_keys: keys of the distances S − 1, …, 0: [H, S, D].
        distance_scores: scores that depend on the distance only [H, S], or None.
    """

    distance_keys: Tensor = field(kw_only=True)
    distance_scores: Tensor | None = field(default=None, kw_only=True)


@dataclass
class KeyValueCache:
    """The state of token-by-token inference: one :class:`LayerCache` per layer, and the number of
    tokens in them.

    A *segment* of ``segment_length`` tokens follows up to ``memory_length`` tokens of memory. When
    the segment is full, :meth:`next_segment` makes the last ``memory_length`` tokens the memory of
    the next one, as in non-overlapping inference: the attended span grows from M to M + L and falls
    back to M + 1.

    Attributes:
        before: inputs of :class:`~fairseq.modules.positions.TokenShift` that precede the next
            token: [B, R, C]; None where a segment begins, as in training.
        last_tokens: the tokens [B, HISTORY] on which the next ones'
            :class:`~fairseq.modules.ngram_notes.Notes` depend; None where a segment begins.
        bound: arguments of the kernels that last added to these layers.
    """

    layers: list[LayerCache]
    segment_length: int
    memory_length: int
    length: int = 0
    in_segment: int = 0
    before: Tensor | None = None
    last_tokens: Tensor | None = None
    bound: Any = field(default=None, repr=False, compare=False)

    @property
    def room(self) -> int:
        """Number of tokens that still fit into the segment."""
        return self.segment_length - self.in_segment

    def next_segment(self) -> None:
        """Begin a new segment, with the last ``memory_length`` tokens as its memory."""
        length, count = self.length, min(self.length, self.memory_length)
        self.clear()
        if count:
            for layer in self.layers:
                layer.keep_last(length, count)
            self.length = count

    def select_rows(self, parents: Sequence[int]) -> None:
        """Make row ``parents[i]`` the new row i; rows may be dropped and repeated.

        Rows that continue themselves are not copied, and while there are as many, the tensors stay,
        to which kernels are bound.
        """
        if self.layers:
            held = self.layers[0].keys
            grows = len(parents) > held.size(0)
            moved = [row for row, parent in enumerate(parents) if row != parent or grows]
            places, sources = torch.tensor(
                [moved, [parents[row] for row in moved]], dtype=torch.long, device=held.device
            )
            for layer in self.layers:
                layer.keys = _selected(layer.keys, len(parents), places, sources, self.length)
                layer.values = _selected(layer.values, len(parents), places, sources, self.length)
        for name in ("before", "last_tokens"):
            if (held := getattr(self, name)) is not None:
                setattr(self, name, held[torch.tensor(parents, device=held.device)])

    def clear(self) -> None:
        """Forget everything."""
        self.length = self.in_segment = 0
        self.before = self.last_tokens = None

    def advance(self, count: int) -> None:
        """Count *count* tokens that were added to every layer."""
        self.length += count
        self.in_segment += count


@dataclass
class TokenCache(KeyValueCache):
    """Cache of tokens [B, S], for models in which a new
    token changes the positions of all tokens before it."""

    tokens: Tensor | None = None

    def append(self, tokens: Tensor) -> Tensor:
        """Append *tokens* [B, T]; return all tokens of the segment."""
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], dim=1)
        self.advance(tokens.size(1))
        return self.tokens

    def select_rows(self, parents: Sequence[int]) -> None:
        if self.tokens is not None:
            self.tokens = self.tokens[torch.tensor(parents, device=self.tokens.device)]

    def clear(self) -> None:
        super().clear()
        self.tokens = None


def _selected(old: Tensor, rows: int, moved: Tensor, parents: Tensor, length: int) -> Tensor:
    """*rows* rows of *old* [B, G, S, D], of which the rows *moved* are those of their *parents*,
    *length* positions of them, and the others stay; in the same memory if it has room."""
    new = old if rows == old.size(0) else old[:rows] if rows < old.size(0) else old.new_empty(rows, *old.shape[1:])
    if len(moved):
        # All are read before the first is written: a row may be the parent of one after it.
        new[:, :, :length].index_copy_(0, moved, old[:, :, :length].index_select(0, parents))
    return new


def concat_chunks(chunks: KVChunks) -> Tensor:
    """Keys or values as one tensor, [B, H, S, D]."""
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks), dim=2)
