"""Packed embeddings and output layers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.inference.kernels.packed import NOTHING, TYPES, Matrix, PackedMatrix, dequantized, floats, pack, pointer
from fairseq.inference.kernels.stack import linear, threads_for
from fairseq.modules.adaptive_input import AdaptiveInput
from fairseq.modules.adaptive_softmax import AdaptiveSoftmax, TiedLinear
from fairseq.modules.clustered_softmax import BandOutput, ClusteredSoftmax
from fairseq.modules.output_layer import LinearOutput, OutputLayer


class _Embedding(ctypes.Structure):
    """``Embedding`` of words.h."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("bands", "width", "widest", "table_type")),
        *((name, ctypes.c_void_p) for name in ("bounds", "tables", "projections")),
        ("scale", ctypes.c_float),
    ]


class _Band(ctypes.Structure):
    """``Band`` of words.h."""

    _fields_ = [("narrow", Matrix), ("words", Matrix)]


class _Output(ctypes.Structure):
    """``Output`` of words.h."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("bands", "width", "widest")),
        *((name, ctypes.c_void_p) for name in ("bounds", "band")),
    ]


class PackedEmbedding:
    """Scaled embeddings in one or several bands, each with or without a projection.

    Args:
        library: the compiled kernels.
        embeddings: the embedding module.
        project: projection of the embeddings; adaptive inputs have one per band instead.
        scale: factor on the embeddings.
    """

    def __init__(self, library: ctypes.CDLL, embeddings: Any, project: Any = None, *, scale: float) -> None:
        self.library = library
        if isinstance(embeddings, AdaptiveInput):
            bounds = embeddings.bounds
            bands = [embeddings.weights(band) for band in range(len(bounds) - 1)]
        else:
            bounds = [0, embeddings.num_embeddings]
            bands = [[embeddings.weight, *([] if project is None else [project.weight])]]
        tables = [band[0].detach() for band in bands]
        projections = [pack(band[1]) if len(band) > 1 else None for band in bands]
        self.words = bounds[-1]
        self.width = bands[0][-1].size(0) if projections[0] else tables[0].size(1)
        self.widest = max(self.width, *(table.size(1) for table in tables))
        # Kept in `buffers`: the structure holds addresses only, which Python's memory management does not see.
        arrays = (
            (ctypes.c_long * len(bounds))(*bounds),
            (ctypes.c_void_p * len(tables))(*(pointer(table) for table in tables)),
            (Matrix * len(bands))(*(p.struct if p else NOTHING for p in projections)),
        )
        self.buffers = (arrays, tables, projections)
        self.struct = _Embedding(
            len(bands),
            self.width,
            self.widest,
            TYPES[tables[0].dtype],
            *(ctypes.addressof(array) for array in arrays),
            scale,
        )

    def __call__(self, tokens: Tensor, added: Tensor | None = None) -> Tensor:
        """Embeddings of *tokens* [B], int64, plus *added*, float32 [C]: [B, C].

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        threads = threads_for(tokens.size(0) * self.width * self.widest)
        result = torch.empty(tokens.size(0), self.width)
        scratch = torch.empty(threads * tokens.size(0) * (3 * self.widest + 1))
        # The kernel checks the range of each token as it reads it: no pass over them before.
        known = tokens.dtype == torch.int64 and self.library.embed(
            ctypes.byref(self.struct),
            ctypes.c_void_p(tokens.data_ptr()),
            ctypes.c_long(tokens.size(0)),
            ctypes.c_void_p(pointer(added)),
            ctypes.c_void_p(result.data_ptr()),
            ctypes.c_long(threads),
            ctypes.c_void_p(scratch.data_ptr()),
        )
        if not known:
            raise IndexError(f"tokens: expected int64 from 0 to {self.words - 1}")
        return result


@dataclass(frozen=True)
class PackedBand:
    """Logits of one band, with or without a projection."""

    narrow: PackedMatrix | None
    words: PackedMatrix

    @classmethod
    def of(cls, narrow: Tensor | None, words: Tensor, bias: Tensor | None, int8: bool) -> PackedBand:
        return cls(None if narrow is None else pack(narrow), pack(words, bias, int8=int8))

    def logits(self, library: ctypes.CDLL, hidden: Tensor) -> Tensor:
        """[B, C] → [B, n], float32."""
        return linear(library, self.words, hidden if self.narrow is None else linear(library, self.narrow, hidden))


