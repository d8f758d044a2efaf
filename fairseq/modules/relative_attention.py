"""Relative attention: as in Transformer-XL, and as in Shaw et al.

For query i and key j the score is qᵢ⁺ · kⱼ + qᵢ* · r(i − j) + b(i − j): content and distance, each
with its own query. A segment of T queries over K keys meets K distances, so the second term is one
product with K vectors, [T, K], whose row i must then be moved T − 1 − i columns to the left (Dai et
al. 2019, appendix B). In memory that move is a change of strides: no element is copied for it, but
in compiled graphs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.modules.attention import (
    CAUSAL,
    AttentionMask,
    Causal,
    SelfAttention,
    kernels_for,
)
from fairseq.modules.dispatch import on_cpu
from fairseq.modules.dropout import dropout
from fairseq.modules.linear import Linear
from fairseq.modules.memory import KVChunks, LayerCache, RelativeLayerCache, concat_chunks


@dataclass(frozen=True)
class RelativePositions:
    """Inputs of relative attention that all layers share, for queries of which the last stands at
    the last key.

    Attributes:
        table: embeddings of the distances K − 1, …, 0: [K, C]; None where attention has its own.
        content_bias, position_bias: u and v [H, D]; None where every layer has its own.
    """

    table: Tensor | None = None
    content_bias: Tensor | None = None
    position_bias: Tensor | None = None


class Distances(NamedTuple):
    """Keys and scores of the distances K − 1, …, 0 in one layer."""

    keys: Tensor
    """Multiplied by queries: [H, K, D]."""
    scores: Tensor | None = None
    """Scores that do not depend on the query: [H, K]."""

    def nearest(self, count: int) -> Distances:
        """Return the rows of the distances count − 1, …, 0."""
        first = self.keys.size(1) - count
        return Distances(self.keys[:, first:], None if self.scores is None else self.scores[:, first:])


class DistanceAttention(SelfAttention):
    """Base of relative attention: queries and keys of content
    and of distance; linear maps without biases."""

    def prepare(self, visible: AttentionMask, queries: int, keys: int, device: torch.device) -> AttentionMask:
        return visible  # the scores of distances hold what is hidden

    def _attend(
        self,
        query: Tensor,
        keys: KVChunks,
        values: KVChunks,
        positions: Any,
        visible: AttentionMask,
        cache: LayerCache | None,
    ) -> Tensor:
        if positions is None:
            raise ValueError("relative attention needs the positions of memory and segment")
        if not isinstance(visible, Causal):
            raise ValueError("relative attention has no distances to keys after the query; it is causal only")
        queries, count = query.size(2), sum(key.size(2) for key in keys)
        if isinstance(cache, RelativeLayerCache):
            # A window may hide the oldest keys from all queries, which are then not computed.
            reach = visible.reach(queries, count)
            keys, values = ([piece[:, :, count - reach :] for piece in pieces] for pieces in (keys, values))
            distances, count = Distances(cache.distance_keys, cache.distance_scores).nearest(reach), reach
        else:
            distances = self._distances(positions, count, query.dtype)
        dropout_p = self.dropout if self.training else 0.0
        content, distance = self._content_query(query, positions), self._distance_query(query, positions)
        operands = (content, keys, values, dropout_p, distance, distances.keys)
        by_kernel = kernels_for(*operands) if distances.scores is None else None
        if by_kernel is not None:
            # A subclass of what is causal may hide more.
            hidden = None if visible == CAUSAL else visible.bias(queries, count, query.device, query.dtype)
            attended: Tensor = by_kernel.relative_attention(
                content, distance, keys, values, distances.keys, hidden, dropout_p
            )
            return attended
        bias = visible.bias(queries, count, query.device, query.dtype)
        return attend_by_distance(
            content, distance, concat_chunks(keys), concat_chunks(values), distances, bias, dropout_p
        )

    def new_cache(self, batch: int, length: int, positions: RelativePositions | None = None) -> RelativeLayerCache:
        """Room for *length* positions; *positions* holds the table of as many distances."""
        if positions is None:
            raise ValueError("relative attention needs the positions of its cache")
        cache = super().new_cache(batch, length)
        distances = self._distances(positions, length, cache.weight.dtype)
        return RelativeLayerCache(
            cache.keys,
            cache.values,
            cache.weight,
            cache.bias,
            # Copied once here: heads are strided slices
            # of one product, which every step would read.
            distance_keys=distances.keys.to(cache.weight.dtype).contiguous(),
            distance_scores=distances.scores,
        )

    @torch.no_grad()
    def weights(
        self, x: Tensor, memory: Tensor | None = None, positions: Any = None, visible: AttentionMask = CAUSAL
    ) -> Tensor:
        query, keys, _ = self._project(x, memory, positions)
        key = concat_chunks(keys)
        distances = self._distances(positions, key.size(2), x.dtype)
        bias = visible.bias(query.size(2), key.size(2), x.device, query.dtype)
        by_distance = shift(_by_distance(self._distance_query(query, positions), distances), bias)
        return (self._content_query(query, positions) @ key.transpose(-1, -2) + by_distance).softmax(-1)

    def _distances(self, positions: RelativePositions, count: int, dtype: torch.dtype) -> Distances:
        """Keys r and scores b of the *count* nearest distances."""
        raise NotImplementedError

    def _content_query(self, query: Tensor, positions: RelativePositions) -> Tensor:
        """q⁺ / √D for q [B, H, T, D]."""
        raise NotImplementedError

    def _distance_query(self, query: Tensor, positions: RelativePositions) -> Tensor:
        """q* / √D for q [B, H, T, D]."""
        raise NotImplementedError

    def _plus(self, query: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            raise ValueError("relative attention has no biases u, v of its own and was given none")
        scale = 1 / math.sqrt(self.head_dim)
        # The scale is applied to the queries [T, D], which are smaller than the scores [T, K].
        return torch.add((bias * scale).to(query.dtype)[:, None], query, alpha=scale)


class RelativeAttention(DistanceAttention):
    """Transformer-XL's attention: (W_q x_i + u)ᵀ W_k,E x_j + (W_q x_i + v)ᵀ W_k,R R_{i−j} (Dai et
    al. 2019, §3.3).

    With *own_biases* u and v are parameters of this module; otherwise they come with the positions.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float,
        *,
        head_dim: int,
        own_biases: bool = True,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, head_dim=head_dim, bias=False)
        self.r_proj = Linear(embed_dim, num_heads * head_dim, bias=False)
        self.r_w_bias = nn.Parameter(torch.zeros(num_heads, head_dim)) if own_biases else None
        self.r_r_bias = nn.Parameter(torch.zeros(num_heads, head_dim)) if own_biases else None

    def _distances(self, positions: RelativePositions, count: int, dtype: torch.dtype) -> Distances:
        assert positions.table is not None
        table = positions.table[positions.table.size(0) - count :]
        projected = self.r_proj(table.to(dtype))  # (K, H·D)
        return Distances(projected.unflatten(-1, (self.num_heads, -1)).transpose(0, 1))

    def _content_query(self, query: Tensor, positions: RelativePositions) -> Tensor:
        return self._plus(query, positions.content_bias if self.r_w_bias is None else self.r_w_bias)

    def _distance_query(self, query: Tensor, positions: RelativePositions) -> Tensor:
        return self._plus(query, positions.position_bias if self.r_r_bias is None else self.r_r_bias)

    @torch.no_grad()
    def terms(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        positions: RelativePositions | None = None,
        visible: AttentionMask = CAUSAL,
    ) -> dict[str, Tensor]:
        """The four terms of the scores (§3.3), each [B, H, T, M + T] and divided by √D; 0 for keys
        that are not seen.

        (a) content, (b) content-dependent position, (c) global content bias, (d) global position
            bias.
        """
        assert positions is not None
        query, keys, _ = self._project(x, memory, positions)
        key = concat_chunks(keys)
        distances = self._distances(positions, key.size(2), x.dtype)
        zero = torch.zeros_like(query)
        mask = visible.mask(query.size(2), key.size(2), x.device)
        content, position = query / math.sqrt(self.head_dim), key.transpose(-1, -2)
        # A query of zero leaves only what the biases u and v add: terms (c) and (d).
        terms = {
            "a": content @ position,
            "b": shift(_by_distance(content, distances), None),
            "c": self._content_query(zero, positions) @ position,
            "d": shift(_by_distance(self._distance_query(zero, positions), distances), None),
        }
        return terms if mask is None else {name: term.masked_fill(~mask, 0.0) for name, term in terms.items()}


