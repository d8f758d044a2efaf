"""Self-attention, absolute and position-infused: one family that shares the attention kernel.

Which keys a query may read is a value that a model hands to its layers, a :class:`AttentionMask`.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.modules import dispatch
from fairseq.modules.devices import is_cuda
from fairseq.modules.dispatch import compiled, kernels
from fairseq.modules.dropout import dropout
from fairseq.modules.linear import Linear
from fairseq.modules.memory import KVChunks, LayerCache, concat_chunks
from fairseq.modules.norms import rms_norm
from fairseq.modules.positions import rotated

_FEW = 8  # queries: without gradients the kernel, which arranges all keys, is for no fewer
_BLOCK = 128  # queries and keys of a block of flex attention


class AttentionMask(ABC):
    """The keys that each of T queries reads, of S; a memory's come first.

    Attributes:
        fused: what kernels of GPUs read in place of the mask, as :meth:`prepare` makes it:
            ``torch.nn.attention.bias.CausalBias`` or flex attention's ``BlockMask``; None: a mask.
    """

    fused: Any = None

    @abstractmethod
    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """True where a query reads a key: bool, broadcastable to [B, H, T, S]; None: everywhere."""

    def bias(self, queries: int, keys: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """The mask as an additive bias, 0 or −∞, of the same shape; None: no key is masked."""
        mask = self.mask(queries, keys, device)
        return None if mask is None else _as_bias(mask, dtype)

    def prepare(self, queries: int, keys: int, device: torch.device, blocks: bool) -> AttentionMask:
        """Return this value with what kernels of the GPU *device* read in place of the
        mask; *blocks*: flex attention may be one of them.

        Called once for all layers: compiled layers can read the result, and not make it.
        """
        return self


@dataclass(frozen=True)
class Causal(AttentionMask):
    """Each query reads its own position and those before it; the last query stands at the last key.

    Attributes:
        window: positions a query reads, its own included; None: all before it.
        made: masks and biases so far, for the layers of one forward pass; None: none is kept.
    """

    window: int | None = None
    made: dict[tuple[object, ...], Tensor] | None = field(default=None, compare=False, repr=False)
    fused: Any = field(default=None, compare=False, repr=False)

    def reach(self, queries: int, keys: int) -> int:
        """Number of the last keys that any of the queries reads."""
        return keys if self.window is None else min(keys, self.window + queries - 1)

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        # Every step of generation comes here: where the one query reads all keys, no mask is built.
        if queries == 1 and self.reach(1, keys) == keys:
            return None

        def make() -> Tensor:
            positions = torch.arange(keys - queries, keys, device=device)
            return _in_reach(positions[:, None] - torch.arange(keys, device=device), self.window)  # (T, S)

        return self._shared((queries, keys, device), make)

    def bias(self, queries: int, keys: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor | None:
        mask = self.mask(queries, keys, device)
        return None if mask is None else self._shared((queries, keys, device, dtype), lambda: _as_bias(mask, dtype))

    def prepare(self, queries: int, keys: int, device: torch.device, blocks: bool) -> AttentionMask:
        if type(self) is not Causal or queries == 1:
            return self
        ahead, window = keys - queries, self.window
        if window is None and ahead:
            # Imported here: it loads torch's compiler.
            from torch.nn.attention.bias import causal_lower_right

            return replace(self, fused=causal_lower_right(queries, keys))
        if window is None or not blocks:
            return self
        made = block_mask(lambda b, h, q, k: _in_reach(ahead + q - k, window), None, queries, keys, device)
        return replace(self, fused=made)

    def _shared(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        """What *make* returns for *key*, made once for all layers."""
        # A compiled graph computes the tensor where it is read.
        if self.made is None or torch.compiler.is_compiling():
            return make()
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


@dataclass(frozen=True, eq=False)
class CausalInDocuments(Causal):
    """Each query reads its own position and those before it that are of its document, of several in
    a row; there is no memory.

    Attributes:
        positions: of each token in its document, int64 [B, T].
    """

    positions: Tensor = field(kw_only=True)

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        def make() -> Tensor:
            at = torch.arange(keys, device=device)
            distance = at[:, None] - at  # (T, T)
            mask = _in_reach(distance, self.window) & (distance <= self.positions[:, :, None])
            return mask[:, None]  # (B, 1, T, T)

        return self._shared((device,), make)

    def prepare(self, queries: int, keys: int, device: torch.device, blocks: bool) -> AttentionMask:
        if not blocks:
            return self
        window, positions = self.window, self.positions

        def reads(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return _in_reach(q - k, window) & (q - k <= positions[b, q])

        return replace(self, fused=block_mask(reads, positions.size(0), queries, keys, device))


@dataclass(frozen=True, eq=False)
class Bidirectional(AttentionMask):
    """Each query reads every key of its row that is not padding.

    A row of padding only reads itself: its output is unused, a softmax over no keys is NaN.

    Attributes:
        padding: bool [B, S], True at padding; None: no row has any.
        read: the mask, [B, 1, 1, S].
    """

    padding: Tensor | None = None
    fused: Any = None
    read: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.padding is not None:  # once for all layers
            read = ~self.padding | self.padding.all(dim=1, keepdim=True)
            object.__setattr__(self, "read", read[:, None, None])

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        return self.read

    def prepare(self, queries: int, keys: int, device: torch.device, blocks: bool) -> AttentionMask:
        read = self.read
        if type(self) is not Bidirectional or read is None or not blocks:
            return self
        made = block_mask(lambda b, h, q, k: read[b, 0, 0, k], read.size(0), queries, keys, device)
        return replace(self, fused=made)


CAUSAL = Causal()


def _in_reach(distance: Tensor, window: int | None) -> Tensor:
    """Whether a query reads the key that stands *distance* before it."""
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))


# Flex attention, which skips the blocks of keys that no query of a block reads


def block_mask(reads: Callable[..., Tensor], rows: int | None, queries: int, keys: int, device: torch.device) -> Any:
    """The block mask of *reads*, a function of row, head, query and key; rows None: all alike."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(reads, rows, None, queries, keys, device)


