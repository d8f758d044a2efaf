"""Scripts that write data with fairseq's builders, and copies of its datasets that call its
compiled functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch

from fairseq.data.block_datasets import IndexedDataset
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.data.token_block_utils_fast import (
    PlasmaView,
    _get_block_to_dataset_index_fast,
    _get_slice_indices_fast,
    make_builder,
)
from fairseq.errors import UserError


def test_files_of_a_builder_are_those_of_preprocessing(tmp_path: Path) -> None:
    valid, test = (IndexedDataset(str(runs.DATA / split)) for split in ("valid", "test"))
    builder = make_builder(str(tmp_path / "a.bin"), "mmap", vocab_size=1200)
    for line in valid:
        builder.add_item(line)
    builder.finalize(str(tmp_path / "a.idx"))
    for end in ("idx", "bin"):
        assert (tmp_path / f"a.{end}").read_bytes() == (runs.DATA / f"valid.{end}").read_bytes()
    builder = make_builder(str(tmp_path / "both.bin"), vocab_size=1200)
    builder.merge_file_(str(tmp_path / "a"))
    builder.merge_file_(str(runs.DATA / "test"))
    builder.finalize(str(tmp_path / "both.idx"))
    both = IndexedCorpus(str(tmp_path / "both"))
    assert np.array_equal(both.sizes, [*valid.sizes, *test.sizes])
    assert torch.equal(IndexedDataset(str(tmp_path / "both"))[len(valid)], test[0])
    assert IndexedDataset.exists(str(tmp_path / "both")) and not IndexedDataset.exists(str(tmp_path / "none"))


def test_an_index_of_other_data_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    builder = make_builder(str(tmp_path / "a.bin"))
    builder.add_item(torch.arange(5))
    with pytest.raises(UserError, match=r"b\.idx: does not belong to .*a\.bin; give .*a\.idx"):
        builder.finalize(str(tmp_path / "b.idx"))
    assert list(tmp_path.iterdir()) == []


SIZES = np.array([3, 5, 1, 2, 2, 7, 1, 4])


@pytest.mark.parametrize(
    ("mode", "size", "expected"),
    [
        ("none", 6, [(0, 6), (6, 12), (12, 18), (18, 24), (24, 25)]),
        ("eos", None, [(0, 3), (3, 8), (8, 9), (9, 11), (11, 13), (13, 20), (20, 21), (21, 25)]),
        ("complete", 6, [(0, 3), (3, 9), (9, 13), (13, 20), (20, 25)]),
        ("complete_doc", 6, [(0, 3), (3, 8), (9, 13), (13, 20), (21, 25)]),
    ],
)
def test_cuts_are_those_of_fairseqs_rules(mode: str, size: int | None, expected: list[tuple[int, int]]) -> None:
    slices = _get_slice_indices_fast(SIZES, mode, size, 1)
    assert slices.tolist() == [list(one) for one in expected]
    line = np.repeat(np.arange(len(SIZES)), SIZES)
    place = np.concatenate([np.arange(size) for size in SIZES])
    found = _get_block_to_dataset_index_fast(SIZES, slices)
    assert found.tolist() == [[line[start], place[start], line[end - 1]] for start, end in expected]


def test_documents_end_with_a_line_of_one_token() -> None:
    with pytest.raises(UserError, match="document_sep_len 2: documents end with a line of one token; use 1"):
        _get_slice_indices_fast(SIZES, "complete_doc", 6, 2)


def test_an_array_in_shared_memory_is_an_array() -> None:
    view: Any = PlasmaView(SIZES, "split", 1, plasma_path="/tmp/plasma")
    assert view.array is SIZES
