"""Tuples of a pickle are counted before it is read, as keys of dicts are hashed while it is."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq import checkpoint
from fairseq.checkpoint import bounds
from fairseq.checkpoint.bounds import UnboundedPickle, check_tuples
from fairseq.errors import UserError

LEAVES = st.none() | st.integers() | st.text(max_size=3) | st.floats()  # bytes are made by a call in old protocols


def nested(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    repeated = values.map(lambda value: (value, value))
    several = st.lists(values, max_size=5)
    return repeated | several | several.map(tuple) | st.dictionaries(st.integers(), values, max_size=4)


def count(value: Any) -> int:
    """Values of a tuple, those in its tuples included."""
    return 1 + sum(map(count, value)) if isinstance(value, tuple) else 1


def largest(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return max([count(value), *map(largest, inner)])


def check_limit(pickled: bytes, limit: int) -> None:
    """Assert that the tuples of *pickled* have *limit* values at most, and one of them so many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "LARGEST_TUPLE", limit)
        check_tuples(io.BytesIO(pickled))
        patch.setattr(bounds, "LARGEST_TUPLE", limit - 1)
        with pytest.raises(UnboundedPickle):
            check_tuples(io.BytesIO(pickled))


@given(st.recursive(LEAVES, nested, max_leaves=30), st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_the_limit_is_exact(value: Any, protocol: int) -> None:
    check_limit(pickle.dumps(value, protocol), largest(value))


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("value", [(1, 2, 3, 4, (5, 6)), [(1, 2, 3, ()), {4: (5, 6)}]], ids=["long", "in a list"])
def test_the_limit_of_some_tuples_is_exact(value: Any, protocol: int) -> None:
    check_limit(pickle.dumps(value, protocol), largest(value))


@pytest.mark.parametrize(
    "pickled",
    [b"\x80\x02K\x01K\x02\x862\x86.", b"\x80\x02K\x01K\x02\x86q\x050h\x05h\x05\x86."],
    ids=["a value twice", "a number of its own"],
)
def test_values_that_no_pickler_repeats_so_are_counted(pickled: bytes) -> None:
    assert pickle.loads(pickled) == ((1, 2), (1, 2))
    check_limit(pickled, 7)


@given(st.recursive(LEAVES | st.binary(max_size=3), nested, max_leaves=30))
def test_the_limit_is_exact_where_bytes_are_values(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "LARGEST_TUPLE", largest(value))
        check_tuples(io.BytesIO(pickle.dumps(value, 3)))


def test_the_end_of_the_pickle_is_the_end() -> None:
    file = io.BytesIO(pickle.dumps((1, 2)) + b"the tensors")
    check_tuples(file)
    assert file.read() == b"the tensors"


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02", b"\x80\x02}", b"\x80\x02t.", b"\x80\x02h\x07.", b"no pickle", b"\xff" * 9]
)
def test_what_is_no_pickle_is_named_so(content: bytes) -> None:
    with pytest.raises(ValueError):
        check_tuples(io.BytesIO(content))


class Key:
    """A dict with a key that doubles at each level, pickled without being hashed."""

    def __reduce__(self) -> tuple[Any, ...]:
        key: Any = "x"
        for _ in range(22):  # four million values: the reader would take a second, and forty levels weeks
            key = (key, key)
        return OrderedDict, (), None, None, iter([(key, 1)])


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_with_a_key_that_doubles_is_rejected_unread(
    tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = torch.load(runs.GOLDEN / "baseline.pt", weights_only=False)
    torch.save({**state, "extra_state": Key()}, tmp_path / "c.pt", _use_new_zipfile_serialization=zipped)
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(
        UserError, match="not a checkpoint .its values repeat to more than 1,048,576 in one tuple.; use"
    ):
        checkpoint.read(tmp_path / "c.pt")


def test_tuples_made_by_a_call_are_counted() -> None:
    size = torch.Size(range(3000))
    for key in (((size,) * 3000), frozenset({(size,) * 600, (size, size)})):
        with pytest.raises(UnboundedPickle):
            check_tuples(io.BytesIO(pickle.dumps({key: 2})))
    check_tuples(io.BytesIO(pickle.dumps({size: 2, frozenset({1, 2}): OrderedDict(a=size)})))


def test_a_pickle_that_does_and_undoes_without_end_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "STEPS", 1000)
    check_tuples(io.BytesIO(b"\x80\x02" + b"N0" * 498 + b"N."))
    file = io.BytesIO(b"\x80\x02" + b"N0" * 10**6 + b"N.")
    with pytest.raises(UnboundedPickle, match="it takes more than 1,000 steps"):
        check_tuples(file)
    assert file.tell() < 1010


def test_marks_without_end_are_rejected_after_a_thousand() -> None:
    for content in (b"(" * 10**7, b"(" * 10**6 + b"1" * 10**6 + b"N."):
        file = io.BytesIO(b"\x80\x02" + content)
        with pytest.raises(UnboundedPickle, match=r"more than 1,000 of its values are nested"):
            check_tuples(file)
        assert file.tell() < 1010
    deep: Any = ()
    for _ in range(200):
        deep = (1, 2, 3, deep)
    check_tuples(io.BytesIO(pickle.dumps(deep)))


def test_the_older_format_makes_no_room_for_tensors_that_are_larger_than_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.pt"
    shared = torch.zeros(1000)
    state = {"model": {"a": shared, "b": shared[:300], "c": torch.zeros(300, dtype=torch.int64)}}
    torch.save(state, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    assert {name: value.shape for name, value in checkpoint.read(path)["model"].items()} == {
        "a": (1000,), "b": (300,), "c": (300,)
    }  # fmt: skip
    monkeypatch.setattr(torch, "load", None)
    path.write_bytes(content[:1250])  # 1,300 elements
    with pytest.raises(UserError, match="c.pt: not a checkpoint .its tensors are larger than the file.; use another"):
        checkpoint.read(path)


def test_a_reference_to_a_storage_of_an_unknown_form_is_larger_than_every_file() -> None:
    for pickled in (b"\x80\x02N\x85Q.", b"\x80\x02NQ.", b"\x80\x02(NNNNNtQ."):
        assert check_tuples(io.BytesIO(pickled)) >= 1 << 62
