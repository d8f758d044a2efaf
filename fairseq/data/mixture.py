"""Several corpora read in fixed proportions, as one dataset.

An epoch reads each block of the first corpus once, and of every other corpus as many blocks as its
share asks for. A corpus is read in passes, each in a new random order, and a pass goes on where the
last epoch stopped it: no block comes a second time before all have come once. Which block stands at
which place follows from the seed and the epoch's number alone, so a position in the epoch is enough
to resume, on any number of processes.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from fairseq.data.dataset import Examples, Sample
from fairseq.data.position import SEQUENCE, order_generator
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError

_PASS = 2  # purpose of the order of a pass


def parse_mixture(text: str) -> dict[Path, float]:
    """The share of each folder of ``DIR=SHARE,DIR=SHARE,…``.

    Raises:
        UserError: *text* is malformed, names a folder twice, or leaves the first corpus no share.
    """
    shares: dict[Path, float] = {}
    for part in text.split(","):
        folder, _, number = part.strip().rpartition("=")
        try:
            share = float(number)
        except ValueError:
            share = 0.0
        if not folder or not 0 < share < 1:
            raise UserError(f"`mixture` {text}: {part!r} is not DIR=SHARE with a share between 0 and 1")
        if Path(folder) in shares:
            raise UserError(f"`mixture` {text}: {folder} is named twice; add its shares")
        shares[Path(folder)] = share
    if sum(shares.values()) >= 1:
        raise UserError(f"`mixture` {text}: the shares leave nothing for DATA; their sum must be below 1")
    return shares


def source_names(folders: Sequence[Path]) -> list[str]:
    """Short names of *folders* that differ: as few of their last parts as that takes.

    Raises:
        UserError: two are the same folder.
    """
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["-".join(each[-depth:]).lstrip("/") for each in parts]
        if len({*names}) == len(names):
            return names
    raise UserError(f"`mixture`: a folder is named twice, or is DATA {folders[0]}, which has the rest; name each once")


class Mixture(Examples):
    """Blocks of several corpora, numbered one corpus after the other.

    Args:
        sources: blocks of fixed length of each corpus, by its name; the first sets the epoch.
        shares: of each in the tokens of an epoch, with the sum 1.
        seed: of the passes; None: all blocks of all corpora are read once, in their order, and
            samples mark the tokens of each source as a subset, for validation.

    Raises:
        UserError: a share is too small for a single block.

    Attributes:
        counts: int64 [sources], blocks of each in an epoch.
        sizes: int32 [n]; with *seed* all are a whole block's, because the short block at the end of
            a corpus stands at another place each epoch.
    """

    def __init__(self, sources: Mapping[str, TokenBlocks], shares: Sequence[float], seed: int | None) -> None:
        self.names, self.sources = list(sources), list(sources.values())
        self.pad, self.seed, self.shares = self.sources[0].pad, seed, [float(share) for share in shares]
        self._lengths = self.counts = np.array([len(blocks) for blocks in self.sources])
        self.sizes = np.concatenate([blocks.sizes for blocks in self.sources])
        if seed is not None:
            self.counts = np.rint(len(self.sources[0]) * np.array(shares) / shares[0]).astype(np.int64)
            self.sizes = np.full(self.counts.sum(), self.sizes.max(initial=0))
        for name, count in zip(self.names, self.counts, strict=True):
            if not count:
                raise UserError(f"`mixture`: the share of {name} is less than one block an epoch; raise it")
        self._numbers = np.arange(len(self.sizes))
        self._epoch = 1
        self._passes: dict[tuple[int, int], tuple[TokenBlocks, np.ndarray]] = {}  # those read in the epoch so far

    def __len__(self) -> int:
        return len(self.sizes)

    def checksums(self) -> dict[str, int]:
        # Numbers, not names: a folder may be moved. Another share is another text.
        found = {f"{number}/share": zlib.crc32(repr(share).encode()) for number, share in enumerate(self.shares)}
        for number, blocks in enumerate(self.sources):
            found |= {f"{number}/{name}": crc for name, crc in blocks.checksums().items()}
        return found

    def at_epoch(self, epoch: int) -> Mixture:
        view = copy.copy(self)
        view._epoch, view._passes = epoch, {}
        return view

    def select(self, keep: np.ndarray) -> Mixture:
        selected = copy.copy(self)
        selected.sizes, selected._numbers = self.sizes[keep], self._numbers[keep]
        return selected

    def batch(self, indices: np.ndarray) -> Sample:
        """Examples *indices* [B] as rows, padded on the right; see :meth:`TokenBlocks.batch`."""
        numbers = self._numbers[indices]
        ends = np.cumsum(self.counts)
        source = np.searchsorted(ends, numbers, side="right")
        place = numbers - (ends - self.counts)[source]
        # Blocks of the source that were read before this one, in all epochs.
        read = place if self.seed is None else place + (self._epoch - 1) * self.counts[source]
        turn, inside = np.divmod(read, self._lengths[source])
        parts = []
        for number, which in sorted({*zip(source.tolist(), turn.tolist(), strict=True)}):
            rows = (source == number) & (turn == which)
            blocks, order = self._pass(number, which)
            parts.append((torch.from_numpy(np.flatnonzero(rows)), blocks.batch(order[inside[rows]].astype(np.int64))))
        length = max(part["target"].size(1) for _, part in parts)
        tokens, target = (torch.full((len(indices), length), self.pad) for _ in range(2))
        for at, part in parts:
            width = part["target"].size(1)
            tokens[at, :width], target[at, :width] = part["net_input"]["src_tokens"], part["target"]
        sample: Sample = {
            "id": torch.from_numpy(np.asarray(indices, dtype=np.int64)),
            "nsentences": len(indices),
            "ntokens": int((target != self.pad).sum()),
            "net_input": {"src_tokens": tokens},
            "target": target,
        }
        if self.seed is None:
            of_row = torch.from_numpy(source)[:, None]
            sample["subsets"] = {name: of_row == number for number, name in enumerate(self.names)}
        return sample

    def _pass(self, number: int, turn: int) -> tuple[TokenBlocks, np.ndarray]:
        """The blocks of source *number* as pass *turn* (from 0) reads them, and their order."""
        if (number, turn) not in self._passes:
            blocks, count = self.sources[number], int(self._lengths[number])
            order = np.arange(count, dtype=np.int32)
            if self.seed is not None:
                order_generator(SEQUENCE, self.seed, turn + 1, _PASS, number).shuffle(order)
            # Lines may be shuffled, too: anew for each pass, which is an epoch of the corpus.
            self._passes[number, turn] = (blocks if self.seed is None else blocks.at_epoch(turn + 1)), order
        return self._passes[number, turn]
