"""Pairs of a source and a target as batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fairseq.data.data_utils import collate_tokens
from fairseq.data.datasets import FairseqDataset


def collate(
    samples: Sequence[dict[str, Any]],
    pad_idx: int,
    eos_idx: int,
    left_pad_source: bool = True,
    left_pad_target: bool = False,
    input_feeding: bool = True,
    pad_to_length: dict[str, int] | None = None,
    pad_to_multiple: int = 1,
) -> dict[str, Any]:
    """The pairs *samples*, ``id``, ``source`` and, if they have one, ``target`` [T], as one batch,
    longest sources first.

    With *input_feeding* the decoder reads the targets after ``</s>``.
    """
    if not samples:
        return {}

    def rows(name: str, left_pad: bool, begins: bool = False) -> torch.Tensor:
        length = (pad_to_length or {}).get(name)
        values = [sample[name] for sample in samples]
        return collate_tokens(values, pad_idx, eos_idx, left_pad, begins, length, pad_to_multiple)

    source = rows("source", left_pad_source)
    lengths, order = source.ne(pad_idx).sum(1).sort(descending=True)
    net_input: dict[str, torch.Tensor] = {"src_tokens": source[order], "src_lengths": lengths}
    batch: dict[str, Any] = {
        "id": torch.tensor([sample["id"] for sample in samples])[order],
        "nsentences": len(samples),
        "ntokens": int(lengths.sum()),
        "net_input": net_input,
        "target": None,
    }
    if samples[0].get("target") is not None:
        batch["target"] = rows("target", left_pad_target)[order]
        batch["ntokens"] = int(batch["target"].ne(pad_idx).sum())
        if input_feeding:
            net_input["prev_output_tokens"] = rows("target", left_pad_target, begins=True)[order]
    return batch


class LanguagePairDataset(FairseqDataset):
    """Rows of *src*, and of *tgt* beside them; without alignments, constraints and buckets."""

    def __init__(
        self,
        src: Any,
        src_sizes: Any,
        src_dict: Any,
        tgt: Any = None,
        tgt_sizes: Any = None,
        tgt_dict: Any = None,
        left_pad_source: bool = True,
        left_pad_target: bool = False,
        shuffle: bool = True,
        input_feeding: bool = True,
    ) -> None:
        self.src, self.tgt, self.src_dict, self.tgt_dict = src, tgt, src_dict, tgt_dict
        self.src_sizes = np.array(src_sizes)
        self.tgt_sizes = None if tgt_sizes is None else np.array(tgt_sizes)
        self.sizes = self.src_sizes if self.tgt_sizes is None else np.vstack((self.src_sizes, self.tgt_sizes)).T
        self.left_pad_source, self.left_pad_target = left_pad_source, left_pad_target
        self.shuffle, self.input_feeding = shuffle, input_feeding

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "source": self.src[index], "target": None if self.tgt is None else self.tgt[index]}

    def __len__(self) -> int:
        return len(self.src)

    def collater(self, samples: Sequence[dict[str, Any]], pad_to_length: dict[str, int] | None = None) -> Any:
        pad, eos = self.src_dict.pad(), self.src_dict.eos()
        sides = (self.left_pad_source, self.left_pad_target)
        return collate(samples, pad, eos, *sides, self.input_feeding, pad_to_length)

    def num_tokens(self, index: int) -> int:
        return int(np.max(self.sizes[index]))

    def size(self, index: int) -> Any:
        return self.src_sizes[index], 0 if self.tgt_sizes is None else self.tgt_sizes[index]

    def ordered_indices(self) -> np.ndarray:
        """By the size of the source, then of the target; equal ones as they are, or shuffled."""
        indices = np.random.permutation(len(self)) if self.shuffle else np.arange(len(self))
        if self.tgt_sizes is not None:
            indices = indices[np.argsort(self.tgt_sizes[indices], kind="stable")]
        return indices[np.argsort(self.src_sizes[indices], kind="stable")]
