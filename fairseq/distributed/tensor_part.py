"""Parts of tensors, as processes of sharded training hold and write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TensorPart:
    """Rows *local* of a tensor of size *shape*; *first* is the number of the first one."""

    local: Tensor
    first: int
    shape: torch.Size

    def __create_write_items__(self, name: str, _: object) -> list[object]:
        """What PyTorch's planner writes of the tensor called *name*: these rows."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.chunks()
        ]

    def chunks(self) -> list[Any]:
        """Return these rows as PyTorch's planners describe them: none, or one chunk."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        # There may be more processes than rows. Offsets in other dimensions are 0.
        offsets = torch.Size([self.first, *[0] * (len(self.shape) - 1)])
        return [ChunkStorageMetadata(offsets, self.local.size())] if self.local.numel() else []


def rows_of(size: int, index: int, count: int) -> tuple[int, int]:
    """First row, and end, of part *index* of *count* of *size* rows; as ``torch.chunk`` cuts."""
    each = -(-size // count)
    return min(index * each, size), min((index + 1) * each, size)
