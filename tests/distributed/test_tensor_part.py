"""Parts of a tensor know the whole one, are copied to the host, and are written as one tensor."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from fairseq.distributed.tensor_part import TensorPart, rows_of

MATRIX = torch.arange(15.0).view(5, 3)


def test_rows_are_those_of_chunk_and_what_is_left_over_is_empty() -> None:
    for size in range(9):
        for count in range(1, 12):
            ends = [rows_of(size, index, count) for index in range(count)]
            lengths = [len(part) for part in torch.chunk(torch.arange(size), count)] if size else []
            assert [end - first for first, end in ends] == lengths + [0] * (count - len(lengths))
            assert all(first == before for (first, _), (_, before) in zip(ends[1:], ends, strict=False))


def test_the_parts_of_two_processes_are_planned_as_one_tensor() -> None:
    halves = [TensorPart(MATRIX[:3].half(), 0, MATRIX.shape), TensorPart(MATRIX[3:].half(), 3, MATRIX.shape)]
    plans = [SavePlan(part.__create_write_items__("model/w", None)) for part in halves]
    _, metadata = create_default_global_save_plan(plans)
    tensor = metadata.state_dict_metadata["model/w"]
    assert tensor.size == (5, 3) and tensor.properties.dtype == torch.float16
    assert [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks] == [((0, 0), (3, 3)), ((3, 0), (2, 3))]


@pytest.mark.parametrize("shape, offsets", [((5,), (3,)), ((5, 3), (3, 0)), ((5, 3, 2), (3, 0, 0))])
def test_a_part_is_written_under_the_name_and_the_place_of_its_rows(
    shape: tuple[int, ...], offsets: tuple[int, ...]
) -> None:
    whole = torch.zeros(shape, dtype=torch.half)
    (item,) = TensorPart(whole[3:], 3, whole.shape).__create_write_items__("model/w", None)
    index = MetadataIndex("model/w", torch.Size(offsets))
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size([2, *shape[1:]]))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.half), whole.shape)
    assert item == WriteItem(index, WriteItemType.SHARD, tensor_data=data)
    assert item.index.offset == offsets  # two indices of one name may be equal without it


def test_an_empty_part_is_not_written() -> None:
    assert TensorPart(MATRIX[:0], 5, MATRIX.shape).__create_write_items__("w", None) == []
