"""Packed decoder layers: one call reads a token through all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.inference.packed import NOTHING, TYPES, Matrix, floats, longs, pack, pointer, pointers
from fairseq.modules.attention import PositionInfusedAttention, RotaryAttention, SelfAttention
from fairseq.modules.memory import KeyValueCache, RelativeLayerCache
from fairseq.modules.norms import LayerNorm, RMSNorm
from fairseq.modules.relative_attention import RelativeAttention, ShawAttention
from fairseq.modules.transformer_layer import TransformerLayer

ATTENTION = (SelfAttention, PositionInfusedAttention, RotaryAttention, RelativeAttention, ShawAttention)
LEAST_WORK = 1 << 17  # multiplications per thread; less work takes no longer than synchronising threads
# In the order of decoding.c.
KINDS = ("relu", "gelu", "gelu_accurate", "tanh", "linear", "relu_squared", "silu")
ACTIVATIONS = {**{name: kind for kind, name in enumerate(KINDS)}, "gelu_fast": KINDS.index("gelu_accurate")}


def threads_for(work: int) -> int:
    """Number of threads for a parallel region of *work* multiplications."""
    return max(1, min(torch.get_num_threads(), work // LEAST_WORK))


# As in decoding.c.
class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("qkv", "out", "fc1", "fc2", "fc3")),
        *pointers("attention_norm", "final_norm", "content_bias", "position_bias", "query_norm", "key_norm"),
    ]


class _Stack(ctypes.Structure):
    _fields_ = [
        *longs("layers", "width", "heads", "kv_heads", "head_dim", "ffn_width", "pre_norm", "parallel", "rms"),
        *longs("activation"),
        *((name, ctypes.c_float) for name in ("norm_eps", "head_norm_eps")),
        *pointers("layer", "norm"),
        ("project", Matrix),
    ]


class _LayerCache(ctypes.Structure):
    _fields_ = pointers("keys", "values", "bias", "distance_keys", "distance_scores", "rotation")


class _Cache(ctypes.Structure):
    _fields_ = [*longs("type", "rows", "length", "bias_stride", "rotated", "filled", "window"), *pointers("layer")]


def packable(layers: Sequence[nn.Module], norm: nn.Module | None = None) -> bool:
    """Return whether the kernels support *layers* with *norm* after the last one: they must be
    alike in all but their weights."""
    if not all(map(_supported, layers)):
        return False
    norms: list[Any] = [each for layer in layers for each in (layer.self_attn_layer_norm, layer.final_layer_norm)]
    norms += [] if norm is None else [norm]
    if not all(type(each) in (LayerNorm, RMSNorm) and each.weight is not None for each in norms):
        return False
    return len({(type(each), each.eps) for each in norms}) == len(set(map(_structure, layers))) == 1


def _supported(layer: nn.Module) -> bool:
    if type(layer) is not TransformerLayer or type(layer.self_attn) not in ATTENTION:
        return False
    # Without rotation, keys are cached before their norm, which the kernels do not have.
    if layer.self_attn.q_norm is not None and type(layer.self_attn) is not RotaryAttention:
        return False
    return layer.activation_fn in ACTIVATIONS


def _structure(layer: Any) -> tuple[object, ...]:
    """What the kernels take from the first layer for all."""
    attention = layer.self_attn
    heads = type(attention), attention.num_heads, attention.kv_heads, attention.head_dim
    norm = None if attention.q_norm is None else attention.q_norm.eps
    return (*heads, norm, layer.fc1.out_features, layer.normalize_before, layer.parallel, layer.activation_fn)


class PackedStack:
    """Decoder layers, their final norm and output projection.

    Args:
        library: the compiled kernels.
        layers: alike; see :func:`packable`.
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
        self.library, self.int8 = library, int8
        self.size = sum(p.numel() for p in layers[0].parameters())
        self.tensors: list[Any] = []  # that the structures point to
        first, attention = layers[0], layers[0].self_attn
        packed = (_Layer * len(layers))(*(self._layer(layer, biases) for layer in layers))
        projection = NOTHING if project is None else pack(project.weight, int8=int8)
        self.tensors += [packed, projection]
        self.width = first.fc1.in_features
        self.out_width = self.width if project is None else project.out_features
        self.struct = _Stack(
            *(len(layers), self.width, attention.num_heads, attention.kv_heads, attention.head_dim),
            *(first.fc1.out_features, first.normalize_before, first.parallel),
            *(isinstance(first.final_layer_norm, RMSNorm), ACTIVATIONS[first.activation_fn]),
            *(first.final_layer_norm.eps, 0.0 if attention.q_norm is None else attention.q_norm.eps),
            ctypes.addressof(packed),
            None if norm is None else self._norm(norm),
            projection,
        )

    def read(self, embedded: Tensor, cache: KeyValueCache, window: int | None = None) -> Tensor:
        """Read tokens one by one and add them to *cache*.

        Args:
            embedded: embeddings, float32 [B, T, C];
                at most as many tokens as the cache has room for.
            window: most keys that a token attends to.

        Returns:
            Hidden states, float32 [B, T, C'].
        """
        rows, tokens, _ = embedded.shape
        # The kernel writes at addresses: beyond the room is other memory.
        if tokens > cache.room:
            raise ValueError(f"{tokens} tokens: the cache's segment has room for {cache.room}")
        embedded = embedded.contiguous()
        bound = self._bind(cache, threads_for(self.size * rows))
        bound.struct.filled, bound.struct.window = cache.length, window or 0
        hidden = torch.empty(rows, tokens, self.out_width)
        results = hidden.data_ptr(), bound.threads, bound.scratch.data_ptr()
        stack, caches = ctypes.byref(self.struct), ctypes.byref(bound.struct)
        self.library.steps(stack, caches, embedded.data_ptr(), tokens, *results)
        cache.advance(tokens)
        return hidden

    def _bind(self, cache: KeyValueCache, threads: int) -> _Binding:
        """Pointers to the tensors of *cache*, rebuilt
        if the tensors have changed since the last step."""
        # The cache has them: threads of Python share the stack, and each has a cache of its own.
        bound = cache.bound
        # Other tensors are those after rows were selected.
        if not (isinstance(bound, _Binding) and bound.fits(self, cache, threads)):
            cache.bound = bound = _Binding(self, cache, threads)
        return bound

    def _layer(self, layer: Any, biases: object) -> _Layer:
        attention = layer.self_attn
        # Biases are in the cache, one for each position; see SelfAttention.new_cache.
        weight = torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
        matrices = [
            pack(weight, int8=self.int8),
            *(pack(m.weight, m.bias, int8=self.int8) for m in (attention.out_proj, layer.fc1, layer.fc2)),
            NOTHING if layer.fc3 is None else pack(layer.fc3.weight, layer.fc3.bias, int8=self.int8),
        ]
        self.tensors += matrices
        first = getattr(attention, "r_w_bias", None)
        shared = attention if first is not None else biases
        content, position = (getattr(shared, name, None) for name in ("r_w_bias", "r_r_bias"))
        norms = self._norm(layer.self_attn_layer_norm), self._norm(layer.final_layer_norm)
        of_heads = (None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm))
        return _Layer(*matrices, *norms, *map(self._keep, (content, position, *of_heads)))

    def _norm(self, norm: Any) -> Any:
        bias = getattr(norm, "bias", None)
        return self._keep(torch.stack([norm.weight, torch.zeros_like(norm.weight) if bias is None else bias]))

    def _keep(self, tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        self.tensors.append(floats(tensor))
        return pointer(self.tensors[-1])


class _Binding:
    """Kernel arguments for a cache.

    Attributes:
        stack: the layers that read.
        first: keys of the first layer; other keys mean other tensors.
        scratch: float32 working memory of *threads*.
        objects: what the structures point to.
    """

    def __init__(self, stack: PackedStack, cache: KeyValueCache, threads: int) -> None:
        scores: list[Tensor] = []
        layers = (_LayerCache * len(cache.layers))()
        for number, layer in enumerate(cache.layers):
            if not layer.keys.is_contiguous() or not layer.values.is_contiguous():
                raise ValueError("the cache's keys and values must be contiguous")
            distance_keys = distance_scores = None
            if isinstance(layer, RelativeLayerCache):
                distance_keys = layer.distance_keys
                if layer.distance_scores is not None:
                    distance_scores = floats(layer.distance_scores)
                    scores.append(distance_scores)
            tensors = layer.keys, layer.values, layer.bias, distance_keys, distance_scores, layer.rotation
            layers[number] = _LayerCache(*map(pointer, tensors))
        self.objects = layers, scores, [*cache.layers]
        self.stack, self.first, self.threads = stack, cache.layers[0].keys, threads
        rows, _, length, _ = self.first.shape
        stride, table = cache.layers[0].bias.stride(0), cache.layers[0].rotation
        rotated = 0 if table is None else 2 * table.size(-1)
        self.struct = _Cache(TYPES[self.first.dtype], rows, length, stride, rotated, 0, 0, ctypes.addressof(layers))
        size = stack.library.scratch_size(ctypes.byref(stack.struct), ctypes.byref(self.struct), threads)
        self.scratch = torch.empty(size)

    def fits(self, stack: PackedStack, cache: KeyValueCache, threads: int) -> bool:
        """Whether these are the arguments for *stack* and *cache*, by so many threads."""
        return self.stack is stack and self.first is cache.layers[0].keys and self.threads == threads


def linear(library: ctypes.CDLL, matrix: Matrix, x: Tensor) -> Tensor:
    """x Wᵀ + b: float32 [B, K] → float32 [B, N]."""
    x, rows = floats(x), x.size(0)
    threads = threads_for(rows * matrix.inputs * matrix.outputs)
    result = torch.empty(rows, matrix.outputs)
    scratch = torch.empty(threads * rows * (matrix.inputs + 1))
    library.linear(ctypes.byref(matrix), x.data_ptr(), rows, result.data_ptr(), threads, scratch.data_ptr())
    return result
