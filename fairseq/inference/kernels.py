"""A model packed for the kernels in C (``fairseq/kernels/decoding.c``): one call reads a token
through all layers.

The structures match those of ``decoding.h``, ``decoding.c`` and ``words.h``. They hold addresses,
which Python's memory management does not see: what they point to is kept beside them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.kernels import build
from fairseq.models.base import BaseFairseqModel
from fairseq.models.decoder import DecoderModel
from fairseq.models.transformer_lm import TransformerDecoder, TransformerLanguageModel
from fairseq.models.transformer_xl import TransformerXL, TransformerXLDecoder
from fairseq.models.transformer_xl_settings import BY_DISTANCE
from fairseq.modules.adaptive_input import AdaptiveInput
from fairseq.modules.adaptive_softmax import AdaptiveSoftmax, TiedLinear
from fairseq.modules.attention import PositionInfusedAttention, RotaryAttention, SelfAttention
from fairseq.modules.clustered_softmax import ClusteredSoftmax
from fairseq.modules.memory import KeyValueCache, RelativeLayerCache
from fairseq.modules.norms import LayerNorm, RMSNorm
from fairseq.modules.output_layer import LinearOutput, OutputLayer
from fairseq.modules.relative_attention import RelativeAttention, ShawAttention
from fairseq.modules.transformer_layer import TransformerLayer

SOURCE = Path(build.__file__).with_name("decoding.c")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
KINDS = ("relu", "gelu", "gelu_accurate", "tanh", "linear", "relu_squared", "silu")  # in the order of decoding.c
ACTIVATIONS = {**{name: kind for kind, name in enumerate(KINDS)}, "gelu_fast": KINDS.index("gelu_accurate")}
ATTENTION = (SelfAttention, PositionInfusedAttention, RotaryAttention, RelativeAttention, ShawAttention)
LEAST_WORK = 1 << 17  # multiplications per thread; less work takes no longer than synchronising threads


# ---- the compiled functions and their structures ----


def decoding_kernels() -> ctypes.CDLL | None:
    """The compiled kernels; None, with a warning, if they cannot be compiled."""
    return build.library("decoding", SOURCE, _declare)


def _declare(compiled: ctypes.CDLL) -> None:
    address, number = ctypes.c_void_p, ctypes.c_long
    compiled.steps.argtypes = (address, address, address, number, address, number, address)
    compiled.linear.argtypes = (address, address, number, address, number, address)
    compiled.embed.argtypes = (address, address, number, address, address, number, address)
    compiled.best.argtypes = (address, address, number, number, address, number, address, address, number, address)
    compiled.scratch_size.argtypes = (address, address, number)
    compiled.best_size.argtypes = (address, number, number)
    # ctypes takes results for C's int, which would cut sizes of 64 bits.
    compiled.scratch_size.restype = compiled.best_size.restype = compiled.lanes.restype = number


def _longs(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_long) for name in names]


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


class Matrix(ctypes.Structure):
    """A linear map x Wᵀ + b.

    Attributes:
        tensors: packed weight, scale and bias.
    """

    _fields_ = [*_longs("type", "outputs", "inputs"), *_pointers("weight", "scale", "bias")]
    tensors: tuple[Tensor | None, ...] = ()


NOTHING = Matrix()


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, Matrix) for name in ("qkv", "out", "fc1", "fc2", "fc3")),
        *_pointers("attention_norm", "final_norm", "content_bias", "position_bias", "query_norm", "key_norm"),
    ]


class _Stack(ctypes.Structure):
    _fields_ = [
        *_longs("layers", "width", "heads", "kv_heads", "head_dim", "ffn_width", "pre_norm", "parallel", "rms"),
        *_longs("activation"),
        *((name, ctypes.c_float) for name in ("norm_eps", "head_norm_eps")),
        *_pointers("layer", "norm"),
        ("project", Matrix),
    ]


class _LayerCache(ctypes.Structure):
    _fields_ = _pointers("keys", "values", "bias", "distance_keys", "distance_scores", "rotation")


class _Cache(ctypes.Structure):
    _fields_ = [*_longs("type", "rows", "length", "bias_stride", "rotated", "filled", "window"), *_pointers("layer")]


class _Embedding(ctypes.Structure):
    _fields_ = [
        *_longs("bands", "width", "widest", "table_type"),
        *_pointers("bounds", "tables", "projections"),
        ("scale", ctypes.c_float),
    ]


class _Band(ctypes.Structure):
    _fields_ = [("narrow", Matrix), ("words", Matrix)]


class _Output(ctypes.Structure):
    _fields_ = [*_longs("bands", "width", "widest"), *_pointers("bounds", "band")]


# ---- which models ----


def packable(model: BaseFairseqModel) -> bool:
    """Return whether the kernels cover all of *model*, and no hooks are registered on it."""
    # A subclass may compute something else.
    if not isinstance(model, DecoderModel) or type(model) not in (TransformerLanguageModel, TransformerXL):
        return False
    # A hook wants to see its module run, which kernels leave out.
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return False
    decoder, norm = model.decoder, None
    if type(decoder) is TransformerDecoder:
        norm = decoder.layer_norm
    elif type(decoder) is not TransformerXLDecoder or decoder.cfg.position_encoding not in BY_DISTANCE:
        return False
    if next(model.parameters()).dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if type(model.output_layer) not in (LinearOutput, AdaptiveSoftmax, ClusteredSoftmax):
        return False
    layers: Any = [*decoder.layers]
    if not all(map(_supported, layers)):
        return False
    norms: list[Any] = [each for layer in layers for each in (layer.self_attn_layer_norm, layer.final_layer_norm)]
    norms += [] if norm is None else [norm]
    if not all(type(each) in (LayerNorm, RMSNorm) and each.weight is not None for each in norms):
        return False
    # Layers must be alike in all but their weights.
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


# ---- weights ----


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 values and a float32 scale for each row: [N, K] → [N, K], [N]. Symmetric, rounded to
    nearest."""
    weight = weight.float()
    scale = weight.abs().amax(1) / 127
    # A row of zeros may have any scale but 0, by which it would be divided.
    steps = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (weight / steps[:, None]).round_().to(torch.int8), steps


