"""Boundaries of blocks: the size of each,
and where each starts, in little more memory than the sizes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fairseq.system.lazy_array import LazyArray

Piece = tuple[np.ndarray, np.ndarray]
"""Starts, int64, and sizes of consecutive blocks."""

_STRIDE = 64  # blocks between two starts that are stored
_PIECE = 1 << 14  # starts computed together


class BlockStarts(LazyArray):
    """The first token of each block, int64 [n], computed from the sizes of the blocks before it.

    Stored are the tokens before every 64th block, and for each gap between blocks (lines that
    belong to none, blocks that were left out) where it is and how many tokens were left out so far.

    Args:
        sizes: int32 [n], kept and not copied.
        gaps: int64 [2, gaps]: the number of the block after each gap, rising, and the tokens in all
            gaps up to it.
    """

    def __init__(self, sizes: np.ndarray, gaps: np.ndarray) -> None:
        super().__init__("<i8", len(sizes))
        self._sizes = sizes
        self._gaps = gaps
        # 8 bytes every 64 blocks instead of 8 bytes a block: the sizes already take 4.
        strided = len(sizes) - len(sizes) % _STRIDE
        sums = sizes[:strided].reshape(-1, _STRIDE).sum(axis=1, dtype=np.int64)
        self._before = np.concatenate([[0], np.cumsum(sums)])

    @property
    def nbytes(self) -> int:
        """Bytes in memory, without the sizes."""
        return self._before.nbytes + self._gaps.nbytes

    def _run(self, first: int, last: int) -> np.ndarray:
        if first == last:
            return np.empty(0, np.int64)
        group = first // _STRIDE
        sizes = self._sizes[group * _STRIDE : last]
        starts = np.cumsum(sizes, dtype=np.int64) - sizes + self._before[group]
        return self._skip(np.arange(first, last), starts[first - group * _STRIDE :])

    def _gather(self, flat: np.ndarray) -> np.ndarray:
        starts = np.empty(len(flat), np.int64)
        # In pieces: each start sums up to 64 sizes, and all of them at once would be [n, 64].
        for first in range(0, len(flat), _PIECE):
            piece = flat[first : first + _PIECE]
            group = piece // _STRIDE
            number = (group * _STRIDE)[:, None] + np.arange(_STRIDE)
            sizes = np.where(number < piece[:, None], self._sizes[np.minimum(number, len(self) - 1)], 0)
            starts[first : first + _PIECE] = self._before[group] + sizes.sum(axis=1, dtype=np.int64)
        return self._skip(flat, starts)

    def _skip(self, numbers: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """*starts* with the gaps before blocks *numbers*."""
        if not self._gaps.shape[1]:
            return starts
        # `right`: the gap before block *n* is numbered *n* and counts for it.
        gap = np.searchsorted(self._gaps[0], numbers, side="right")
        return starts + np.where(gap > 0, self._gaps[1][gap - 1], 0)


def boundaries(pieces: Iterable[Piece]) -> tuple[BlockStarts, np.ndarray]:
    """Return starts and sizes, int32 [n], of rising blocks
    that do not overlap and come in *pieces*."""
    sizes: list[np.ndarray] = []
    gaps: list[np.ndarray] = []
    count = end = skipped = 0
    for starts, piece in pieces:
        if not len(starts):
            continue
        piece = piece.astype(np.int32, copy=False)
        gap = starts - np.concatenate([[end], starts[:-1] + piece[:-1]])
        after = np.flatnonzero(gap)
        gaps.append(np.stack([after + count, np.cumsum(gap[after]) + skipped]))
        sizes.append(piece)
        skipped += int(gap.sum())
        count, end = count + len(piece), int(starts[-1]) + int(piece[-1])
    # A single piece is not copied: the sizes of a large corpus are the largest array of a run.
    joined = np.concatenate([np.empty(0, np.int32), *sizes]) if len(sizes) != 1 else sizes[0]
    return BlockStarts(joined, np.concatenate([np.empty((2, 0), np.int64), *gaps], axis=1)), joined