class PackedOutput:
    """Output layer: log-probabilities of all words, or only the most probable words, skipping bands that have none.

    Args:
        library: the compiled kernels.
        layer: see :func:`packable_output`.
        int8: store the words' weights as int8.
    """

    def __init__(self, library: ctypes.CDLL, layer: OutputLayer, *, int8: bool = False) -> None:
        self.library = library
        bands = [PackedBand.of(*parts, int8) for parts in _bands(layer, dequantized if int8 else torch.Tensor.detach)]
        self.head, self.tails = bands[0], bands[1:]
        self.bounds: list[int] = getattr(layer, "bounds", None) or [0, self.head.words.outputs]
        matrices = [matrix for band in bands for matrix in (band.narrow, band.words) if matrix]
        self.size = sum(matrix.inputs * matrix.outputs for matrix in matrices)
        structs = [_Band(band.narrow.struct if band.narrow else NOTHING, band.words.struct) for band in bands]
        self.arrays = (ctypes.c_long * len(self.bounds))(*self.bounds), (_Band * len(bands))(*structs)
        widest = max(matrix.inputs for matrix in matrices)
        self.struct = _Output(len(bands), matrices[0].inputs, widest, *(ctypes.addressof(a) for a in self.arrays))

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words: [B, C] → [B, V], float32."""
        head = self.head.logits(self.library, hidden).log_softmax(-1)
        if not self.tails:
            return head
        # log p(w) = log p(band) + log p(w | band); the head's last columns are the bands.
        words = self.bounds[1]
        tails = [
            tail.logits(self.library, hidden).log_softmax(-1).add_(head[:, words + band, None])
            for band, tail in enumerate(self.tails)
        ]
        return torch.cat([head[:, :words], *tails], dim=1)

    def best(self, hidden: Tensor, count: int, forbidden: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """The *count* most probable words in falling order: [B, C] → scores and words [B, count].

        Scores are log-probabilities up to a constant for each row. No word of a tail band is more probable than its
        band, so bands less probable than *count* words already found are skipped.
        """
        hidden = floats(hidden)
        rows, count = hidden.size(0), min(count, self.bounds[-1])
        threads = threads_for(rows * self.size)
        scores, words = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.long)
        size = self.library.best_size(ctypes.byref(self.struct), ctypes.c_long(rows), ctypes.c_long(threads))
        scratch = torch.empty(size)
        self.library.best(
            ctypes.byref(self.struct),
            ctypes.c_void_p(hidden.data_ptr()),
            *(ctypes.c_long(number) for number in (rows, count)),
            (ctypes.c_int64 * len(forbidden))(*forbidden),
            ctypes.c_long(len(forbidden)),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (scores, words)),
            ctypes.c_long(threads),
            ctypes.c_void_p(scratch.data_ptr()),
        )
        return scores, words


def packable_output(layer: OutputLayer | None) -> bool:
    """Return whether the kernels support *layer*."""
    return type(layer) in (LinearOutput, AdaptiveSoftmax, ClusteredSoftmax)


def packable_embedding(embeddings: nn.Module) -> bool:
    """Return whether the kernels support *embeddings*."""
    return type(embeddings) in (nn.Embedding, AdaptiveInput)


Parts = tuple[Tensor | None, Tensor, Tensor | None]
"""Projection [d, C] or None, weight [n, d], bias [n] or None."""


def _bands(layer: OutputLayer, rounded: Callable[[Tensor], Tensor]) -> list[Parts]:
    """The head, then the tail bands; projections are *rounded* as stored."""
    if isinstance(layer, LinearOutput):
        return [(None, layer.weight, None)]
    if isinstance(layer, ClusteredSoftmax):
        outputs: list[Any] = list(layer.bands)
        head = layer._head()
        return [
            (_narrow(outputs[0], rounded), torch.cat(head.weights), torch.cat(head.biases)),
            *((_narrow(band, rounded), band.weight, band.bias) for band in outputs[1:]),
        ]
    assert isinstance(layer, AdaptiveSoftmax)
    tails: list[Any] = list(layer.tail)
    return [
        (None, torch.cat(layer._head().weights), None),
        *((_weight(tail[0], rounded), _weight(tail[2]), None) for tail in tails),
    ]


def _narrow(band: BandOutput, rounded: Callable[[Tensor], Tensor]) -> Tensor | None:
    return None if band.projection is None else rounded(band.projection).t()


def _weight(module: Any, rounded: Callable[[Tensor], Tensor] = torch.Tensor.detach) -> Tensor:
    transposed = isinstance(module, TiedLinear) and module.transpose
    weight = rounded(module.weight)
    return weight.t() if transposed else weight
