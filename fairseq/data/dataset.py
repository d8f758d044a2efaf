"""The protocol of what an epoch iterator reads.

Everything random in a batch depends on seed, epoch and example number only. A task tells which
examples a split has in ``dataset(split)``, how they form batches in
``sampler(dataset, model, batching)``, and what is done to a sample on the host in
``prepare(sample, epoch)``; ``FairseqTask.iterator`` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

Sample = dict[str, Any]


class Dataset(Protocol):
    """Numbered examples of known sizes, from which batches are made.

    An example is a block of a corpus, a sentence, a pair of sentences. Samplers see the sizes only;
    tokens are read when a batch is made.
    """

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each example, integers [n]: what batches by size are cut by."""

    def __len__(self) -> int:
        """The number of examples n."""

    def batch(self, indices: np.ndarray) -> Sample:
        """Return the examples *indices* [B], at least one, as one padded sample.

        It holds ``id`` int64 [B]; ``nsentences`` B; ``ntokens``, the number of targets;
        ``net_input``, the model's keyword arguments; ``target``.
        """

    def checksums(self) -> Mapping[str, int]:
        """Return a number for each file that examples are read from, by its name, that is another
        one for another file: equal on all processes."""

    def at_epoch(self, epoch: int) -> Dataset:
        """Return the dataset as it is read in *epoch* (from 1): a view with the same sizes.

        Whatever is random in a batch depends on the seed, *epoch* and the examples' numbers only,
        so that a resumed run reads the same, on any number of processes.
        """

    def select(self, keep: np.ndarray) -> Dataset:
        """Return a view of the examples for which *keep*, bool [n], is true, numbered anew."""


class Examples:
    """fairseq's methods of a dataset of blocks: its examples one by one, and batches of them."""

    pad: int
    sizes: Any
    batch: Any
    __len__: Any

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``id``, ``source`` and ``target`` [T] of example *index*."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        sample = self.batch(np.array([index]))
        return {"id": int(index), "source": sample["net_input"]["src_tokens"][0], "target": sample["target"][0]}

    def collater(self, samples: Sequence[dict[str, Any]]) -> Sample:
        """The examples *samples* as one batch, padded on the right."""
        from fairseq.data.data_utils import collate

        return collate(samples, self.pad)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    size = num_tokens

    def ordered_indices(self) -> np.ndarray:
        """The numbers of the examples in their order."""
        return np.arange(len(self))
