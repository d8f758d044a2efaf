"""Packed decoder layers: one call reads a token through all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.inference.kernels.packed import NOTHING, TYPES, Matrix, PackedMatrix, floats, pack, pointer
from fairseq.modules.attention import PositionInfusedAttention, SelfAttention
from fairseq.modules.memory import KeyValueCache, LayerCache, RelativeLayerCache
from fairseq.modules.native import library
from fairseq.modules.relative_attention import RelativeAttention, ShawAttention
from fairseq.modules.transformer_layer import LayerNorm, TransformerLayer

ATTENTION = (SelfAttention, PositionInfusedAttention, RelativeAttention, ShawAttention)
LEAST_WORK = 1 << 17  # multiplications per thread; less work takes no longer than synchronising threads
ACTIVATIONS = {"relu": 0, "gelu": 1, "gelu_accurate": 2, "gelu_fast": 2, "tanh": 3, "linear": 4, "relu_squared": 5}


def decoding_kernels() -> ctypes.CDLL | None:
    """The compiled kernels; None, with a warning, if they cannot be compiled."""
    compiled = library("decoding", Path(__file__).with_name("step.c"))
    if compiled is not None:
        # ctypes takes results for C's int, which would cut sizes of 64 bits.
        compiled.scratch_size.restype = compiled.best_size.restype = ctypes.c_long
    return compiled


def threads_for(work: int) -> int:
    """Number of threads for a parallel region of *work* multiplications."""
    return max(1, min(torch.get_num_threads(), work // LEAST_WORK))


def _structure(name: str, *fields: tuple[str, Any]) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


def _longs(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_long) for name in names]


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


# As in step.c.
_Layer = _structure(
    "_Layer",
    *((name, Matrix) for name in ("qkv", "out", "fc1", "fc2")),
    *_pointers("attention_norm", "final_norm", "content_bias", "position_bias"),
)
_Stack = _structure(
    "_Stack",
    *_longs("layers", "width", "heads", "head_dim", "ffn_width", "pre_norm", "activation", "threads"),
    ("norm_eps", ctypes.c_float),
    *_pointers("layer", "norm"),
    ("project", Matrix),
)
_LayerCache = _structure("_LayerCache", *_pointers("keys", "values", "bias", "distance_keys", "distance_scores"))
_Cache = _structure(
    "_Cache", *_longs("type", "rows", "length", "bias_stride", "past_length", "window"), *_pointers("layer")
)


def packable(layer: nn.Module) -> bool:
    """Return whether the kernels support *layer*."""
    if type(layer) is not TransformerLayer or type(layer.self_attn) not in ATTENTION:
        return False
    if layer.self_attn.q_norm is not None:
        return False
    norms = layer.self_attn_layer_norm, layer.final_layer_norm
    return layer.activation_fn in ACTIVATIONS and all(type(norm) is LayerNorm for norm in norms)


class PackedStack:
    """Decoder layers, their final norm and output projection.

    Args:
        library: the compiled kernels.
        layers: of one size; see :func:`packable`.
        norm: after the last layer.
        project: after the norm.
        biases: ``r_w_bias`` and ``r_r_bias`` of relative attention, if the layers share them.
        int8: store matrices as int8; else in their own type.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[Any],
        norm: nn.Module | None = None,
        project: nn.Linear | None = None,
        *,
        biases: Any = None,
        int8: bool = False,
    ) -> None:
        self.library = library
        self.int8 = int8
        self.size = sum(p.numel() for p in layers[0].parameters())
        self.tensors: list[Any] = []  # tensors that the structures point to
        first = layers[0]
        attention = first.self_attn
        packed = (_Layer * len(layers))(*(self._layer(layer, biases) for layer in layers))
        projection = None if project is None else pack(project.weight, int8=int8)
        self.tensors += [packed, projection]
        self.width = first.fc1.in_features
        self.out_width = self.width if project is None else project.out_features
        self.struct = _Stack(
            *(len(layers), self.width, attention.num_heads, attention.head_dim, first.fc1.out_features),
            *(int(first.normalize_before), ACTIVATIONS[first.activation_fn], 1, first.final_layer_norm.eps),
            ctypes.addressof(packed),
            None if norm is None else self._norm(norm),
            NOTHING if projection is None else projection.struct,
        )
        self._bound: _Binding | None = None

    def read(self, embedded: Tensor, cache: KeyValueCache, window: int | None = None) -> Tensor:
        """Read tokens one by one and add them to *cache*.

        Args:
            embedded: embeddings, float32 [B, T, C]; at most as many tokens as the cache has room for.
            window: most keys that a token attends to.

        Returns:
            Hidden states, float32 [B, T, C'].
        """
        rows, tokens, _ = embedded.shape
        # The kernel writes at addresses: beyond the room is other memory.
        if tokens > cache.room:
            raise ValueError(f"{tokens} tokens: the cache's segment has room for {cache.room}")
        embedded = embedded.contiguous()
        self.struct.threads = threads_for(self.size * rows)
        bound = self._bind(cache)
        bound.struct.past_length, bound.struct.window = cache.length, window or 0
        hidden = torch.empty(rows, tokens, self.out_width)
        self.library.steps(
            ctypes.byref(self.struct),
            ctypes.byref(bound.struct),
            ctypes.c_void_p(embedded.data_ptr()),
            ctypes.c_long(tokens),
            ctypes.c_void_p(hidden.data_ptr()),
            ctypes.c_void_p(bound.scratch.data_ptr()),
        )
        cache.advance(tokens)
        return hidden

    def _bind(self, cache: KeyValueCache) -> _Binding:
        """Pointers to the tensors of *cache*, rebuilt if the tensors have changed since the last step."""
        bound = self._bound
        first = cache.layers[0].keys
        # Other tensors are another cache, or this one after rows were selected.
        if bound is None or bound.first is not first or bound.struct_threads != self.struct.threads:
            self._bound = bound = _Binding.of(cache, self.library, self.struct)
        return bound

    def _layer(self, layer: Any, biases: Any) -> Any:
        attention = layer.self_attn
        # Biases are in the cache, one for each position; see SelfAttention.new_cache.
        weight = torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
        matrices = [
            pack(weight, int8=self.int8),
            *(pack(m.weight, m.bias, int8=self.int8) for m in (attention.out_proj, layer.fc1, layer.fc2)),
        ]
        self.tensors += matrices
        biases_of_layer = [getattr(attention, name, None) for name in ("r_w_bias", "r_r_bias")]
        if biases_of_layer[0] is None and biases is not None:
            biases_of_layer = [biases.r_w_bias, biases.r_r_bias]
        content, position = map(self._keep, biases_of_layer)
        norms = self._norm(layer.self_attn_layer_norm), self._norm(layer.final_layer_norm)
        return _Layer(*(matrix.struct for matrix in matrices), *norms, content, position)

    def _norm(self, norm: Any) -> Any:
        return self._keep(torch.stack([norm.weight, norm.bias]))

    def _keep(self, tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        self.tensors.append(floats(tensor))
        return pointer(self.tensors[-1])


@dataclass(frozen=True)
class _Binding:
    """Kernel arguments for a cache.

    Attributes:
        first: keys of the first layer; other keys mean another cache.
        scratch: float32 working memory.
        objects: what the structures point to.
    """

    struct: Any
    struct_threads: int
    first: Tensor
    scratch: Tensor
    objects: tuple[Any, ...]

    @classmethod
    def of(cls, cache: KeyValueCache, library: ctypes.CDLL, stack: Any) -> _Binding:
        scores = [_distance_scores(layer) for layer in cache.layers]
        layers = (_LayerCache * len(cache.layers))(
            *(_layer_cache(layer, score) for layer, score in zip(cache.layers, scores, strict=True))
        )
        first = cache.layers[0]
        keys = first.keys
        stride = first.bias.stride(0)
        struct = _Cache(TYPES[keys.dtype], keys.size(0), keys.size(2), stride, 0, 0, ctypes.addressof(layers))
        size = library.scratch_size(ctypes.byref(stack), ctypes.byref(struct))
        return cls(struct, stack.threads, keys, torch.empty(size), (layers, scores, [*cache.layers]))


def _layer_cache(layer: LayerCache, scores: Tensor | None) -> Any:
    if not layer.keys.is_contiguous() or not layer.values.is_contiguous():
        raise ValueError("the cache's keys and values must be contiguous")
    distances = layer.distance_keys if isinstance(layer, RelativeLayerCache) else None
    return _LayerCache(*(pointer(t) for t in (layer.keys, layer.values, layer.bias, distances, scores)))


def _distance_scores(layer: LayerCache) -> Tensor | None:
    scores = layer.distance_scores if isinstance(layer, RelativeLayerCache) else None
    return None if scores is None else floats(scores)


def linear(library: ctypes.CDLL, matrix: PackedMatrix, x: Tensor) -> Tensor:
    """x Wᵀ + b: float32 [B, K] → float32 [B, N]."""
    x = floats(x)
    rows, threads = x.size(0), threads_for(x.size(0) * matrix.inputs * matrix.outputs)
    result = torch.empty(rows, matrix.outputs)
    scratch = torch.empty(threads * rows * (matrix.inputs + 1))
    library.linear(
        ctypes.byref(matrix.struct),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_long(rows),
        ctypes.c_void_p(result.data_ptr()),
        ctypes.c_long(threads),
        ctypes.c_void_p(scratch.data_ptr()),
    )
    return result