@functools.cache
def _has_compiler() -> bool:
    """Whether torch can compile for CUDA: it needs triton, and triton a compiler for C."""
    compilers = (os.environ.get("CC", "").split(" ")[0], "cc", "gcc", "clang")
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, filter(None, compilers)))


@functools.cache
def _compiled_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _by_blocks(query: Tensor, key: Tensor, value: Tensor, blocks: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    # Without a compiler it computes all scores.
    compute: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    result: Tensor = compute(query, key, value, block_mask=blocks, enable_gqa=True)
    return result


class SelfAttention(nn.Module):
    """Multi-head self-attention over inputs that carry positions (Vaswani et al. 2017, §3.2).

    Args:
        embed_dim: channels C of the input and the output.
        num_heads: heads H.
        dropout: probability that an attention weight is dropped in training.
        head_dim: channels D of a head; C / H where it is not given.
        kv_heads: heads of keys and values, each for H / kv_heads successive heads of queries
            (Ainslie et al. 2023, "GQA"); H where it is not given.
        bias: whether the maps to queries, keys and values have biases.
        out_bias: whether the map of the output has one; as *bias* where it is not given.
        qk_norm: RMS norm of each head's queries and keys, with a gain [D] that the heads share: the
            scores cannot grow with the weights (Henry et al. 2020, "Query-key normalization for
            transformers"; Dehghani et al. 2023, "Scaling vision transformers to 22 billion
            parameters", for the gain and 1 / √D).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.kv_heads = kv_heads or num_heads
        self.dropout = dropout
        width, kv_width = num_heads * self.head_dim, self.kv_heads * self.head_dim
        # In the order of fairseq's parameters, by which optimizer states are numbered.
        self.k_proj = Linear(embed_dim, kv_width, bias)
        self.v_proj = Linear(embed_dim, kv_width, bias)
        self.q_proj = Linear(embed_dim, width, bias)
        self.out_proj = Linear(width, embed_dim, bias if out_bias is None else out_bias)
        # The bound that one packed matrix [3C, C] would have, √(6 / 4C), as in fairseq.
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if qk_norm else None

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        positions: Any = None,
        visible: AttentionMask = CAUSAL,
        cache: LayerCache | None = None,
        past_length: int = 0,
    ) -> Tensor:
        """Attend from each position of *x* to the visible ones of *x* and memory: [B, T, C].

        Args:
            x: [B, T, C].
            memory: [B, M, C], the same kind of values from earlier positions.
            positions: unused here; in subclasses the positions of memory and segment.
            visible: the keys that each query reads; with a cache, or with distances, causal only.
            cache: in incremental inference, earlier keys and values; *x* is added to it.
            past_length: how many positions of *cache* are filled.

        Raises:
            ValueError: *positions* are missing, or *visible* is not causal where it must be.
        """
        if cache is None:
            query, keys, values = self._project(x, memory, positions)
        else:
            query, keys, values = self._continue(x, cache, past_length)
        attended = self._attend(query, keys, values, positions, visible, cache)
        return self.out_proj(attended.transpose(1, 2).flatten(2))

    def prepare(self, visible: AttentionMask, queries: int, keys: int, device: torch.device) -> AttentionMask:
        """Return *visible* with what attention on *device* reads in place of its mask."""
        # Elsewhere torch's functions would make a mask in each layer.
        if not is_cuda(device):
            return visible
        # Flex attention has no dropout, and no narrower heads.
        is_flexible = queries >= _BLOCK and self.head_dim >= 16 and not (self.training and self.dropout)
        is_flexible = is_flexible and _has_compiler()
        return visible.prepare(queries, keys, device, is_flexible)

    def _attend(
        self,
        query: Tensor,
        keys: KVChunks,
        values: KVChunks,
        positions: Any,
        visible: AttentionMask,
        cache: LayerCache | None,
    ) -> Tensor:
        """Weighted sums of values, [B, H, T, D], for what :meth:`_project` or *cache* gave."""
        if cache is not None and not isinstance(visible, Causal):
            raise ValueError("incremental attention is causal")
        # The cache has keys before their norm: their positions change as the segment ages.
        query, *keys = self._normalize(query, *keys)
        if cache is not None and isinstance(visible, Causal) and visible != CAUSAL:
            count = keys[0].size(2)
            nearest = slice(count - visible.reach(query.size(2), count), count)
            keys, values = [keys[0][:, :, nearest]], [values[0][:, :, nearest]]
        return attend(query, keys, values, visible, self.dropout if self.training else 0.0)

    @torch.no_grad()
    def weights(
        self, x: Tensor, memory: Tensor | None = None, positions: Any = None, visible: AttentionMask = CAUSAL
    ) -> Tensor:
        """Attention probabilities for the arguments of :meth:`forward`: [B, H, T, M + T]."""
        query, keys, _ = self._project(x, memory, positions)
        query, key = self._normalize(query, concat_chunks(keys))
        key = _repeated(key, self.num_heads) if self.kv_heads < self.num_heads else key
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.head_dim)  # (B, H, T, M + T)
        bias = visible.bias(query.size(2), key.size(2), query.device, query.dtype)
        return (scores if bias is None else scores + bias).softmax(-1)

    def new_cache(self, batch: int, length: int, positions: Any = None) -> LayerCache:
        """Room for *length* positions in *batch* rows; *positions* is for subclasses.

        Under autocast the cache has the lower precision: attention does not convert it.
        """
        projections = (self.q_proj, self.k_proj, self.v_proj)
        # One matrix for the three: a step of one token costs more in calls than in arithmetic.
        weight = torch.cat([p.weight for p in projections])
        bias = torch.cat([p.weight.new_zeros(p.out_features) if p.bias is None else p.bias for p in projections])
        # A row for each position, as position-infused attention needs it; without positions all are
        # one row in memory.
        bias = bias.expand(length, -1)
        if torch.is_autocast_enabled(weight.device.type):
            weight = weight.to(torch.get_autocast_dtype(weight.device.type))
        shape = (batch, self.kv_heads, length, self.head_dim)
        return LayerCache(weight.new_empty(shape), weight.new_empty(shape), weight, bias.to(weight.dtype))

    def fill(self, cache: LayerCache, x: Tensor) -> None:
        """Let *cache* hold *x* [B, M, C] as its first positions, without biases of positions."""
        for room, projection in ((cache.keys, self.k_proj), (cache.values, self.v_proj)):
            room[:, :, : x.size(1)] = self._heads(projection(x.to(projection.weight.dtype)))

    def _project(self, x: Tensor, memory: Tensor | None, positions: Any) -> tuple[Tensor, KVChunks, KVChunks]:
        """Queries [B, H, T, D], keys and values of M + T positions, before norms."""
        # A restored memory may be of another precision.
        memory = None if memory is None else memory.to(x.dtype)
        infused, infused_memory = self._infuse(x, memory, positions)
        heads = self._heads
        queries, keys, values = heads(self.q_proj(infused)), [heads(self.k_proj(infused))], [heads(self.v_proj(x))]
        if memory is not None:
            keys, values = [heads(self.k_proj(infused_memory)), *keys], [heads(self.v_proj(memory)), *values]
        return queries, keys, values

    def _infuse(self, x: Tensor, memory: Tensor | None, positions: Any) -> tuple[Tensor, Tensor | None]:
        """The inputs of queries and keys: the segment [B, T, C] and the memory [B, M, C]."""
        return x, memory

    def _continue(self, x: Tensor, cache: LayerCache, past_length: int) -> tuple[Tensor, KVChunks, KVChunks]:
        """Queries of *x*, and all keys and values of *cache*, *x*'s included, before norms."""
        batch, tokens, _ = x.shape
        end = past_length + tokens
        # One position has one bias, which the matrix product adds.
        if tokens == 1:
            projected = F.linear(x, cache.weight, cache.bias[past_length])
        else:
            projected = F.linear(x, cache.weight) + cache.bias[past_length:end]
        heads = projected.view(batch, tokens, -1, self.head_dim).transpose(1, 2)
        query, key, value = heads.split((self.num_heads, self.kv_heads, self.kv_heads), dim=1)  # (B, ·, T, D)
        query, key = self._placed(query, key, cache, past_length)
        cache.keys[:, :, past_length:end] = key
        cache.values[:, :, past_length:end] = value
        return query, [cache.keys[:, :, :end]], [cache.values[:, :, :end]]

    def _placed(self, query: Tensor, key: Tensor, cache: LayerCache, start: int) -> tuple[Tensor, Tensor]:
        """Queries and keys of the positions from *start* on as *cache* holds them."""
        return query, key

    def _normalize(self, query: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
        """Queries and keys [B, H, …, D] after their norms, if any, computed in float32."""
        if self.q_norm is None or self.k_norm is None:
            return query, *keys
        return tuple(
            # In the order of memory: time before heads.
            rms_norm(x.transpose(1, 2), norm.weight, norm.eps).transpose(1, 2)
            for x, norm in ((query, self.q_norm), *((key, self.k_norm) for key in keys))
        )

    def _heads(self, x: Tensor) -> Tensor:
        """The heads of *x* [B, T, H·D], a view of it: [B, H, T, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class PositionInfusedAttention(SelfAttention):
    """Positions are added to the inputs of queries and keys, not of values (Shortformer, §5).

    ``positions`` is the position table of memory and segment, [M + T, C], or without memory one of
    each row, [B, T, C]; a cache wants the table of all its room. The memory takes positions
    0 … M − 1, the segment M … M + T − 1, so cached values stay valid as they move back.
    """

    def new_cache(self, batch: int, length: int, positions: Tensor | None = None) -> LayerCache:
        if positions is None:
            raise ValueError("position-infused attention needs the position table of its cache")
        cache = super().new_cache(batch, length)
        # In float32: the result is computed once and added to every token's projection.
        with torch.autocast(positions.device.type, enabled=False):
            query, key = (F.linear(positions, p.weight.to(positions.dtype)) for p in (self.q_proj, self.k_proj))
        added = torch.cat([query, key, torch.zeros_like(key)], dim=1)  # (S, 3C)
        cache.bias = (cache.bias + added).to(cache.weight.dtype)
        cache.position_keys = self._heads(key[None])
        return cache

    def _infuse(self, x: Tensor, memory: Tensor | None, positions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if positions is None:
            raise ValueError("position-infused attention needs the position table of memory and segment")
        start = positions.size(-2) - x.size(1)
        past = None if memory is None else memory + positions[:start].to(memory.dtype)
        return x + positions[..., start:, :].to(x.dtype), past


class RotaryAttention(SelfAttention):
    """Queries and keys are turned by angles that grow with position (Su et al. 2021, "RoFormer").

    ``positions`` is the table of memory and segment, [M + T, 2, R/2] of
    :class:`~fairseq.modules.positions.Rotation`; a cache wants the table of all its room. As with
    position-infused attention, the memory takes positions 0 … M − 1.
    """

    def new_cache(self, batch: int, length: int, positions: Tensor | None = None) -> LayerCache:
        cache = super().new_cache(batch, length)
        cache.rotation = positions
        return cache

    def _project(self, x: Tensor, memory: Tensor | None, positions: Tensor | None) -> tuple[Tensor, KVChunks, KVChunks]:
        if positions is None:
            raise ValueError("rotary attention needs the table of rotations of memory and segment")
        query, keys, values = super()._project(x, memory, positions)
        query, *keys = super()._normalize(query, *keys)
        start = positions.size(0) - x.size(1)
        of_memory, of_segment = positions[:start], positions[start:]
        tables = [of_segment] if memory is None else [of_memory, of_segment]
        return rotated(query, of_segment), [*map(rotated, keys, tables)], values

    def _placed(self, query: Tensor, key: Tensor, cache: LayerCache, start: int) -> tuple[Tensor, Tensor]:
        if cache.rotation is None:
            raise ValueError("rotary attention needs the table of rotations of its cache")
        table = cache.rotation[start : start + query.size(2)]
        query, key = super()._normalize(query, key)
        return rotated(query, table), rotated(key, table)

    def _normalize(self, query: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
        # Norms come before the rotation, as the gains are not equal in the channels of a pair.
        return query, *keys


def kernels_for(query: Tensor, keys: KVChunks, values: KVChunks, p: float, *by_distance: Tensor) -> Any:
    """The kernels in C if they compute this attention,
    with its other query and table; else None."""
    if p >= 1.0 or not (torch.is_grad_enabled() or query.size(2) >= _FEW):
        return None
    module = kernels("attention", query, *keys, *values, *by_distance)
    return module if module is not None and module.computes(query, keys, values, p, *by_distance) else None


def attend(
    query: Tensor, keys: KVChunks, values: KVChunks, visible: AttentionMask = CAUSAL, dropout_p: float = 0.0
) -> Tensor:
    """softmax(Q Kᵀ / √D) V over the visible keys.

    Shape: query [B, H, T, D]; keys and values [B, G, ·, D], each for H / G successive heads of
    queries → [B, H, T, D].
    """
    heads, queries, groups = query.size(1), query.size(2), keys[0].size(1)
    if groups < heads and queries == 1 and visible.mask(1, sum(key.size(2) for key in keys), query.device) is None:
        # A single token's queries of one group are as many queries of one head, which needs no
        # copies of the cache.
        folded = query.reshape(query.size(0), groups, heads // groups, -1)  # (B, G, H/G, D)
        return attend(folded, keys, values, Bidirectional(), dropout_p).reshape(query.shape)
    if dispatch.is_cpu(query):
        if groups < heads:
            # With keys for every head, C kernels compute, and torch's backward pass is faster.
            keys, values = ([_repeated(piece, heads) for piece in pieces] for pieces in (keys, values))
        if isinstance(visible, Causal | Bidirectional) and kernels_for(query, keys, values, dropout_p) is not None:
            return _by_kernel(query, keys, values, visible, dropout_p)
        if dropout_p > 0.0 and not torch.compiler.is_compiling():
            return _by_products(query, keys, values, visible, dropout_p)  # torch's kernel has no dropout on CPUs
    return _by_torch(query, concat_chunks(keys), concat_chunks(values), visible, dropout_p)


def _by_kernel(query: Tensor, keys: KVChunks, values: KVChunks, visible: AttentionMask, dropout_p: float) -> Tensor:
    # The kernel skips the keys that are ahead of a query; documents hide others.
    causal = visible == CAUSAL or isinstance(visible, CausalInDocuments)
    bias = (
        None
        if visible == CAUSAL
        else visible.bias(query.size(2), sum(key.size(2) for key in keys), query.device, query.dtype)
    )
    return compiled("attention").attention(query, keys, values, bias, dropout_p, causal)


def _by_products(query: Tensor, keys: KVChunks, values: KVChunks, visible: AttentionMask, dropout_p: float) -> Tensor:
    key, value = concat_chunks(keys), concat_chunks(values)
    bias = visible.bias(query.size(2), key.size(2), query.device, query.dtype)
    bias = query.new_zeros(()) if bias is None else bias
    bias = bias.expand(*query.shape[:2], -1, -1).flatten(0, 1) if bias.dim() == 4 else bias
    q, k = query.flatten(0, 1), key.flatten(0, 1)
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=1 / math.sqrt(query.size(-1)))  # (B·H, T, S)
    return dropout(scores.softmax(-1), dropout_p).view(*query.shape[:3], -1) @ value


def _by_torch(query: Tensor, key: Tensor, value: Tensor, visible: AttentionMask, dropout_p: float) -> Tensor:
    heads, queries, keys, fused = query.size(1), query.size(2), key.size(2), visible.fused
    if fused is not None and not isinstance(fused, Tensor):
        return _by_blocks(query, key, value, fused)
    # `is_causal` aligns the first query with the first key.
    is_causal = visible == CAUSAL and 1 < queries == keys
    mask = None if is_causal else fused if isinstance(fused, Tensor) else visible.mask(queries, keys, query.device)
    shares = key.size(1) < heads
    if shares and not (mask is fused and _shares_keys(query, key, value, dropout_p, is_causal)):
        key, value, shares = _repeated(key, heads), _repeated(value, heads), False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=shares
    )


def _shares_keys(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool) -> bool:
    """Whether a kernel reads each of the keys for several heads of queries: the flash kernel, which
    reads no mask."""
    import torch.nn.attention.bias  # it lets compiled graphs ask

    params = torch.backends.cuda.SDPAParams(query, key, value, None, dropout_p, is_causal, True)
    return torch.backends.cuda.can_use_flash_attention(params)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Keys or values [B, G, S, D] for each of H *heads*: [B, H, S, D]."""
    return x.repeat_interleave(heads // x.size(1), dim=1)
