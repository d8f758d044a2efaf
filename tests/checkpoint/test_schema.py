"""Each part of a checkpoint beside the weights has its type: others are rejected, with the part and
the type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fairseq.checkpoint import schema
from fairseq.checkpoint.standins import Attributes
from fairseq.errors import UserError

COUNT, POSITIVE = "a count", "a count of at least 1"
NAMES = {"text": "a", "unicode": "é"}
MATRIX = torch.ones(2)
KINDS: dict[str, tuple[list[Any], list[Any]]] = {  # valid and invalid values
    COUNT: ([0, 1, 2**63 - 1], [-1, 2**63, True, 1.0, "1", None, [1], torch.tensor(1)]),
    POSITIVE: ([1, 2**63 - 1], [0, -1, 2**63, True, 1.0, "1", None]),
    "text": (["", "adam"], [1, None, b"a", ["a"]]),
    "a number": ([None, 0, -1.5, float("inf"), torch.tensor(2), torch.ones(1, 1)], [True, "1", [1], {}, MATRIX]),
    "a number greater than 0": ([1, 1e-9, torch.ones(1)], [0, -1.0, True, "1", None, MATRIX, float("nan")]),
    "a dict": ([None, {}, NAMES, Attributes(a=1)], [1, "a", [1], {1: 2}, {"a": 1, None: 2}, False]),
    "true or false": ([True, False], [0, 1, None, "true", []]),
    "a milestone's name": (["", "checkpoint_words_10.pt"], ["checkpoint1.pt", "../checkpoint_words_10.pt", 1, None]),
    "a list": ([[], [1]], [(), {}, "a", 1]),
    "a list of tensors by name": (
        [None, [], [{}, {"cpu": MATRIX}]],
        [1, "a", {}, ({},), [1], [{"cpu": MATRIX}, None], [{"cpu": 1}], [{"cpu": MATRIX, "cuda": [1]}]],
    ),
}
ITERATOR, SCALER, AVERAGE = "extra_state.train_iterator", "extra_state.loss_scaler", "extra_state.average"
DUE = "extra_state.due"
HISTORY = "optimizer_history[1]"
FIELDS = {
    "a milestone's name": [f"{DUE}.milestone"],
    "text": [f"{HISTORY}.criterion_name", f"{HISTORY}.optimizer_name", f"{ITERATOR}.read.order"],
    COUNT: [
        f"{HISTORY}.num_updates",
        *(f"extra_state.{name}" for name in ("epoch", "batch_offset", "without_improvement", "skipped_nonfinite")),
        f"{ITERATOR}.iterations_in_epoch",
        *(f"{ITERATOR}.read.{name}" for name in ("units", "block_size", "cut", "seed", "count")),
        *(f"{SCALER}.{name}" for name in ("updates", "last_rescale", "overflows", "last_overflow")),
        f"{SCALER}.overflows_in_a_row",
        f"{AVERAGE}.count",
    ],
    POSITIVE: [*(f"{ITERATOR}.{name}" for name in ("epoch", "read.step", "read.processes")), f"{DUE}.epoch"],
    "true or false": [f"{DUE}.{name}" for name in ("end_of_epoch", "validate", "save")],
    "a number": [f"extra_state.{name}" for name in ("val_loss", "best", "previous_training_time")],
    "a number greater than 0": [f"{SCALER}.scale"],
    "a dict": [
        f"{HISTORY}.lr_scheduler_state",
        *(
            f"extra_state.{name}"
            for name in ("sums", "average", "criterion", "loss_scaler", "carried", "validation", "due")
        ),
        f"{ITERATOR}.read",
    ],
    "a list": [f"{AVERAGE}.mean", f"{AVERAGE}.weights"],
    "a list of tensors by name": ["extra_state.random"],
}


def state_with(part: str, value: Any) -> dict[str, Any]:
    """A checkpoint whose *part* is *value*."""
    state: dict[str, Any] = {"args": {}, "model": {}, "optimizer_history": [{}, {}], "extra_state": {}}
    first, *fields = part.replace("[1]", ".1").split(".")
    holder, name = state, first
    for field in fields:
        holder = holder[int(name)] if isinstance(holder, list) else holder.setdefault(name, {})
        name = field
    holder[int(name) if isinstance(holder, list) else name] = value
    return state


def rejection(state: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        schema.check(state, "c.pt")
    return str(error.value)


def line(part: str, wanted: str) -> str:
    return f"c.pt: not a checkpoint ('{part}' is not {wanted}); use another checkpoint"


@pytest.mark.parametrize("part, kind", [(part, kind) for kind, names in FIELDS.items() for part in names])
def test_each_field_takes_the_values_of_its_type_and_no_others(part: str, kind: str) -> None:
    valid, invalid = KINDS[kind]
    for value in valid:
        if part in (AVERAGE, SCALER, DUE, f"{ITERATOR}.read") and isinstance(value, Attributes):
            continue  # whose own fields are looked up by name
        schema.check(state_with(part, value), "c.pt")
    for value in invalid:
        assert rejection(state_with(part, value)) == line(part, kind)


@pytest.mark.parametrize("name", ["args", "cfg"])
def test_settings_are_a_namespace_or_a_dict_with_names_and_hold_no_tensors(name: str) -> None:
    for value in (None, {}, {"a": [1, {2: 3}]}, Attributes(a=1)):
        schema.check({name: value}, "c.pt")
    for value in (1, "a", [1], {1: 2}, False):
        assert rejection({name: value}) == line(name, "a dict with names")
    for value in ({"a": torch.ones(1)}, {"a": [{2: torch.ones(1)}]}, Attributes(a=torch.ones(1))):
        assert rejection({name: value}) == line(name, "settings without tensors")


@pytest.mark.parametrize(
    "name, wanted, valid, invalid",
    [
        ("dictionary", "text", [None, "", "ab"], [1, b"a", ["a"], False]),
        ("optimizer_history", "a list", [None, [], [{}]], [1, "text", {"a": 1}, ({},)]),
        ("extra_state", "a dict", [None, {}], [1, "text", [1], False]),
        ("last_optimizer_state", "a dict", [None, {}, {"rounds": 3}], [1, "text", [1], False]),
    ],
)
def test_each_part_has_its_type(name: str, wanted: str, valid: list[Any], invalid: list[Any]) -> None:
    for value in valid:
        schema.check({name: value}, "c.pt")
    for value in invalid:
        assert rejection({name: value}) == line(name, wanted)


def test_every_entry_of_the_history_is_checked() -> None:
    assert rejection({"optimizer_history": [{}, 1]}) == line("optimizer_history[1]", "a dict")
    assert rejection({"optimizer_history": [{"num_updates": -1}, {}]}) == line(
        "optimizer_history[0].num_updates", COUNT
    )


def test_the_iterators_position_is_a_dict_that_is_there_in_full() -> None:
    for value in (1, "a", [1], None):
        assert rejection(state_with(ITERATOR, value)) == line(ITERATOR, "a dict")


# The optimizer's state


def optimizer(group: Any = None, **parts: Any) -> dict[str, Any]:
    """A state of an optimizer with one group, of *group* and a parameter."""
    groups = [{"params": [0], **(group or {})}]
    return {"last_optimizer_state": {"param_groups": groups, "state": {}, **parts}}


GROUPS = "last_optimizer_state.param_groups"
ENTRIES = "last_optimizer_state.state"


def test_an_optimizer_has_groups_with_parameters_by_number_or_name() -> None:
    for params in ([], [0], [2**63 - 1, 1], ["a", "b"], ["n" * 1000]):
        schema.check(optimizer({"params": params}), "c.pt")
    for groups in (1, None, "text", [], {}, ({"params": []},)):
        assert rejection(optimizer(param_groups=groups)) == line(GROUPS, "a list of groups")
    for group in (1, {}, {"params": 1}, {"params": (1,)}, *({"params": [x]} for x in ("n" * 1001, -1, 1.5, None))):
        wanted = line(GROUPS, "a list of groups with 'params'")
        assert rejection(optimizer(param_groups=[{"params": [0]}, group])) == wanted
    assert rejection(optimizer(param_groups=[{"params": [0, "a", -1]}])) == line(
        GROUPS, "a list of groups with 'params'"
    )


@pytest.mark.parametrize("name", ["lr", "weight_decay", "momentum", "eps"])
def test_settings_of_a_group_are_numbers_or_pairs_of_numbers(name: str) -> None:
    for value in (0, 0.1, torch.ones(1), [0.1, 0.2], (1, 2)):
        schema.check(optimizer({name: value}), "c.pt")
    for value in (None, "0.1", True, {}, MATRIX, [0.1, "a"], ("a",), {0.1}):
        assert rejection(optimizer({name: value})) == line(f"{GROUPS}.{name}", "a number")


def test_states_of_parameters_are_dicts_with_names_and_a_step_that_is_a_number() -> None:
    for entries in ({}, {0: {}}, {"w": {"step": 1}}, {0: {"step": torch.tensor(1.0), "exp_avg": MATRIX}, "k": MATRIX}):
        schema.check(optimizer(state=entries), "c.pt")
    for entries in (1, None, "text", [1]):
        assert rejection(optimizer(state=entries)) == line(ENTRIES, "a dict")
    for entry in (1, None, [], {1: 2}, {"a": 1, 2: 3}):
        assert rejection(optimizer(state={0: {}, "w": entry})) == line(f"{ENTRIES}['w']", "a dict")
    for step in ("x", None, [1], MATRIX):
        assert rejection(optimizer(state={"n" * 99: {"step": step}})) == line(
            f"{ENTRIES}['{'n' * 59}].step", "a number"
        )
    assert rejection(optimizer(state={"n" * 99: 1})) == line(f"{ENTRIES}['{'n' * 59}]", "a dict")


@pytest.mark.parametrize("missing", ["param_groups", "state"])
def test_half_an_optimizers_state_is_rejected(missing: str) -> None:
    state = optimizer()
    del state["last_optimizer_state"][missing]
    assert "is not a " in rejection(state)