def dequantized(weight: Tensor) -> Tensor:
    """*weight* [N, K] rounded to int8 precision, in its own type."""
    values, scale = quantize(weight)
    return (values.float() * scale[:, None]).to(weight.dtype)


def pack(library: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None, *, int8: bool = False) -> Matrix:
    """Pack a weight [N, K], in its own type or int8, and a bias [N]: outputs in panels of a
    register's width."""
    scale, lanes = None, library.lanes()
    weight = weight.detach()
    outputs, inputs = weight.shape
    if int8:
        weight, scale = quantize(weight)
    # Outputs filled with zeros to full panels: the kernels have no code for a rest.
    weight = F.pad(weight, (0, 0, 0, -outputs % lanes))
    if weight.dtype == torch.bfloat16:  # in pairs along K
        weight = F.pad(weight, (0, inputs % 2)).unflatten(1, (-1, 2))
    # The outputs of a panel lie side by side: one vector load feeds a multiplication with one
    # broadcast input.
    packed = weight.unflatten(0, (-1, lanes)).transpose(1, 2).contiguous()  # (N / L, K, L), or (N / L, K / 2, L, 2)
    bias = None if bias is None else _floats(bias)
    matrix = Matrix(TYPES[packed.dtype], outputs, inputs, *map(_pointer, (packed, scale, bias)))
    matrix.tensors = packed, scale, bias
    return matrix