class AttentionBiases(nn.Module):
    """u and v [H, D] where all layers share one pair (§3.3). The decoder owns them and hands them
    to every layer."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.r_w_bias = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.r_r_bias = nn.Parameter(torch.zeros(num_heads, head_dim))


def name_as_layers_own(decoder: nn.Module, shared: str, layers: list[str]) -> None:
    """Let the state dict of *decoder* name the parameters of its submodule *shared* as if each of
    *layers* had them.

    Checkpoints have u and v with each layer's attention, shared or not, as the authors' do.
    """

    def spread(_: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
        items = list(state.items())
        state.clear()
        # In the order of the parameters, by which optimizer states are numbered.
        for name, value in items:
            bias = name.removeprefix(f"{prefix}{shared}.")
            state.update({name: value} if bias == name else {f"{prefix}{layer}.{bias}": value for layer in layers})

    def gather(module: nn.Module, state: dict[str, object], prefix: str, *others: object) -> None:
        for bias in dict(module.get_submodule(shared).named_parameters()):
            names = [f"{prefix}{layer}.{bias}" for layer in layers]
            if all(name in state for name in names):
                # Every layer's entry is a copy of the one pair.
                state[f"{prefix}{shared}.{bias}"] = [state.pop(name) for name in names][0]

    decoder.register_state_dict_post_hook(spread)
    decoder.register_load_state_dict_pre_hook(gather)


class ShawAttention(DistanceAttention):
    """(q_i + u)ᵀ k_j + q_iᵀ E_{i−j} + b_{i−j}, all learned.

    After Shaw et al. 2018, as Transformer-XL's authors compare with it. Distances beyond the table
    count as its farthest; its *first* row is the farthest, as in the authors' files.

    Args:
        count: distances R with parameters of their own.
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float, *, head_dim: int, count: int) -> None:
        super().__init__(embed_dim, num_heads, dropout, head_dim=head_dim, bias=False)
        self.r_w_bias = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.r_emb = nn.Parameter(torch.zeros(count, num_heads, head_dim))
        self.r_bias = nn.Parameter(torch.zeros(count, num_heads))

    def _distances(self, positions: RelativePositions, count: int, dtype: torch.dtype) -> Distances:
        keys = self.r_emb.to(dtype).transpose(0, 1)  # (H, R, D)
        scores = (self.r_bias * (1 / math.sqrt(self.head_dim))).to(dtype).t()  # (H, R)
        missing = count - keys.size(1)
        if missing <= 0:
            return Distances(keys, scores).nearest(count)
        farthest = keys[:, :1].expand(-1, missing, -1), scores[:, :1].expand(-1, missing)
        return Distances(torch.cat([farthest[0], keys], dim=1), torch.cat([farthest[1], scores], dim=1))

    def _content_query(self, query: Tensor, positions: RelativePositions) -> Tensor:
        return self._plus(query, self.r_w_bias)

    def _distance_query(self, query: Tensor, positions: RelativePositions) -> Tensor:
        return query * (1 / math.sqrt(self.head_dim))


