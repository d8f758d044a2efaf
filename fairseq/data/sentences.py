"""Sentences as rows of tokens, with labels for each row."""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fairseq.data.dataset import Sample
from fairseq.data.glue import Label
from fairseq.text.dictionary import Dictionary

logger = logging.getLogger(__name__)


class SentenceRows:
    """Rows ``<s> a </s>`` or ``<s> a </s> b </s>`` and their labels, in memory.

    Rows longer than *limit* lose tokens at the end
    of the longer sentence; a warning gives their number once.

    Args:
        rows: the ids of each example's sentences.
        labels: a class number or score for each example; None: unknown.
        dictionary: of the ids.
        limit: most tokens of a row; None: rows are not cut.
        begin: id of the first token; None: ``<s>``.
        separator: id of a token before the second sentence; None: there is none.
        token_types: whether samples hold the number of the sentence (0, 1) that a token belongs to.
        regression: whether labels are scores.
        name: of the file, for messages.
    """

    def __init__(
        self,
        rows: Sequence[tuple[np.ndarray, ...]],
        labels: Sequence[Label | None],
        dictionary: Dictionary,
        *,
        limit: int | None,
        begin: int | None = None,
        separator: int | None = None,
        token_types: bool = False,
        regression: bool = False,
        name: str = "",
    ) -> None:
        before = [[dictionary.bos() if begin is None else begin], [] if separator is None else [separator]]
        if limit is not None:
            cut = [_cut(row, limit - sum(1 + len(ids) for _, ids in zip(row, before, strict=False))) for row in rows]
            shortened = sum(sum(map(len, row)) < sum(map(len, old)) for row, old in zip(cut, rows, strict=True))
            if shortened:
                logger.warning("%s: truncated %d of %d examples to %d tokens", name, shortened, len(rows), limit)
            rows = cut
        self._rows = [self._row(row, before, dictionary.eos()) for row in rows]
        self._firsts = np.array([2 + len(row[0]) for row in rows])  # tokens with type 0
        self._labels = labels
        self._pad = dictionary.pad()
        self._token_types = token_types
        self._regression = regression
        self._numbers = np.arange(len(rows))
        self._sizes = np.array([len(row) for row in self._rows], dtype=np.int64)

    @staticmethod
    def _row(sentences: tuple[np.ndarray, ...], before: list[list[int]], eos: int) -> np.ndarray:
        """The *sentences*, each with the ids *before* it and its end."""
        parts: list[Any] = []
        for first, sentence in zip(before, sentences, strict=False):
            parts += [first, sentence, [eos]]
        return np.concatenate(parts).astype(np.int32)

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each row: int64 [n]."""
        return self._sizes[self._numbers]

    @property
    def labels(self) -> list[Label | None]:
        """The label of each row."""
        return [self._labels[number] for number in self._numbers.tolist()]

    def __len__(self) -> int:
        return len(self._numbers)

    def checksums(self) -> dict[str, int]:
        """CRC-32 of the rows and labels, which are in memory."""
        rows = zlib.crc32(b"".join(self._rows[number].astype(np.int64).tobytes() for number in self._numbers))
        return {"rows": rows, "labels": zlib.crc32(repr(self.labels).encode())}

    def at_epoch(self, epoch: int) -> SentenceRows:
        """The rows themselves: nothing in them is random."""
        return self

    def select(self, keep: np.ndarray) -> SentenceRows:
        view = copy.copy(self)
        view._numbers = self._numbers[keep]
        return view

    def batch(self, indices: np.ndarray) -> Sample:
        """Rows *indices* [B], padded on the right.

        Returns:
            ``id`` int64 [B]; ``nsentences`` B; ``ntokens``, the tokens
            that are no padding; ``net_input`` with ``src_tokens`` int64 [B, T] and,
            with token types, ``token_types`` int64 [B, T]; ``target``,
            int64 classes or float32 scores [B], where all labels are known.
        """
        numbers = self._numbers[indices]
        rows = [self._rows[number] for number in numbers]
        tokens = np.full((len(rows), max(map(len, rows))), self._pad, dtype=np.int64)  # (B, T)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = ids
        net_input = {"src_tokens": torch.from_numpy(tokens)}
        if self._token_types:
            # Type 1 begins behind the first `</s>`, as in BERT; padding has type 0.
            second = np.arange(tokens.shape[1]) >= self._firsts[numbers][:, None]
            net_input["token_types"] = torch.from_numpy((second & (tokens != self._pad)).astype(np.int64))
        sample = {
            "id": torch.from_numpy(np.asarray(indices, dtype=np.int64)),
            "nsentences": len(rows),
            "ntokens": sum(map(len, rows)),
            "net_input": net_input,
        }
        labels = [self._labels[number] for number in numbers]
        if all(label is not None for label in labels):
            sample["target"] = torch.tensor(labels, dtype=torch.float32 if self._regression else torch.int64)
        return sample


def _cut(sentences: tuple[np.ndarray, ...], room: int) -> tuple[np.ndarray, ...]:
    """*sentences* of at most *room* tokens together:
    the longer one is cut until it is as long as the other."""
    if sum(map(len, sentences)) <= room or len(sentences) == 1:
        return tuple(sentence[: max(room, 0)] for sentence in sentences)
    first, second = sentences
    # What the shorter sentence leaves of its half goes to the longer one.
    half = room // 2
    length = max(room - len(second), half) if len(first) > len(second) else min(len(first), room - half)
    return first[:length], second[: room - length]