def _floats(tensor: Tensor) -> Tensor:
    """*tensor* as contiguous float32."""
    return tensor.detach().float().contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _threads_for(work: int) -> int:
    """Number of threads for a parallel region of *work* multiplications."""
    return max(1, min(torch.get_num_threads(), work // LEAST_WORK))


# ---- the model ----


class PackedModel:
    """A model whose single tokens, words in and words out are computed by the kernels.

    Threads of Python share it: a call only reads, and a cache belongs to one thread.

    Args:
        library: the compiled kernels.
        model: see :func:`packable`; it computes embeddings that the kernels do not support.
        source: the model whose matrices are packed, *model* or what it was rounded from.
        int8: pack the matrices of layers and words as int8.

    Attributes:
        width: channels of hidden states.
        window: most keys that a token attends to; None: all.
        bands: projection and words of each band of the output layer.
    """

    def __init__(self, library: ctypes.CDLL, model: DecoderModel, source: DecoderModel, *, int8: bool = False) -> None:
        self.library, self.model, self.int8 = library, model, int8
        self.kept: list[Any] = []  # what the structures point to
        decoder, of_source = model.decoder, source.decoder
        norm: Any = None
        project = widen = biases = None
        self.window: int | None = None
        has_notes = decoder.ngram_notes is not None or decoder.word_notes is not None
        embeds = type(decoder.embed_tokens) in (nn.Embedding, AdaptiveInput) and not has_notes
        if isinstance(decoder, TransformerDecoder) and isinstance(of_source, TransformerDecoder):
            norm, project, widen = of_source.layer_norm, of_source.project_out_dim, decoder.project_in_dim
            self.window = decoder.cfg.attention_window
            embeds = embeds and decoder.layernorm_embedding is None and decoder.token_shift is None
        elif isinstance(decoder, TransformerXLDecoder):
            biases = decoder.attention_biases
            # `same_length`: every token attends to as many keys, so that the kernel leaves out the
            # farther ones.
            self.window = decoder.memory_length if decoder.cfg.same_length else None
        self.embedding = self._pack_embedding(decoder.embed_tokens, widen, decoder.embed_scale) if embeds else None
        self.stack = self._pack_layers([*of_source.layers], norm, project, biases)
        self._pack_output(of_source.output_distribution)

    def _pack_layers(self, layers: Sequence[Any], norm: Any, project: nn.Linear | None, biases: Any) -> _Stack:
        first, attention = layers[0], layers[0].self_attn
        self.layer_size = sum(p.numel() for p in first.parameters())
        packed = (_Layer * len(layers))(*(self._pack_layer(layer, biases) for layer in layers))
        projection = NOTHING if project is None else pack(self.library, project.weight, int8=self.int8)
        self.kept += [packed, projection]
        self.width = first.fc1.in_features if project is None else project.out_features
        return _Stack(
            *(len(layers), first.fc1.in_features, attention.num_heads, attention.kv_heads, attention.head_dim),
            *(first.fc1.out_features, first.normalize_before, first.parallel),
            *(isinstance(first.final_layer_norm, RMSNorm), ACTIVATIONS[first.activation_fn]),
            *(first.final_layer_norm.eps, 0.0 if attention.q_norm is None else attention.q_norm.eps),
            ctypes.addressof(packed),
            None if norm is None else self._pack_norm(norm),
            projection,
        )

    def _pack_layer(self, layer: Any, biases: Any) -> _Layer:
        attention = layer.self_attn
        # Biases are in the cache, one for each position; see SelfAttention.new_cache.
        weight = torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
        linear = attention.out_proj, layer.fc1, layer.fc2, layer.fc3
        matrices = [
            pack(self.library, weight, int8=self.int8),
            *(NOTHING if m is None else pack(self.library, m.weight, m.bias, int8=self.int8) for m in linear),
        ]
        self.kept += matrices
        shared = attention if getattr(attention, "r_w_bias", None) is not None else biases
        content, position = (getattr(shared, name, None) for name in ("r_w_bias", "r_r_bias"))
        norms = self._pack_norm(layer.self_attn_layer_norm), self._pack_norm(layer.final_layer_norm)
        of_heads = (None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm))
        return _Layer(*matrices, *norms, *map(self._keep, (content, position, *of_heads)))

    def _pack_norm(self, norm: Any) -> int | None:
        bias = getattr(norm, "bias", None)
        return self._keep(torch.stack([norm.weight, torch.zeros_like(norm.weight) if bias is None else bias]))

    def _keep(self, tensor: Tensor | None) -> int | None:
        """The address of *tensor* as float32, which is kept."""
        if tensor is None:
            return None
        self.kept.append(_floats(tensor))
        return _pointer(self.kept[-1])

    def _pack_embedding(self, embeddings: Any, project: nn.Linear | None, scale: float) -> _Embedding:
        """Scaled embeddings in one or several bands, each with or without a projection."""
        if isinstance(embeddings, AdaptiveInput):
            bounds = embeddings.bounds
            bands = [embeddings.weights_for_band(band) for band in range(len(bounds) - 1)]
        else:
            bounds = [0, embeddings.num_embeddings]
            weights: Any = [embeddings.weight, *([] if project is None else [project.weight])]
            bands = [weights]
        tables = [band[0].detach() for band in bands]
        projections = [pack(self.library, band[1]) if len(band) > 1 else NOTHING for band in bands]
        width = bands[0][1].size(0) if len(bands[0]) > 1 else tables[0].size(1)
        arrays = (
            (ctypes.c_long * len(bounds))(*bounds),
            (ctypes.c_void_p * len(tables))(*map(_pointer, tables)),
            (Matrix * len(bands))(*projections),
        )
        self.kept += [arrays, tables, projections]
        self.words = bounds[-1]
        sizes = len(bands), width, max(width, *(table.size(1) for table in tables)), TYPES[tables[0].dtype]
        return _Embedding(*sizes, *(ctypes.addressof(array) for array in arrays), scale)

    def _pack_output(self, layer: OutputLayer) -> None:
        """The output layer: words in one or several bands, tails with or without a projection."""
        self.bands: list[tuple[Matrix, Matrix]] = []
        for narrow, words, bias in _bands(layer, dequantized if self.int8 else torch.Tensor.detach):
            narrowed = NOTHING if narrow is None else pack(self.library, narrow)
            self.bands.append((narrowed, pack(self.library, words, bias, int8=self.int8)))
        used = [matrix for band in self.bands for matrix in band if matrix.weight]
        self.output_size = sum(matrix.inputs * matrix.outputs for matrix in used)
        bands = (_Band * len(self.bands))(*(_Band(*pair) for pair in self.bands))
        self.bounds: list[int] = getattr(layer, "bounds", None) or [0, self.bands[0][1].outputs]
        bounds = (ctypes.c_long * len(self.bounds))(*self.bounds)
        self.kept += [bands, bounds]
        sizes = len(self.bands), used[0].inputs, max(matrix.inputs for matrix in used)
        self.output = _Output(*sizes, ctypes.addressof(bounds), ctypes.addressof(bands))

    def embed(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Input of the first layer for *tokens* [B, 1], which continue *cache*: float32 [B, 1, C].

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        if self.embedding is None:
            return self.model.embed(tokens, cache).float()
        decoder, position = self.model.decoder, None
        if isinstance(decoder, TransformerDecoder) and decoder.embed_positions is not None and not decoder.infused:
            position = decoder.embed_positions(1, cache.length).float()
        tokens, rows, struct = tokens[:, 0].contiguous(), tokens.size(0), self.embedding
        threads = _threads_for(rows * struct.width * struct.widest)
        result = torch.empty(rows, 1, struct.width)
        scratch = torch.empty(threads * rows * (3 * struct.widest + 1))
        # The kernel checks the range of each token as it reads it: no pass over them before.
        known = tokens.dtype == torch.int64 and self.library.embed(
            *(ctypes.byref(struct), tokens.data_ptr(), rows, _pointer(position)),
            *(result.data_ptr(), threads, scratch.data_ptr()),
        )
        if not known:
            raise IndexError(f"tokens: expected int64 from 0 to {self.words - 1}")
        return result

    def read(self, embedded: Tensor, cache: KeyValueCache) -> Tensor:
        """Read tokens one by one and add them to *cache*.

        Args:
            embedded: embeddings, float32 [B, T, C]; at most as many tokens as the cache has room
                for.

        Returns:
            Hidden states, float32 [B, T, C'].
        """
        rows, tokens, _ = embedded.shape
        # The kernel writes at addresses: beyond the room is other memory.
        if tokens > cache.room:
            raise ValueError(f"{tokens} tokens: the cache's segment has room for {cache.room}")
        embedded = embedded.contiguous()
        bound, threads = cache.bound, _threads_for(self.layer_size * rows)
        # Other tensors are those after other rows were selected.
        if not (isinstance(bound, _Binding) and bound.fits(self, cache, threads)):
            cache.bound = bound = _Binding(self, cache, threads)
        bound.struct.filled, bound.struct.window = cache.length, self.window or 0
        hidden = torch.empty(rows, tokens, self.width)
        self.library.steps(
            *(ctypes.byref(self.stack), ctypes.byref(bound.struct), embedded.data_ptr(), tokens),
            *(hidden.data_ptr(), threads, bound.scratch.data_ptr()),
        )
        cache.advance(tokens)
        return hidden

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words: [B, C] → [B, V], float32."""
        head, *tails = (
            self._linear(words, self._linear(narrow, hidden)).log_softmax(-1) for narrow, words in self.bands
        )
        if not tails:
            return head
        # log p(w) = log p(band) + log p(w | band); the head's last columns are the bands.
        words = self.bounds[1]
        tails = [tail.add_(head[:, words + band, None]) for band, tail in enumerate(tails)]
        return torch.cat([head[:, :words], *tails], dim=1)

    def _linear(self, matrix: Matrix, x: Tensor) -> Tensor:
        """x Wᵀ + b: [B, K] → float32 [B, N]; *x* for no matrix."""
        if not matrix.weight:
            return x
        x, rows = _floats(x), x.size(0)
        threads = _threads_for(rows * matrix.inputs * matrix.outputs)
        result = torch.empty(rows, matrix.outputs)
        scratch = torch.empty(threads * rows * (matrix.inputs + 1))
        self.library.linear(ctypes.byref(matrix), x.data_ptr(), rows, result.data_ptr(), threads, scratch.data_ptr())
        return result

    def best(self, hidden: Tensor, count: int, forbidden: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """The *count* most probable words in falling order: [B, C] → scores and words [B, count].

        Scores are log-probabilities up to a constant for each row. No word of a tail band is more
        probable than its band, so bands less probable than *count* words already found are skipped.
        """
        hidden = _floats(hidden)
        rows, count = hidden.size(0), min(count, self.bounds[-1])
        threads = _threads_for(rows * self.output_size)
        scores, words = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.long)
        scratch = torch.empty(self.library.best_size(ctypes.byref(self.output), rows, threads))
        left_out = (ctypes.c_int64 * len(forbidden))(*forbidden)
        self.library.best(
            *(ctypes.byref(self.output), hidden.data_ptr(), rows, count, left_out, len(forbidden)),
            *(scores.data_ptr(), words.data_ptr(), threads, scratch.data_ptr()),
        )
        return scores, words


class _Binding:
    """Kernel arguments for a cache, made again when its tensors change.

    Attributes:
        first: keys of the first layer; other keys mean other tensors.
        scratch: float32 working memory of *threads*.
        kept: what the structures point to.
    """

    def __init__(self, model: PackedModel, cache: KeyValueCache, threads: int) -> None:
        scores: list[Tensor] = []
        layers = (_LayerCache * len(cache.layers))()
        for number, layer in enumerate(cache.layers):
            if not layer.keys.is_contiguous() or not layer.values.is_contiguous():
                raise ValueError("the cache's keys and values must be contiguous")
            distance_keys = distance_scores = None
            if isinstance(layer, RelativeLayerCache):
                distance_keys = layer.distance_keys
                if layer.distance_scores is not None:
                    distance_scores = _floats(layer.distance_scores)
                    scores.append(distance_scores)
            tensors = layer.keys, layer.values, layer.bias, distance_keys, distance_scores, layer.rotation
            layers[number] = _LayerCache(*map(_pointer, tensors))
        self.kept = layers, scores, [*cache.layers]
        self.model, self.first, self.threads = model, cache.layers[0].keys, threads
        rows, _, length, _ = self.first.shape
        stride, table = cache.layers[0].bias.stride(0), cache.layers[0].rotation
        rotated = 0 if table is None else 2 * table.size(-1)
        self.struct = _Cache(TYPES[self.first.dtype], rows, length, stride, rotated, 0, 0, ctypes.addressof(layers))
        size = model.library.scratch_size(ctypes.byref(model.stack), ctypes.byref(self.struct), threads)
        self.scratch = torch.empty(size)

    def fits(self, model: PackedModel, cache: KeyValueCache, threads: int) -> bool:
        """Whether these are the arguments for *model* and *cache*, by so many threads."""
        return self.model is model and self.first is cache.layers[0].keys and self.threads == threads


Parts = tuple[Tensor | None, Tensor, Tensor | None]
"""Projection [d, C] or None, weight [n, d], bias [n] or None."""


def _bands(layer: OutputLayer, rounded: Callable[[Tensor], Tensor]) -> list[Parts]:
    """The head, then the tail bands; projections are *rounded* as stored."""
    if isinstance(layer, LinearOutput):
        return [(None, layer.weight, None)]
    if isinstance(layer, ClusteredSoftmax):
        bands: list[Any] = list(layer.bands)
        head = layer._head()
        narrow = [None if band.projection is None else rounded(band.projection).t() for band in bands]
        tails = [(band.weight, band.bias) for band in bands[1:]]
        weights = [(torch.cat(head.weights), torch.cat(head.biases)), *tails]
        return [(projection, weight, bias) for projection, (weight, bias) in zip(narrow, weights, strict=True)]
    assert isinstance(layer, AdaptiveSoftmax)
    outputs: list[Any] = list(layer.tail)
    pairs = [(_weight(tail[0], rounded), _weight(tail[2], torch.Tensor.detach), None) for tail in outputs]
    return [(None, torch.cat(layer._head().weights), None), *pairs]


def _weight(module: Any, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    weight = rounded(module.weight)
    return weight.t() if isinstance(module, TiedLinear) and module.transpose else weight
