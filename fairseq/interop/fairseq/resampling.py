"""``fairseq.data.ResamplingDataset``: examples drawn anew in each epoch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fairseq.interop.fairseq.datasets import BaseWrapperDataset


class ResamplingDataset(BaseWrapperDataset):
    """*size_ratio* times as many examples, drawn anew in each epoch with *weights* (default:
    equally)."""

    def __init__(
        self,
        dataset: Any,
        weights: Any = None,
        replace: bool = True,
        size_ratio: float = 1.0,
        batch_by_size: bool = True,
        seed: int = 0,
        epoch: int = 1,
    ) -> None:
        super().__init__(dataset)
        shares = None if weights is None else np.asarray(weights, np.float64)
        self.weights = None if shares is None else shares / shares.sum()
        self.replace, self.by_size, self.seed = replace, batch_by_size, seed
        self.actual_size = math.ceil(len(dataset) * size_ratio) if size_ratio != 1.0 else len(dataset)
        self._epoch: int | None = None
        self.set_epoch(epoch)

    can_reuse_epoch_itr_across_epochs = False

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if epoch == self._epoch:
            return
        self._epoch = epoch
        # By seed and epoch, so that all processes draw the same.
        random = np.random.RandomState([42, self.seed % 2**32, epoch])
        self.chosen = random.choice(len(self.dataset), self.actual_size, self.replace, self.weights)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.chosen[index]]

    def __len__(self) -> int:
        return self.actual_size

    @property
    def sizes(self) -> Any:
        return np.asarray(self.dataset.sizes)[self.chosen]

    def num_tokens(self, index: int) -> int:
        return self.dataset.num_tokens(self.chosen[index])

    def size(self, index: int) -> Any:
        return self.dataset.size(self.chosen[index])

    def ordered_indices(self) -> np.ndarray:
        if self.by_size:
            return np.lexsort((np.arange(len(self)), self.sizes))
        return np.arange(len(self))
