"""Single examples of this package's datasets, and batches of them, as scripts written for fairseq ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fairseq.data.dataset import Sample
from fairseq.interop.fairseq.block_datasets import collate


def __getitem__(self: Any, index: int) -> dict[str, Any]:
    """``id``, ``source`` and ``target`` [T] of example *index*."""
    if not 0 <= index < len(self):
        raise IndexError(index)
    sample = self.batch(np.array([index]))
    return {"id": int(index), "source": sample["net_input"]["src_tokens"][0], "target": sample["target"][0]}


def collater(self: Any, samples: Sequence[dict[str, Any]]) -> Sample:
    """The examples *samples* as one batch, padded on the right."""
    # Masked blocks wrap the blocks that know the padding.
    return collate(samples, getattr(self, "blocks", self).pad)


def num_tokens(self: Any, index: int) -> int:
    """The tokens of example *index*."""
    return int(self.sizes[index])


size = num_tokens


def ordered_indices(self: Any) -> np.ndarray:
    """The numbers of the examples in their order."""
    return np.arange(len(self))
