"""The plain data of a checkpoint end: their depth, whole numbers and repetitions have limits, which
are exact."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq.checkpoint import bounds
from fairseq.checkpoint.bounds import check_bounded
from fairseq.errors import UserError


def rejection(state: Any) -> str:
    with pytest.raises(UserError) as error:
        check_bounded(state, "c.pt")
    return str(error.value)


def line(place: str, found: str) -> str:
    return f"c.pt: not a checkpoint ('{place}' is {found}); use another checkpoint"


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda value: {"a": value},
    "list": lambda value: [value],
    "tuple": lambda value: (value,),
    "set": lambda value: {value},
    "frozenset": lambda value: frozenset([value]),
    "object": lambda value: Namespace(a=value),
    "key": lambda value: {value: 0},
}
HASHABLE = ("set", "frozenset", "key")


@pytest.mark.parametrize("kind", WRAPPERS)
def test_whole_numbers_of_128_bits_are_the_longest_wherever_they_are(kind: str) -> None:
    inner = (lambda value: (value,)) if kind in HASHABLE else (lambda value: value)
    for value in (2**128 - 1, 1 - 2**128):
        check_bounded(WRAPPERS[kind](inner(value)), "c.pt")
    for value in (2**128, -(2**128)):
        assert "a number of 129 bits" in rejection(WRAPPERS[kind](inner(value)))


def test_numbers_of_thousands_of_bits_are_named_with_their_place() -> None:
    assert rejection({"extra_state": {"carried": [0, 2**4095]}}) == line(
        "extra_state.carried.1", "a number of 4,096 bits"
    )
    assert rejection(Namespace(a=Namespace(b=2**128))) == line("a.b", "a number of 129 bits")
    assert rejection({"X.x": 2**128}) == line("X.x", "a number of 129 bits")
    assert rejection({(1, 2**128): 0}) == line("a key.1", "a number of 129 bits")


def test_a_place_has_at_most_four_names_of_60_characters() -> None:
    deep = {"a": {"b" * 80: {"c": {"d": {"e": {"f": 2**128}}}}}}
    assert rejection(deep) == line(f"a.{'b' * 60}.c.d", "a number of 129 bits")


@pytest.mark.parametrize("kind", ["dict", "list", "tuple", "object"])
def test_64_levels_are_the_deepest(kind: str) -> None:
    value: Any = [0]
    for _ in range(63):
        value = WRAPPERS[kind](value)
    check_bounded(value, "c.pt")
    assert "nested deeper than 64 levels" in rejection(WRAPPERS[kind](value))


def test_values_without_parts_take_no_level() -> None:
    for leaf in (0, "text", None, 1.5, torch.ones(2), torch.nn.Parameter(torch.ones(1)), Namespace()):
        value: Any = leaf
        for _ in range(64):
            value = [value]
        check_bounded(value, "c.pt")


def test_empty_containers_take_a_level() -> None:
    for leaf in ({}, [], (), set(), frozenset()):
        value: Any = leaf
        for _ in range(64):
            value = [value]
        assert "nested deeper than 64 levels" in rejection(value)


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_a_part_that_contains_itself_is_named(levels: int) -> None:
    inner: list[Any] = []
    value: Any = inner
    for _ in range(levels - 1):
        value = [value]
    inner.append(value)
    assert rejection({"x": value}) == line(".".join(["x", "0", "0", "0"][: levels + 1]), "a value that contains itself")


def test_a_state_that_contains_itself_is_rejected() -> None:
    state: dict[str, Any] = {"a": 1}
    state["b"] = [state]
    assert rejection(state) == line("b.0", "a value that contains itself")


def test_an_object_with_parts_of_a_dict_has_both() -> None:
    class Both(dict):
        pass

    both = Both(a=1)
    both.own = 2**128
    assert rejection({"x": both}) == line("x.own", "a number of 129 bits")


def naive_size(value: Any) -> int:
    """Values of *value* as a tree, itself included."""
    return 1 + sum(map(naive_size, value)) if isinstance(value, list) else 1


def naive_stored(value: Any) -> int:
    """Values that are written, each part once but for its references."""
    seen: dict[int, int] = {}

    def visit(item: Any) -> None:
        if isinstance(item, list) and id(item) not in seen:
            seen[id(item)] = len(item)
            for inner in item:
                visit(inner)

    visit(value)
    return 1 + sum(seen.values())


@st.composite
def shared(draw: st.DrawFn) -> list[Any]:
    """Lists that contain earlier ones, several times."""
    parts: list[Any] = [0, [], [0, 0]]
    for _ in range(draw(st.integers(1, 5))):
        parts.append([parts[i] for i in draw(st.lists(st.integers(0, len(parts) - 1), max_size=9))])
    return [parts[-1]]


@given(shared(), st.integers(-2, 2))
def test_a_part_counts_as_often_as_it_is_referred_to(state: list[Any], more: int) -> None:
    size, stored = naive_size(state), naive_stored(state)
    repeated = size - 4 * stored + more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "REPEATED", repeated)
        if more >= 0:
            check_bounded(state, "c.pt")
        else:
            message = f"its {stored:,} values repeat to more than 2^{size.bit_length() - 1}); use another checkpoint"
            assert rejection(state) == f"c.pt: not a checkpoint ({message}"


def test_each_value_that_is_stored_may_repeat_four_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "REPEATED", 6)
    shared = [0] * 10
    check_bounded([shared] * 7, "c.pt")  # 78 = 6 + 4 · 18 values, of which 18 are stored
    assert "its 19 values repeat to more than 2^6)" in rejection([shared] * 8)  # 89 values


def test_every_kind_of_part_counts() -> None:
    for wrap in (WRAPPERS[kind] for kind in ("dict", "list", "tuple", "object")):
        value: Any = [0] * 1024
        value = [wrap(value)] * 2048  # two million values, of which 3,075 are stored
        assert "repeat to more than 2^21" in rejection(value)
        check_bounded(value[:1000], "c.pt")
