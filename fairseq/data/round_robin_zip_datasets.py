"""Several datasets, one example of each as one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from fairseq.data.datasets import FairseqDataset


class RoundRobinZipDatasets(FairseqDataset):
    """An example of each of *datasets*, by their names; shorter ones begin again.

    With *eval_key* only that one's examples are returned, as they are.
    """

    def __init__(self, datasets: OrderedDict[str, Any], eval_key: str | None = None) -> None:
        self.datasets, self.eval_key = OrderedDict(datasets), eval_key
        self.longest_dataset_key = max(self.datasets, key=lambda name: len(self.datasets[name]))
        self.longest_dataset = self.datasets[self.longest_dataset_key]
        self._ordered: dict[str, np.ndarray] | None = None

    def _index(self, name: str, index: int) -> int:
        if self._ordered is None:
            raise AssertionError("call ordered_indices before the examples are read")
        order = self._ordered[name]
        return int(order[index % len(order)])

    def __getitem__(self, index: int) -> Any:
        if self.eval_key is not None:
            return self.datasets[self.eval_key][self._index(self.eval_key, index)]
        return OrderedDict((name, one[self._index(name, index)]) for name, one in self.datasets.items())

    def __len__(self) -> int:
        if self._ordered is not None:
            return len(self._ordered[self.longest_dataset_key])
        return len(self.longest_dataset)

    def collater(self, samples: Sequence[Any]) -> Any:
        if self.eval_key is not None:
            return self.datasets[self.eval_key].collater(samples)
        parts = self.datasets.items()
        return OrderedDict((name, one.collater([sample[name] for sample in samples])) for name, one in parts)

    def num_tokens(self, index: int) -> int:
        return max(one.num_tokens(self._index(name, index)) for name, one in self.datasets.items())

    def size(self, index: int) -> Any:
        return {name: one.size(self._index(name, index)) for name, one in self.datasets.items()}

    def ordered_indices(self) -> np.ndarray:
        """The numbers of the examples; each dataset is read in its own order."""
        if self._ordered is None:
            self._ordered = {name: one.ordered_indices() for name, one in self.datasets.items()}
        return np.arange(len(self))

    def filter_indices_by_size(self, indices: np.ndarray, max_positions: Any = None) -> tuple[np.ndarray, list[int]]:
        """Leave out examples longer than *max_positions*, by name or for all, of each dataset."""
        self.ordered_indices()
        assert self._ordered is not None
        ignored: list[int] = []
        for name, one in self.datasets.items():
            limit = max_positions[name] if isinstance(max_positions, dict) else max_positions
            self._ordered[name], left = one.filter_indices_by_size(self._ordered[name], limit)
            ignored += list(left)
        return np.arange(len(self)), ignored
