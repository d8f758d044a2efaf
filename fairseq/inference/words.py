"""Packed embeddings and output layers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.inference.packed import NOTHING, TYPES, Matrix, dequantized, floats, longs, pack, pointer, pointers
from fairseq.inference.stack import linear, threads_for
from fairseq.modules.adaptive_input import AdaptiveInput
from fairseq.modules.adaptive_softmax import AdaptiveSoftmax, TiedLinear
from fairseq.modules.clustered_softmax import BandOutput, ClusteredSoftmax
from fairseq.modules.output_layer import LinearOutput, OutputLayer


# As in words.h.
class _Embedding(ctypes.Structure):
    _fields_ = [
        *longs("bands", "width", "widest", "table_type"),
        *pointers("bounds", "tables", "projections"),
        ("scale", ctypes.c_float),
    ]


class _Band(ctypes.Structure):
    _fields_ = [("narrow", Matrix), ("words", Matrix)]


class _Output(ctypes.Structure):
    _fields_ = [*longs("bands", "width", "widest"), *pointers("bounds", "band")]


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
            bands = [embeddings.weights_for_band(band) for band in range(len(bounds) - 1)]
        else:
            bounds = [0, embeddings.num_embeddings]
            bands = [[embeddings.weight, *([] if project is None else [project.weight])]]
        tables = [band[0].detach() for band in bands]
        projections = [pack(band[1]) if len(band) > 1 else NOTHING for band in bands]
        self.words = bounds[-1]
        self.width = bands[0][1].size(0) if len(bands[0]) > 1 else tables[0].size(1)
        self.widest = max(self.width, *(table.size(1) for table in tables))
        # Kept in `buffers`: the structure holds addresses only, which Python's memory management
        # does not see.
        arrays = (
            (ctypes.c_long * len(bounds))(*bounds),
            (ctypes.c_void_p * len(tables))(*map(pointer, tables)),
            (Matrix * len(bands))(*projections),
        )
        self.buffers = (arrays, tables, projections)
        sizes = len(bands), self.width, self.widest, TYPES[tables[0].dtype]
        self.struct = _Embedding(*sizes, *(ctypes.addressof(array) for array in arrays), scale)

    def __call__(self, tokens: Tensor, added: Tensor | None = None) -> Tensor:
        """Embeddings of *tokens* [B], int64, plus *added*, float32 [C]: [B, C].

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        rows = tokens.size(0)
        threads = threads_for(rows * self.width * self.widest)
        result = torch.empty(rows, self.width)
        scratch = torch.empty(threads * rows * (3 * self.widest + 1))
        addresses = pointer(added), result.data_ptr(), threads, scratch.data_ptr()
        # The kernel checks the range of each token as it reads it: no pass over them before.
        known = tokens.dtype == torch.int64 and self.library.embed(
            ctypes.byref(self.struct), tokens.data_ptr(), rows, *addresses
        )
        if not known:
            raise IndexError(f"tokens: expected int64 from 0 to {self.words - 1}")
        return result


class PackedOutput:
    """Output layer: log-probabilities of all words, or only the most probable words, skipping bands
    that have none.

    Args:
        library: the compiled kernels.
        layer: see :func:`packable_output`.
        int8: store the words' weights as int8.
    """

    def __init__(self, library: ctypes.CDLL, layer: OutputLayer, *, int8: bool = False) -> None:
        self.library = library
        self.matrices: list[tuple[Matrix, Matrix]] = []  # projection and words of each band
        for narrow, words, bias in _bands(layer, dequantized if int8 else torch.Tensor.detach):
            self.matrices.append((NOTHING if narrow is None else pack(narrow), pack(words, bias, int8=int8)))
        self.bands = (_Band * len(self.matrices))(*(_Band(*pair) for pair in self.matrices))
        self.bounds: list[int] = getattr(layer, "bounds", None) or [0, self.bands[0].words.outputs]
        used = [matrix for band in self.matrices for matrix in band if matrix.weight]
        self.size = sum(matrix.inputs * matrix.outputs for matrix in used)
        self.array = (ctypes.c_long * len(self.bounds))(*self.bounds)
        sizes = len(self.matrices), used[0].inputs, max(matrix.inputs for matrix in used)
        self.struct = _Output(*sizes, ctypes.addressof(self.array), ctypes.addressof(self.bands))

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words: [B, C] → [B, V], float32."""
        head, *tails = (self._log_probs(narrow, words, hidden) for narrow, words in self.matrices)
        if not tails:
            return head
        # log p(w) = log p(band) + log p(w | band); the head's last columns are the bands.
        words = self.bounds[1]
        tails = [tail.add_(head[:, words + band, None]) for band, tail in enumerate(tails)]
        return torch.cat([head[:, :words], *tails], dim=1)

    def _log_probs(self, narrow: Matrix, words: Matrix, hidden: Tensor) -> Tensor:
        """Log-probabilities within a band: [B, C] → [B, n]."""
        if narrow.weight:
            hidden = linear(self.library, narrow, hidden)
        return linear(self.library, words, hidden).log_softmax(-1)

    def best(self, hidden: Tensor, count: int, forbidden: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """The *count* most probable words in falling order: [B, C] → scores and words [B, count].

        Scores are log-probabilities up to a constant for each row. No word of a tail band is more
        probable than its band, so bands less probable than *count* words already found are skipped.
        """
        hidden = floats(hidden)
        rows, count = hidden.size(0), min(count, self.bounds[-1])
        threads = threads_for(rows * self.size)
        scores, words = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.long)
        output = ctypes.byref(self.struct)
        scratch = torch.empty(self.library.best_size(output, rows, threads))
        left_out = (ctypes.c_int64 * len(forbidden))(*forbidden)
        results = scores.data_ptr(), words.data_ptr(), threads, scratch.data_ptr()
        self.library.best(output, hidden.data_ptr(), rows, count, left_out, len(forbidden), *results)
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