def attend_by_distance(
    content_query: Tensor,
    distance_query: Tensor,
    key: Tensor,
    value: Tensor,
    distances: Distances,
    bias: Tensor | None,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(Q⁺ Kᵀ + shift(Q* Rᵀ + b) + bias) V.

    On GPUs the scores of distances are the additive bias of torch's fused attention, which gives a
    bias no gradient on CPUs.

    Shape: queries [B, H, T, D]; key, value [B, H, K, D]; bias [T, K] → [B, H, T, D].
    """
    if not on_cpu(content_query):
        dim = content_query.size(-1)
        scores = shift(_by_distance(distance_query, distances), bias)  # (B, H, T, K)
        # The kernel that reads a bias wants heads of a multiple of 8 channels.
        query, key, value = (F.pad(x, (0, -dim % 8)) for x in (content_query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=scores, dropout_p=dropout_p, scale=1.0)
        return attended[..., :dim]
    scores = _Shift.apply(_by_distance(distance_query, distances), bias)  # (B·H, T, K)
    q, k, v = (x.flatten(0, 1) for x in (content_query, key, value))
    # In place: the scores are the largest tensor of a layer, and nothing else reads them.
    probabilities = dropout(scores.baddbmm_(q, k.transpose(1, 2)).softmax(-1), dropout_p)
    return torch.bmm(probabilities, v).view_as(content_query)


def _by_distance(query: Tensor, distances: Distances) -> Tensor:
    """Q* Rᵀ + b: column c belongs to distance K − 1 − c. Query [B, H, T, D] → [H, B, T, K]."""
    batch, heads, queries, dim = query.shape
    flat = query.transpose(0, 1).reshape(heads, batch * queries, dim)
    keys = distances.keys.transpose(1, 2)
    scores = distances.scores
    raw = torch.bmm(flat, keys) if scores is None else torch.baddbmm(scores[:, None, :], flat, keys)
    return raw.view(heads, batch, queries, -1)


def shift(raw: Tensor, bias: Tensor | None) -> Tensor:
    """Scores by distance as scores by key, plus *bias*,
    which hides the keys after each query (appendix B).

    Row i of *raw* moves T − 1 − i columns to the left. Scores of keys after the query are arbitrary
    but finite, and their gradient must be zero, as a softmax over scores with the bias makes it.

    Shape: raw [H, B, T, K], bias [T, K] → [B, H, T, K].
    """
    heads, batch, queries, keys = raw.shape
    if not torch.compiler.is_compiling():
        return _Shift.apply(raw, bias).view(batch, heads, queries, keys)
    # In compiled graphs by a column of padding, as in appendix B:
    # strides there are the compiler's to choose.
    padded = F.pad(raw, (1, 0)).flatten(2)  # (H, B, T · (K + 1)); without its first T, row i begins T − 1 − i later
    moved = padded[:, :, queries:].view(heads, batch, queries, keys)
    moved = moved.transpose(0, 1)
    return moved if bias is None else moved + bias.to(raw.dtype)


class _Shift(torch.autograd.Function):
    """The move is a view with row stride K − 1;
    its transpose is one copy that leaves out the last column.

    The result is [B·H, T, K], and no view of anything: what is added to it in place then costs no
    copies going back.
    """

    @staticmethod
    def forward(ctx: Any, raw: Tensor, bias: Tensor | None) -> Tensor:
        heads, batch, queries, keys = raw.shape
        raw = raw.contiguous()
        row = queries * keys
        moved = raw.as_strided(
            (batch, heads, queries, keys),
            (row, batch * row, keys - 1, 1),
            raw.storage_offset() + queries - 1,
        )
        result = raw.new_empty(batch * heads, queries, keys)
        room = result.view(batch, heads, queries, keys)
        if bias is None:
            room.copy_(moved)
        else:
            torch.add(moved, bias.to(raw.dtype), out=room)
        ctx.batch = batch
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].unflatten(0, (ctx.batch, -1))
        batch, heads, queries, keys = grad.shape
        result = grad.new_empty(heads, batch, queries * keys)
        # No row of the forward pass reads the first T − 1 scores, which belong to distances beyond
        # the first query.
        result[:, :, : queries - 1] = 0
        moved = result[:, :, queries - 1 : -1].view(heads, batch, queries, keys - 1)
        moved.copy_(grad[..., : keys - 1].transpose(0, 1))
        result[:, :, -1] = grad[:, :, -1, -1].t()
        return result.view(heads, batch, queries, keys), None
