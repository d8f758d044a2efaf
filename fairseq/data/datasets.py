"""``fairseq.data``: datasets that plug-ins compose, wrapped around one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq.data.data_utils import batch_by_size, collate_tokens, filter_by_size, numpy_seed


class FairseqDataset(torch.utils.data.Dataset[Any]):
    """Base of datasets: examples by number, batches by ``collater``."""

    sizes: Any

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[object]:
        return (self[index] for index in range(len(self)))

    def collater(self, samples: Sequence[Any]) -> Any:
        return torch.utils.data.default_collate(list(samples))

    def num_tokens(self, index: int) -> int:
        """The tokens of example *index*, which the size of a batch is measured by."""
        return int(np.max(self.size(index)))

    def num_tokens_vec(self, indices: Sequence[int]) -> np.ndarray:
        return np.array([self.num_tokens(int(index)) for index in indices])

    def size(self, index: int) -> Any:
        """The size of example *index*, which the model's positions are compared with."""
        return self.sizes[index]

    def ordered_indices(self) -> np.ndarray:
        """The numbers of the examples in the order in which batches are made."""
        return np.arange(len(self), dtype=np.int64)

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        required_batch_size_multiple: int = 1,
        **options: object,
    ) -> list[list[int]]:
        """Batches of *indices*; see :func:`fairseq.data.data_utils.batch_by_size`."""
        limits = (max_tokens, max_sentences, required_batch_size_multiple)
        return batch_by_size(indices, self.num_tokens, None, *limits)

    def filter_indices_by_size(self, indices: np.ndarray, max_sizes: object) -> tuple[np.ndarray, list[int]]:
        """The *indices* of examples that are not longer than *max_sizes*, and the others."""
        fitting = filter_by_size(indices, self, max_sizes)
        return fitting, np.setdiff1d(indices, fitting).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Draw anew what is random in *epoch*."""

    # Attributes that copies of fairseq's tasks and iterators read.
    supports_prefetch = False
    can_reuse_epoch_itr_across_epochs = True


class BaseWrapperDataset(FairseqDataset):
    """A dataset around another, *dataset*, which answers what this one does not define."""

    def __init__(self, dataset: FairseqDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def collater(self, samples: Sequence[Any]) -> Any:
        return self.dataset.collater(samples) if hasattr(self.dataset, "collater") else super().collater(samples)

    @property
    def sizes(self) -> Any:
        return self.dataset.sizes

    def num_tokens(self, index: int) -> int:
        return self.dataset.num_tokens(index)

    def size(self, index: int) -> Any:
        return self.dataset.size(index)

    def ordered_indices(self) -> np.ndarray:
        return self.dataset.ordered_indices()

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class ListDataset(BaseWrapperDataset):
    """A list of examples."""

    def __init__(self, dataset: Any, sizes: Any = None) -> None:
        super().__init__(dataset)
        self._sizes = [len(item) if hasattr(item, "__len__") else 1 for item in dataset] if sizes is None else sizes

    sizes = property(lambda self: self._sizes)
    # From the base, not from the wrapper: a list has no such methods to ask.
    num_tokens, size = FairseqDataset.num_tokens, FairseqDataset.size
    ordered_indices = FairseqDataset.ordered_indices

    def collater(self, samples: Sequence[Any]) -> Any:
        return list(samples)


class _Changed(BaseWrapperDataset):
    """A dataset that changes the examples of another, and their lengths by one rule."""

    def change(self, item: Tensor) -> Tensor:
        """*item* as it is here."""
        raise NotImplementedError

    def changed_length(self, tokens: int) -> int:
        """The length here of an example of *tokens* tokens."""
        return tokens

    def __getitem__(self, index: int) -> Tensor:
        return self.change(self.dataset[index])

    @property
    def sizes(self) -> np.ndarray:
        return np.array([self.size(index) for index in range(len(self))])

    def num_tokens(self, index: int) -> int:
        return self.changed_length(int(self.dataset.num_tokens(index)))

    def size(self, index: int) -> int:
        return self.changed_length(int(self.dataset.size(index)))


class PrependTokenDataset(_Changed):
    """Examples after *token*; None: as they are."""

    def __init__(self, dataset: FairseqDataset, token: int | None = None) -> None:
        super().__init__(dataset)
        self.token = [] if token is None else [token]

    def change(self, item: Tensor) -> Tensor:
        return torch.cat([item.new_tensor(self.token), item])

    def changed_length(self, tokens: int) -> int:
        return tokens + len(self.token)


class AppendTokenDataset(PrependTokenDataset):
    """Examples before *token*; None: as they are."""

    def change(self, item: Tensor) -> Tensor:
        return torch.cat([item, item.new_tensor(self.token)])


class TruncateDataset(_Changed):
    """The first *truncation_length* tokens of examples."""

    def __init__(self, dataset: FairseqDataset, truncation_length: int) -> None:
        super().__init__(dataset)
        self.length = truncation_length

    def change(self, item: Tensor) -> Tensor:
        return item[: self.length]

    def changed_length(self, tokens: int) -> int:
        return min(tokens, self.length)

    # As in fairseq, batches are measured before the cut.
    num_tokens = BaseWrapperDataset.num_tokens


class RandomCropDataset(TruncateDataset):
    """*truncation_length* tokens of examples, from a place that is drawn anew in each epoch."""

    def __init__(self, dataset: FairseqDataset, truncation_length: int, seed: int = 1) -> None:
        super().__init__(dataset, truncation_length)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch = epoch

    def __getitem__(self, index: int) -> Tensor:
        item = self.dataset[index]
        # By index and epoch, so that a crop does not depend on the order in which worker processes
        # read.
        with numpy_seed(self.seed, self.epoch, index):
            excess = len(item) - self.length
            # As in fairseq, whose crops never reach the last token.
            start = np.random.randint(excess) if excess > 0 else 0
        return item[start : start + self.length]


def maybe_shorten_dataset(
    dataset: FairseqDataset,
    split: str,
    shorten_data_split_list: str,
    shorten_method: str,
    tokens_per_sample: int,
    seed: int,
) -> FairseqDataset:
    """*dataset*, with rows cut to *tokens_per_sample* by *shorten_method* if *split* is listed, or
    nothing is."""
    if shorten_data_split_list and split not in shorten_data_split_list.split(","):
        return dataset
    if shorten_method == "truncate":
        return TruncateDataset(dataset, tokens_per_sample)
    return RandomCropDataset(dataset, tokens_per_sample, seed) if shorten_method == "random_crop" else dataset


class RollDataset(_Changed):
    """Examples turned by *shifts* tokens."""

    def __init__(self, dataset: FairseqDataset, shifts: int) -> None:
        super().__init__(dataset)
        self.shifts = shifts

    def change(self, item: Tensor) -> Tensor:
        return item.roll(self.shifts)


class StripTokenDataset(BaseWrapperDataset):
    """Examples without *id_to_strip* at their ends."""

    def __init__(self, dataset: FairseqDataset, id_to_strip: int) -> None:
        super().__init__(dataset)
        self.token = id_to_strip

    def __getitem__(self, index: int) -> Tensor:
        item = self.dataset[index]
        real = item.ne(self.token).nonzero().flatten()
        return item[int(real[0]) : int(real[-1]) + 1] if len(real) else item[:0]


class OffsetTokensDataset(BaseWrapperDataset):
    """Examples with *offset* added to every number."""

    def __init__(self, dataset: FairseqDataset, offset: int) -> None:
        super().__init__(dataset)
        self.offset = offset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index] + self.offset


class PadDataset(BaseWrapperDataset):
    """Batches of rows padded with *pad_idx*, on the left or on the right."""

    def __init__(self, dataset: FairseqDataset, pad_idx: int, left_pad: bool, pad_length: int | None = None) -> None:
        super().__init__(dataset)
        self.pad_idx, self.left_pad, self.pad_length = pad_idx, left_pad, pad_length

    def collater(self, samples: Sequence[Tensor]) -> Tensor:
        return collate_tokens(samples, self.pad_idx, left_pad=self.left_pad, pad_to_length=self.pad_length)


class LeftPadDataset(PadDataset):
    """Batches of rows padded on the left."""

    def __init__(self, dataset: FairseqDataset, pad_idx: int, pad_length: int | None = None) -> None:
        super().__init__(dataset, pad_idx, True, pad_length)


class RightPadDataset(PadDataset):
    """Batches of rows padded on the right."""

    def __init__(self, dataset: FairseqDataset, pad_idx: int, pad_length: int | None = None) -> None:
        super().__init__(dataset, pad_idx, False, pad_length)


class IdDataset(FairseqDataset):
    """The numbers of the examples."""

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 0

    def collater(self, samples: Sequence[int]) -> Tensor | int:
        return torch.tensor(samples)


class NumSamplesDataset(IdDataset):
    """The number of examples of a batch."""

    def __getitem__(self, index: int) -> int:
        return 1

    def collater(self, samples: Sequence[int]) -> Tensor | int:
        return sum(samples)


class NumelDataset(BaseWrapperDataset):
    """The number of tokens of examples; with *reduce* their sum in a batch."""

    def __init__(self, dataset: FairseqDataset, reduce: bool = False) -> None:
        super().__init__(dataset)
        self.reduce = reduce

    def __getitem__(self, index: int) -> int:
        example = self.dataset[index]
        # One that is None has one element, as in NumPy.
        return example.numel() if torch.is_tensor(example) else int(np.size(example))

    def collater(self, samples: Sequence[int]) -> Tensor | int:
        return sum(samples) if self.reduce else torch.tensor(samples)


class RawLabelDataset(ListDataset):
    """Labels that are given as numbers."""

    def __init__(self, labels: Sequence[object]) -> None:
        super().__init__(labels)

    def collater(self, samples: Sequence[Any]) -> Tensor:
        return torch.tensor(samples)


class SortDataset(BaseWrapperDataset):
    """A dataset whose batches are made in the order of *sort_order*, arrays of which the last
    decides first."""

    def __init__(self, dataset: FairseqDataset, sort_order: Any) -> None:
        super().__init__(dataset)
        self.sort_order = sort_order if isinstance(sort_order, list | tuple) else [sort_order]

    def ordered_indices(self) -> np.ndarray:
        return np.lexsort(self.sort_order)


class ConcatDataset(FairseqDataset):
    """Datasets one after the other, each *sample_ratios* times."""

    def __init__(self, datasets: Sequence[FairseqDataset], sample_ratios: int | Sequence[int] = 1) -> None:
        ratios = [sample_ratios] * len(datasets) if isinstance(sample_ratios, int) else sample_ratios
        self.datasets = list(datasets)
        repeated = (dataset for dataset, ratio in zip(datasets, ratios, strict=True) for _ in range(ratio))
        self.positions = [(dataset, index) for dataset in repeated for index in range(len(dataset))]

    def __getitem__(self, index: int) -> Any:
        dataset, position = self.positions[index]
        return dataset[position]

    def __len__(self) -> int:
        return len(self.positions)

    def collater(self, samples: Sequence[Any]) -> Any:
        return self.datasets[0].collater(samples)

    def size(self, index: int) -> Any:
        dataset, position = self.positions[index]
        return dataset.size(position)

    @property
    def sizes(self) -> np.ndarray:
        return np.array([self.size(index) for index in range(len(self))])

    def ordered_indices(self) -> np.ndarray:
        """The numbers of the examples by size; of pairs by the first, then the second."""
        sizes = self.sizes
        return np.argsort(sizes) if sizes.ndim == 1 else np.lexsort(sizes.T[::-1])

    def set_epoch(self, epoch: int) -> None:
        for dataset in self.datasets:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)


class ConcatSentencesDataset(FairseqDataset):
    """Examples of several datasets that have one index, joined to one row."""

    def __init__(self, *datasets: FairseqDataset) -> None:
        self.datasets = datasets

    def __getitem__(self, index: int) -> Tensor:
        return torch.cat([dataset[index] for dataset in self.datasets])

    def __len__(self) -> int:
        return len(self.datasets[0])

    def collater(self, samples: Sequence[Any]) -> Any:
        return self.datasets[0].collater(samples)

    @property
    def sizes(self) -> np.ndarray:
        return np.sum([np.asarray(dataset.sizes) for dataset in self.datasets], 0)

    def num_tokens(self, index: int) -> int:
        return sum(dataset.num_tokens(index) for dataset in self.datasets)

    def size(self, index: int) -> Any:
        return sum(dataset.size(index) for dataset in self.datasets)

    def ordered_indices(self) -> np.ndarray:
        return self.datasets[0].ordered_indices()

    set_epoch = ConcatDataset.set_epoch


class NestedDictionaryDataset(FairseqDataset):
    """Datasets, or constants, by the names of a sample, which may be dicts of names themselves.

    The size of an example is made of *sizes* [n] of datasets.
    """

    def __init__(self, defn: Mapping[str, Any], sizes: Sequence[Any] | None = None) -> None:
        self.defn = dict(_flat(defn))
        self._sizes = sizes if sizes is None or isinstance(sizes, list | tuple) else [sizes]
        # Datasets of numbers of examples have the length 0: another one tells how many examples
        # there are.
        self.first = next(dataset for dataset in self.defn.values() if len(dataset))

    def __getitem__(self, index: int) -> dict[str, object]:
        return {name: dataset[index] for name, dataset in self.defn.items()}

    def __len__(self) -> int:
        return len(self.first)

    def collater(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        for name, dataset in self.defn.items():
            *path, last = name.split(".")
            part = sample
            for step in path:
                part = part.setdefault(step, {})
            part[last] = dataset.collater([example[name] for example in samples])
        return sample

    @property
    def sizes(self) -> Any:
        return np.max(np.array([np.asarray(s) for s in self._sizes]), 0) if self._sizes else self.first.sizes

    def size(self, index: int) -> Any:
        if not self._sizes:
            return self.first.size(index)
        return tuple(int(size[index]) for size in self._sizes) if len(self._sizes) > 1 else int(self._sizes[0][index])

    def set_epoch(self, epoch: int) -> None:
        for dataset in self.defn.values():
            dataset.set_epoch(epoch)


def _flat(defn: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in defn.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, torch.utils.data.Dataset) else ListDataset(value)


class LRUCacheDataset(BaseWrapperDataset):
    """The dataset as it is: nothing is cached."""

    def __init__(self, dataset: FairseqDataset, token: object = None) -> None:
        super().__init__(dataset)
