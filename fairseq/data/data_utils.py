"""``fairseq.data.data_utils``: functions on rows of tokens that plug-ins call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq.data.folders import unread_splits
from fairseq.errors import UserError
from fairseq.system.deferred import names_of
from fairseq.text.dictionary import post_process as post_process


def collate_tokens(
    values: Sequence[Tensor],
    pad_idx: int,
    eos_idx: int | None = None,
    left_pad: bool = False,
    move_eos_to_beginning: bool = False,
    pad_to_length: int | None = None,
    pad_to_multiple: int = 1,
    pad_to_bsz: int | None = None,
) -> Tensor:
    """Rows of different lengths as one tensor, padded: [B, T], with at least *pad_to_bsz* rows."""
    longest = max([*map(len, values), pad_to_length or 0])
    # −(−a // b) is a / b rounded up.
    longest = -(-longest // pad_to_multiple) * pad_to_multiple
    batch = values[0].new_full((max(len(values), pad_to_bsz or 0), longest), pad_idx)
    for number, row in enumerate(values):
        if move_eos_to_beginning:
            first = row[-1:] if eos_idx is None else row.new_tensor([eos_idx])
            row = torch.cat([first, row[:-1]])
        start = longest - len(row) if left_pad else 0
        batch[number, start : start + len(row)] = row
    return batch


def collate(
    samples: Sequence[dict[str, Any]],
    pad_idx: int,
    eos_idx: int | None = None,
    fixed_pad_length: int | None = None,
    pad_to_bsz: int | None = None,
) -> dict[str, Any]:
    """The examples *samples*, ``id``, ``source`` and ``target`` [T], as one batch, padded on the
    right."""
    source, target = (
        collate_tokens(
            [sample[name] for sample in samples], pad_idx, pad_to_length=fixed_pad_length, pad_to_bsz=pad_to_bsz
        )
        for name in ("source", "target")
    )
    lengths = [len(sample["source"]) for sample in samples]
    return {
        "id": torch.tensor([sample["id"] for sample in samples]),
        "nsentences": len(samples),
        "ntokens": sum(lengths),
        "net_input": {"src_tokens": source, "src_lengths": torch.tensor(lengths)},
        "target": target,
    }


@contextlib.contextmanager
def numpy_seed(seed: int | None, *addl_seeds: int) -> Iterator[None]:
    """numpy's random numbers of the seeds, inside a ``with`` statement; without a seed as they
    are."""
    if seed is None:
        yield
        return
    before = np.random.get_state()
    # fairseq's formula, its floating-point modulus included: the same crops and masks for the same
    # seeds. The hash of a tuple of integers does not depend on `PYTHONHASHSEED`.
    np.random.seed(int(hash((seed, *addl_seeds)) % 1e6) if addl_seeds else seed)
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


def batch_by_size(
    indices: Sequence[int] | np.ndarray,
    num_tokens_fn: Callable[[int], int],
    num_tokens_vec: Sequence[int] | np.ndarray | None = None,
    max_tokens: int | None = None,
    max_sentences: int | None = None,
    required_batch_size_multiple: int = 1,
    fixed_shapes: object = None,
) -> list[list[int]]:
    """*indices* as batches of at most *max_tokens* tokens with padding, and *max_sentences* rows.

    More rows than *required_batch_size_multiple* are rounded down to a multiple of it.

    Raises:
        UserError: an example has more tokens than a batch.
    """
    rows = [int(index) for index in indices]
    sizes = [int(num_tokens_fn(index)) for index in rows] if num_tokens_vec is None else list(map(int, num_tokens_vec))
    most, start = max_tokens or 0, 0
    batches: list[list[int]] = []
    while start < len(rows):
        longest, end = 0, start
        while end < len(rows) and not 0 < (max_sentences or 0) <= end - start:
            if most > 0 and max(longest, sizes[end]) * (end - start + 1) > most:
                break
            longest, end = max(longest, sizes[end]), end + 1
        if (count := end - start) == 0:
            raise UserError(
                f"`max_tokens` {most}: example {rows[start]} has {sizes[start]} tokens; raise it or leave it out"
            )
        # Fewer rows than the multiple are a batch as they are; otherwise the remainder begins the
        # next one.
        count -= count % required_batch_size_multiple if count > required_batch_size_multiple else 0
        batches.append(rows[start : start + count])
        start += count
    return batches


def batch_by_size_vec(
    indices: np.ndarray, num_tokens_vec: np.ndarray, max_tokens: int, max_sentences: int, bsz_mult: int
) -> list[list[int]]:
    """Batches of *indices*, whose sizes are *num_tokens_vec*; see :func:`batch_by_size`; 0 and −1:
    no limit."""
    return batch_by_size(indices, int, num_tokens_vec, max_tokens, max_sentences, bsz_mult)


def batch_by_size_fn(
    indices: np.ndarray, num_tokens_fn: Callable[[int], int], max_tokens: int, max_sentences: int, bsz_mult: int
) -> list[list[int]]:
    """Batches of *indices*, whose sizes *num_tokens_fn* gives; see :func:`batch_by_size`; 0 and −1:
    no limit."""
    return batch_by_size(indices, num_tokens_fn, None, max_tokens, max_sentences, bsz_mult)


def filter_by_size(
    indices: np.ndarray, dataset: Any, max_positions: object, raise_exception: bool = False
) -> np.ndarray:
    """The *indices* of examples whose size is at most *max_positions*.

    Raises:
        UserError: there are others, with *raise_exception*.
    """
    indices = np.asarray(indices)
    if max_positions is None:
        return indices
    size_of = getattr(dataset, "size", None) or dataset.num_tokens
    sizes = (np.asarray(size_of(int(index))) for index in indices)
    fits = np.array([bool(np.all(size <= np.asarray(max_positions))) for size in sizes], bool)
    if raise_exception and not fits.all():
        first = int(indices[~fits][0])
        raise UserError(f"example {first} has {size_of(first)} tokens, more than {max_positions}")
    return indices[fits]


def raise_if_valid_subsets_unintentionally_ignored(train_cfg: Any) -> None:
    """Raise ValueError if the data folder has shards of ``valid`` that no setting names or
    ignores."""
    dataset = train_cfg.dataset
    data = getattr(train_cfg.task, "data", None)
    if data is None or dataset.ignore_unused_valid_subsets or dataset.combine_valid_subsets:
        return
    if dataset.disable_validation:
        return
    if unread := unread_splits(data.split(os.pathsep)[0], dataset.valid_subset.split(",")):
        raise ValueError(
            f"valid_subset: {', '.join(unread)} in {data} would not be read; name them, combine them by "
            "combine_valid_subsets, or set ignore_unused_valid_subsets"
        )


__getattr__, _ = names_of(
    __name__,
    {
        "fairseq.data.block_datasets": "load_indexed_dataset",
        "fairseq.text.dictionary": "process_bpe_symbol=post_process",
    },
)
