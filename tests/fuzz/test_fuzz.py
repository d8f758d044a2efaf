"""Damaged files: no traceback, no hang, no unbounded memory, and nothing accepted that changes a
result."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.check import check
from fuzz.readers import READERS


@pytest.mark.parametrize("name", READERS)
def test_seeds_are_read(name):
    reader = READERS[name]
    for seed in sorted(reader.seeds.iterdir()):
        reader.read(seed)


def test_a_count_of_steps_below_zero_is_rejected(tmp_path):
    assert "lacks a valid step" in check("resume", 829, tmp_path)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=8, derandomize=True)  # the runner draws new ones: python -m tests.fuzz.run
@given(number=st.integers(0, 2**40))
def test_damaged_files_are_rejected_in_one_line_or_read_as_they_are(name, number, tmp_path_factory):
    check(name, number, tmp_path_factory.mktemp("fuzz"))
