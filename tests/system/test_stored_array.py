"""Arrays in files: the same elements as in memory, and an error where the file changes."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq.errors import UserError
from fairseq.system import stored_array
from fairseq.system.stored_array import StoredArray


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    array = np.random.default_rng(1).integers(0, 60000, 5000).astype("<u2")
    path = tmp_path_factory.mktemp("stored") / "a.bin"
    path.write_bytes(b"header!" + array.tobytes() + b"rest")
    return path, array


@pytest.mark.parametrize("runs", [1 << 10, 0])
@given(st.lists(st.integers(-5000, 4999), max_size=60), st.integers(0, 4000), st.integers(0, 900))
def test_every_index_reads_what_an_array_in_memory_reads(values, runs, numbers, first, length):
    path, array = values
    stored = StoredArray(str(path), "<u2", len(array), 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_array, "_RUNS", runs)
        patch.setattr(stored_array, "_WINDOW", 64)
        single = np.array(numbers, dtype=np.int64)
        rows = np.clip(first + np.arange(length)[None, :] + np.array([[0], [700], [3]]), 0, 4999)
        for index in (single, rows, rows.T, slice(first, first + length), slice(None, None, -7), slice(-9, None)):
            assert np.array_equal(stored[index], array[index])
    assert stored[-1] == array[-1] and stored[np.int64(3)] == array[3]
    assert np.array_equal(np.asarray(stored), array)
    assert np.array_equal(np.concatenate(list(stored.pieces(1001))), array)
    with pytest.raises(IndexError):
        stored[5000]


def test_a_file_that_is_truncated_while_it_is_open_is_an_error(values, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(values[1].tobytes())
    stored = StoredArray(str(path), "<u2", len(values[1]))
    os.truncate(path, 4096)
    for index in (slice(4000, 4010), np.array([4999]), slice(0, 4)):
        with pytest.raises(UserError, match=f"{path}: changed while it was read"):
            stored[index]


def test_a_file_that_is_overwritten_in_place_is_an_error_and_a_new_time_stamp_is_none(values, tmp_path):
    path = tmp_path / "a"
    content = values[1].tobytes()
    path.write_bytes(content)
    stored = StoredArray(str(path), "<u2", len(values[1]))
    stored.seal(zlib.crc32(content))
    os.utime(path, ns=(1, 1))
    assert np.array_equal(stored[:9], values[1][:9]), "the content is the same"
    with open(path, "r+b") as file:
        file.seek(9000)
        file.write(b"\0\0\0\0")
    with pytest.raises(UserError, match="changed while it was read"):
        stored[:9]


def test_a_file_that_is_replaced_by_another_is_read_on(values, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(values[1].tobytes())
    stored = StoredArray(str(path), "<u2", len(values[1]))
    (tmp_path / "b").write_bytes(b"other")
    os.replace(tmp_path / "b", path)
    assert np.array_equal(stored[4000:], values[1][4000:])
