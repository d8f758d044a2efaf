"""Datasets with fairseq's interface, as this package reads datasets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fairseq.data.dataset import Sample


class CollatedDataset:
    """A dataset with fairseq's interface: examples by number, sizes by ``num_tokens``, whose
    batches *collate* makes.

    *indices*, int [n], are its examples (None: all), *collate* is by default its ``collater``.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any] | None = None, indices: np.ndarray | None = None
    ) -> None:
        self.dataset, self.collate = dataset, collate or dataset.collater
        self.indices = np.arange(len(dataset)) if indices is None else indices

    @property
    def sizes(self) -> np.ndarray:
        # Of a pair of texts `num_tokens` gives two numbers.
        return np.array([int(np.max(self.dataset.num_tokens(int(i)))) for i in self.indices], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: np.ndarray) -> Sample:
        sample: Sample = self.collate([self.dataset[int(i)] for i in self.indices[indices]])
        # Tasks with several inputs to a row number them: net_input1, net_input2, …
        inputs = [value for name, value in sample.items() if name.startswith("net_input")]
        # The plug-in's own numbers, if its collater has them.
        defaults = {"nsentences": len(indices), "ntokens": 0}
        return {**defaults, **({"net_input": inputs[0]} if inputs else {}), **sample}

    # A resumed run compares checksums of its data: without any it goes on whatever they are.
    def checksums(self) -> dict[str, int]:
        """Nothing: what a plug-in reads is not known."""
        return {}

    def at_epoch(self, epoch: int) -> CollatedDataset:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return self

    def select(self, keep: np.ndarray) -> CollatedDataset:
        return CollatedDataset(self.dataset, self.collate, self.indices[keep])
