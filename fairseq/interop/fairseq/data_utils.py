"""``fairseq.data.data_utils``: functions on rows of tokens that plug-ins call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq.errors import UserError


def collate_tokens(
    values: Sequence[Tensor],
    pad_idx: int,
    eos_idx: int | None = None,
    left_pad: bool = False,
    move_eos_to_beginning: bool = False,
    pad_to_length: int | None = None,
    pad_to_multiple: int = 1,
) -> Tensor:
    """Rows of different lengths as one tensor, padded: [B, T]."""
    longest = max([*map(len, values), pad_to_length or 0])
    # −(−a // b) is a / b rounded up.
    longest = -(-longest // pad_to_multiple) * pad_to_multiple
    batch = values[0].new_full((len(values), longest), pad_idx)
    for number, row in enumerate(values):
        if move_eos_to_beginning:
            first = row[-1:] if eos_idx is None else row.new_tensor([eos_idx])
            row = torch.cat([first, row[:-1]])
        start = longest - len(row) if left_pad else 0
        batch[number, start : start + len(row)] = row
    return batch


@contextlib.contextmanager
def numpy_seed(seed: int | None, *addl_seeds: int) -> Iterator[None]:
    """numpy's random numbers of the seeds, inside a ``with`` statement; without a seed as they are."""
    if seed is None:
        yield
        return
    before = np.random.get_state()
    # fairseq's formula: the same crops and masks for the same seeds. The hash of a tuple of integers does not depend on
    # `PYTHONHASHSEED`.
    np.random.seed(int(hash((seed, *addl_seeds)) % 1_000_000) if addl_seeds else seed)
    try:
        yield
    finally:
        np.random.set_state(before)


def lengths_to_padding_mask(lens: Tensor) -> Tensor:
    """True where a row of length ``lens`` is padding: [B, T]."""
    return torch.arange(int(lens.max()), device=lens.device)[None] >= lens[:, None]


def lengths_to_mask(lens: Tensor) -> Tensor:
    """True where a row has a token: [B, T]."""
    return ~lengths_to_padding_mask(lens)


def post_process(sentence: str, symbol: str | None) -> str:
    """*sentence* with its subwords joined: ``sentencepiece``, ``subword_nmt`` or a mark such as ``@@ ``."""
    if symbol == "sentencepiece":
        # In SentencePiece `▁` is the only blank; the blanks between pieces are fairseq's.
        return sentence.replace(" ", "").replace("▁", " ").strip()
    if symbol == "subword_nmt":
        symbol = "@@ "
    return (sentence + " ").replace(symbol, "").rstrip() if symbol and symbol != "none" else sentence


def batch_by_size(
    indices: Sequence[int] | np.ndarray,
    num_tokens_fn: Callable[[int], int],
    num_tokens_vec: Any = None,
    max_tokens: int | None = None,
    max_sentences: int | None = None,
    required_batch_size_multiple: int = 1,
    fixed_shapes: Any = None,
) -> list[list[int]]:
    """*indices* as batches of at most *max_tokens* tokens with padding, and *max_sentences* rows.

    More rows than *required_batch_size_multiple* are rounded down to a multiple of it.

    Raises:
        UserError: an example has more tokens than a batch.
    """
    batches: list[list[int]] = []
    batch: list[int] = []
    sizes: list[int] = []
    for index in map(int, indices):
        size = int(num_tokens_fn(index))
        if max_tokens and size > max_tokens:
            raise UserError(f"`max_tokens` {max_tokens}: example {index} has {size} tokens; raise it or leave it out")
        too_many = max_tokens and max([*sizes, size]) * (len(batch) + 1) > max_tokens
        if batch and (too_many or len(batch) == max_sentences):
            multiple = required_batch_size_multiple
            # Fewer rows than the multiple are a batch as they are; otherwise the remainder begins the next one.
            rows = max(len(batch) - len(batch) % multiple, len(batch) % multiple)
            batches.append(batch[:rows])
            batch, sizes = batch[rows:], sizes[rows:]
        batch.append(index)
        sizes.append(size)
    return [*batches, batch] if batch else batches


def filter_by_size(indices: np.ndarray, dataset: Any, max_positions: Any, raise_exception: bool = False) -> np.ndarray:
    """The *indices* of examples whose size is at most *max_positions*.

    Raises:
        UserError: there are others, with *raise_exception*.
    """
    indices = np.asarray(indices)
    if max_positions is None:
        return indices
    sizes = (np.asarray(dataset.size(int(index))) for index in indices)
    fits = np.array([bool(np.all(size <= np.asarray(max_positions))) for size in sizes], bool)
    if raise_exception and not fits.all():
        first = int(indices[~fits][0])
        raise UserError(f"example {first} has {dataset.size(first)} tokens, more than {max_positions}")
    return indices[fits]
