"""Packed embeddings and output layers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.inference.kernels.packed import NOTHING, TYPES, Matrix, PackedMatrix, dequantized, pack, pointer
from fairseq.inference.kernels.stack import largest, linear, threads_for
from fairseq.modules.adaptive_input import AdaptiveInput
from fairseq.modules.adaptive_softmax import AdaptiveSoftmax, TiedLinear
from fairseq.modules.clustered_softmax import BandOutput, ClusteredSoftmax
from fairseq.modules.output_layer import LinearOutput, OutputLayer

MOST_CANDIDATES = 256  # above this torch's topk is faster than insertion
MARGIN = 1e-3  # tolerance for rounding of a band's log-probability


class _Embedding(ctypes.Structure):
    """``Embedding`` of step.c."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("bands", "width", "widest", "table_type")),
        *((name, ctypes.c_void_p) for name in ("bounds", "tables", "projections")),
        ("scale", ctypes.c_float),
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
        arrays = (
            (ctypes.c_long * len(bounds))(*bounds),
            (ctypes.c_void_p * len(tables))(*(pointer(table) for table in tables)),
            (Matrix * len(bands))(*(p.struct if p else NOTHING for p in projections)),
        )
        self.kept = (arrays, tables, projections)
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
        if tokens.numel():  # the kernel reads at addresses
            low, high = torch.aminmax(tokens)
            if tokens.dtype != torch.int64 or low < 0 or high >= self.words:
                raise IndexError(f"tokens: expected int64 from 0 to {self.words - 1}")
        threads = threads_for(tokens.size(0) * self.width * self.widest)
        result = torch.empty(tokens.size(0), self.width)
        scratch = torch.empty(threads * 3 * self.widest)
        self.library.embed(
            ctypes.byref(self.struct),
            ctypes.c_void_p(tokens.data_ptr()),
            ctypes.c_long(tokens.size(0)),
            ctypes.c_void_p(pointer(added)),
            ctypes.c_void_p(result.data_ptr()),
            ctypes.c_long(threads),
            ctypes.c_void_p(scratch.data_ptr()),
        )
        return result


@dataclass(frozen=True)
class _Band:
    """Logits of one band, with or without a projection."""

    narrow: PackedMatrix | None
    words: PackedMatrix

    @classmethod
    def of(cls, narrow: Tensor | None, words: Tensor, bias: Tensor | None, int8: bool) -> _Band:
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
        bands = [_Band.of(*parts, int8) for parts in _bands(layer, dequantized if int8 else torch.Tensor.detach)]
        self.head, self.tails = bands[0], bands[1:]
        self.bounds: list[int] = getattr(layer, "bounds", None) or [0, self.head.words.outputs]

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words: [B, C] → [B, V], float32."""
        head = self.head.logits(self.library, hidden).log_softmax(-1)
        if not self.tails:
            return head
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
        head = self.head.logits(self.library, hidden)
        words = self.bounds[1]
        forbidden_here = [token for token in forbidden if token < words]
        if forbidden_here:
            head[:, forbidden_here] = -torch.inf
        scores, found = self._largest(head, min(count, words), words)
        for band, tail in enumerate(self.tails):
            mass = head[:, words + band]
            rows = (mass + MARGIN >= scores[:, -1]).nonzero()[:, 0] if found.size(1) == count else None
            if rows is None:  # fewer than count words so far
                more = self._of_band(band, tail, hidden, mass, count, forbidden)
                scores, found = _merged((scores, found), more, count)
            elif len(rows):
                more = self._of_band(band, tail, hidden[rows], mass[rows], count, forbidden)
                scores[rows], found[rows] = _merged((scores[rows], found[rows]), more, count)
        return scores, found

    def _of_band(
        self, band: int, tail: _Band, hidden: Tensor, mass: Tensor, count: int, forbidden: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The best words of a tail band with the log-probability *mass* [B]; see :meth:`best`."""
        first, last = self.bounds[band + 1], self.bounds[band + 2]
        logits = tail.logits(self.library, hidden)
        logits += (mass - logits.logsumexp(-1))[:, None]
        inside = [token - first for token in forbidden if first <= token < last]
        if inside:
            logits[:, inside] = -torch.inf
        scores, places = self._largest(logits, min(count, last - first), last - first)
        return scores, places + first

    def _largest(self, logits: Tensor, count: int, columns: int) -> tuple[Tensor, Tensor]:
        if count > MOST_CANDIDATES:
            return logits[:, :columns].topk(count)
        return largest(self.library, logits, count, columns)


def _merged(some: tuple[Tensor, Tensor], more: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """The *count* best of two lists of scores and words."""
    scores, words = (torch.cat(both, dim=1) for both in zip(some, more, strict=True))
    scores, order = scores.topk(min(count, scores.size(1)))
    return scores, words.gather(1, order)


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
