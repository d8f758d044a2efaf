"""Parts of tensors, as processes of sharded training hold and write them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MANIFEST = "manifest.json"  # of a sharded checkpoint: its tensors, and where their parts lie


@dataclass(frozen=True, eq=False)
class TensorPart:
    """Rows *local* of a tensor of size *shape*; *first* is the number of the first one."""

    local: Tensor
    first: int
    shape: torch.Size

    @property
    def size_of_whole(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape.numel() * self.local.element_size()

    def copied(self, again: bool = True) -> TensorPart:
        """A copy in host memory; without *again* the same rows where they are there already."""
        return TensorPart(self.local.detach().to("cpu", copy=again), self.first, self.shape)

    def __create_write_items__(self, name: str, _: object) -> list[object]:
        """What PyTorch's planner writes of the tensor called *name*: these rows."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        # There may be more processes than rows.
        if not self.local.numel():
            return []
        # Parts are rows, so that offsets in other dimensions are 0.
        offsets = torch.Size([self.first, *[0] * (len(self.shape) - 1)])
        chunk = ChunkStorageMetadata(offsets, self.local.size())
        data = TensorWriteData(chunk, TensorProperties(dtype=self.local.dtype), self.shape)
        return [WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)]


def rows_of(size: int, index: int, count: int) -> tuple[int, int]:
    """First row, and end, of part *index* of *count* of *size* rows; as ``torch.chunk`` cuts."""
    each = -(-size // count)
    return min(index * each, size), min((index + 1) * each, size)
