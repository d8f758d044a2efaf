"""Joined arrays are read like their concatenation."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fairseq.data.indexed_dataset import JoinedArray

parts = st.lists(st.lists(st.integers(0, 999), max_size=7), min_size=1, max_size=5)


@given(parts=parts, data=st.data())
def test_indexing_is_that_of_the_concatenation(parts: list[list[int]], data: st.DataObject) -> None:
    arrays = [np.array(part, np.uint16) for part in parts]
    joined, whole = JoinedArray(arrays), np.concatenate(arrays)
    assert len(joined) == len(whole) and np.array_equal(np.asarray(joined), whole)
    cut = st.none() | st.integers(-40, 40)
    part = slice(data.draw(cut), data.draw(cut))
    assert np.array_equal(joined[part], whole[part]) and joined[part].dtype == whole.dtype
    if len(whole):
        index = st.integers(0, len(whole) - 1)
        rows = np.array(data.draw(st.lists(st.tuples(index, index, index), min_size=1, max_size=4)))
        assert np.array_equal(joined[rows], whole[rows]) and joined[rows].dtype == whole.dtype
        assert joined[data.draw(index)] in whole


def test_parts_of_two_types_are_read_as_the_wider() -> None:
    joined = JoinedArray([np.array([1, 2], np.uint16), np.array([70000], np.int32)])
    assert joined.dtype == np.int32 and joined[np.array([0, 1])].dtype == np.int32 and joined[0:2].dtype == np.int32
