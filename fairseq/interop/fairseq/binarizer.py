"""``fairseq.binarizer``: lines of text to files of tokens, by functions of a script's own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq.data.indexed_dataset import IndexedWriter, token_dtype
from fairseq.errors import UserError
from fairseq.interop.fairseq.utils import tokenize_line


@dataclass
class BinarizeSummary:
    """What was binarised; *replaced* counts the words that the dictionary lacks."""

    replaced: Counter[str] | None = field(default_factory=Counter)
    num_seq: int = 0
    num_tok: int = 0

    @property
    def num_replaced(self) -> int:
        return sum((self.replaced or Counter()).values())

    @property
    def replaced_percent(self) -> float:
        return 100 * self.num_replaced / self.num_tok

    def merge(self, other: BinarizeSummary) -> None:
        """Add the counts of *other*."""
        self.replaced = (self.replaced or Counter()) + (other.replaced or Counter())
        self.num_seq, self.num_tok = self.num_seq + other.num_seq, self.num_tok + other.num_tok

    def __str__(self) -> str:
        unknown = f", {self.replaced_percent:.3}% replaced" if self.num_replaced else ""
        return f"{self.num_seq} sents, {self.num_tok} tokens{unknown}"


class Binarizer:
    """Makes the ids of a line; subclasses define :meth:`binarize_line`."""

    def binarize_line(self, line: str, summary: BinarizeSummary) -> Tensor:
        """The ids of *line*, int32 [T], counted in *summary*."""
        raise NotImplementedError


class VocabularyDatasetBinarizer(Binarizer):
    """The ids of the words of a line in a dictionary, or the ids that the line consists of."""

    def __init__(
        self,
        dict: Any,
        tokenize: Callable[[str], list[str]] = tokenize_line,
        append_eos: bool = True,
        reverse_order: bool = False,
        already_numberized: bool = False,
    ) -> None:
        self.dict = dict
        self.tokenize = tokenize
        self.append_eos = append_eos
        self.reverse_order = reverse_order
        self.already_numberized = already_numberized

    def binarize_line(self, line: str, summary: BinarizeSummary) -> Tensor:
        replaced = summary.replaced = Counter() if summary.replaced is None else summary.replaced

        def count(word: str, index: int) -> None:
            if index == self.dict.unk_index and word != self.dict.unk_word:
                replaced[word] += 1

        if self.already_numberized:
            words = line.split()[:: -1 if self.reverse_order else 1]
            ids = torch.tensor([*map(int, words), *[self.dict.eos()] * self.append_eos], dtype=torch.int32)
        else:
            ids = self.dict.encode_line(line, self.tokenize, False, count, self.append_eos, self.reverse_order)
        summary.num_seq += 1
        summary.num_tok += len(ids)
        return ids


class FileBinarizer:
    """Writes the ids of a text's lines as ``.bin`` and ``.idx``."""

    @classmethod
    def multiprocess_dataset(
        cls,
        input_file: str,
        dataset_impl: str,
        binarizer: Binarizer,
        output_prefix: str,
        vocab_size: int | None = None,
        num_workers: int = 1,
    ) -> BinarizeSummary:
        """Binarise *input_file*, in this process whatever *num_workers* is; ``fairseq-preprocess``
        uses several."""
        return cls._binarize_chunk_and_finalize(binarizer, input_file, 0, -1, output_prefix, dataset_impl, vocab_size)

    @classmethod
    def _binarize_chunk_and_finalize(
        cls,
        binarizer: Binarizer,
        input_file: str,
        offset_start: int,
        offset_end: int,
        output_prefix: str,
        dataset_impl: str,
        vocab_size: int | None = None,
    ) -> BinarizeSummary:
        """Binarise the lines that begin between two offsets in bytes, -1 the end of the file."""
        if dataset_impl != "mmap":
            raise UserError(f"dataset_impl {dataset_impl}: only mmap is supported")
        summary = BinarizeSummary()
        with IndexedWriter(output_prefix, token_dtype(vocab_size or 1 << 31)) as writer:
            for line in _lines(input_file, offset_start, offset_end):
                ids = binarizer.binarize_line(line, summary).numpy()
                writer.add(ids, np.array([len(ids)]))
        return summary


def _lines(path: str, start: int, end: int) -> Iterator[str]:
    """The lines of a text that begin from byte *start* on and before *end*."""
    with open(path, "rb") as file:
        file.seek(max(0, start - 1))
        if start:
            # The rest of a line that begins before, or the end of the one before alone.
            file.readline()
        stop = os.path.getsize(path) if end < 0 else end
        while file.tell() < stop and (line := file.readline()):
            yield line.decode()
