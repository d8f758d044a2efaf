"""Files of tokens that scripts write, and the cuts of fairseq's compiled functions, for copies of
its datasets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from fairseq.data.indexed_dataset import IndexedCorpus, IndexedWriter, token_dtype
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError

_STEP = 1 << 20  # lines that are copied together


def data_file_path(prefix_path: str) -> str:
    return f"{prefix_path}.bin"


def index_file_path(prefix_path: str) -> str:
    return f"{prefix_path}.idx"


def best_fitting_int_dtype(max_int_to_represent: int | None) -> np.dtype:
    """The type of tokens up to that number; int64 if it is not known."""
    return np.dtype("<i8") if max_int_to_represent is None else token_dtype(max_int_to_represent)


class MMapIndexedDatasetBuilder:
    """Writes the lines that it is given; both files are there after :meth:`finalize`, which names
    the second one."""

    def __init__(self, out_file: str, dtype: Any = np.int64, vocab_size: int | None = None) -> None:
        self.prefix = str(out_file).removesuffix(".bin")
        self.writer = IndexedWriter(self.prefix, np.dtype(dtype) if vocab_size is None else token_dtype(vocab_size))
        self.writer.__enter__()

    def add_item(self, tensor: Any) -> None:
        """Append *tensor*, int [T], as a line."""
        tokens = np.asarray(tensor).reshape(-1)
        self.writer.add(tokens, np.array([len(tokens)]))

    def merge_file_(self, another_file: str) -> None:
        """Append the lines of the files *another_file*."""
        corpus = IndexedCorpus(str(another_file).removesuffix(".bin"))
        for first in range(0, len(corpus), _STEP):
            sizes = corpus.sizes[first : first + _STEP]
            start, end = corpus.offsets[first], corpus.offsets[first + len(sizes)]
            self.writer.add(corpus.tokens[start:end], sizes)

    def finalize(self, index_file: str) -> None:
        """Put both files in place.

        Raises:
            UserError: *index_file* belongs to other data.
        """
        if str(index_file) != index_file_path(self.prefix):
            error = UserError(f"{index_file}: does not belong to {self.prefix}.bin; give {self.prefix}.idx")
            self.writer.__exit__(type(error), error, None)
            raise error
        self.writer.__exit__(None, None, None)


def make_builder(out_file: str, impl: str = "mmap", vocab_size: int | None = None, **unused: object) -> Any:
    """A builder of the files that ``fairseq-preprocess`` writes, whatever *impl*."""
    return MMapIndexedDatasetBuilder(out_file, vocab_size=vocab_size)


class PlasmaArray:
    """An array, in the memory of its process."""

    def __init__(self, array: np.ndarray, *unused: object, **options: object) -> None:
        self.array = array


PlasmaView = PlasmaArray


def _get_slice_indices_fast(
    sizes: np.ndarray, break_mode: str | None, block_size: int | None, document_sep_len: int
) -> np.ndarray:
    """The first token of each block of lines of these *sizes*, and the one behind its last: int64
    [n, 2]."""
    if document_sep_len != 1:
        raise UserError(f"`document_sep_len` {document_sep_len}: documents end with a line of one token; use 1")
    sizes = np.asarray(sizes)
    offsets = np.append(0, np.cumsum(sizes, dtype=np.int64))
    lines: Any = SimpleNamespace(tokens=range(int(offsets[-1])), sizes=sizes, offsets=offsets)
    blocks = TokenBlocks(lines, block_size or 1, break_mode, pad=0, eos=0)
    starts = np.asarray(blocks.starts[:], np.int64)
    return np.stack([starts, starts + blocks.sizes], axis=1)


def _get_block_to_dataset_index_fast(sizes: np.ndarray, slice_indices: np.ndarray) -> np.ndarray:
    """Of each block, int64 [n, 3]: the line of its first token, that token's place in the line, and
    the line of its last token."""
    sizes, (starts, ends) = np.asarray(sizes), np.asarray(slice_indices, np.int64).T
    behind = np.cumsum(sizes, dtype=np.int64)
    first = np.searchsorted(behind, starts, side="right")
    last = np.maximum(np.searchsorted(behind, ends, side="left"), first)
    return np.stack([first, starts - (behind - sizes)[first], last], axis=1)
