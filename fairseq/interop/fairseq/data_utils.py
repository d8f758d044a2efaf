"""``fairseq.data.data_utils``: functions on rows of tokens that plug-ins call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor


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
    longest = max([len(row) for row in values] + ([pad_to_length] if pad_to_length else []))
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
        return sentence.replace(" ", "").replace("▁", " ").strip()
    if symbol == "subword_nmt":
        symbol = "@@ "
    return (sentence + " ").replace(symbol, "").rstrip() if symbol and symbol != "none" else sentence
