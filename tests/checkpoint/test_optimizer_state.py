"""Optimizer states in checkpoints are by parameter name; fairseq's numbered ones are read."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from mistakes import user_error
from torch import nn

from fairseq.checkpoint.optimizer_state import ParameterNames, convert_state
from fairseq.errors import UserError
from fairseq.optim import build_optimizer, parameter_groups


class Model(nn.Module):
    """A tied pair, a norm and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5, bias=False)
        self.norm = nn.LayerNorm(3)
        self.middle = nn.Linear(3, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight


NAMES = ["embed.weight", "norm.weight", "norm.bias", "middle.weight", "middle.bias"]


def trained(*, no_decay=False, name="adam"):
    """A model after three updates, its optimizer, and the names."""
    model = Model()
    groups = parameter_groups(model.named_parameters(), no_decay)
    optimizer = build_optimizer(Namespace(optimizer=name, lr=[0.1], weight_decay=0.1), groups)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for p in optimizer.params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return model, optimizer, ParameterNames(model, nn.Module(), optimizer.param_groups)


def moments(model, optimizer):
    return {key: optimizer.optimizer.state[p]["exp_avg"].clone() for key, p in model.named_parameters()}


def test_states_are_named_and_tied_parameters_are_named_once():
    model, optimizer, names = trained()
    state = names.by_name(optimizer.state_dict())
    assert state["param_groups"][0]["params"] == NAMES and list(state["state"]) == NAMES
    assert torch.equal(state["state"]["middle.weight"]["exp_avg"], moments(model, optimizer)["middle.weight"])


@pytest.mark.parametrize(("before", "after"), [(False, False), (True, True), (False, True), (True, False)])
def test_a_named_state_is_restored_whatever_the_groups(before, after):
    model, optimizer, names = trained(no_decay=before)
    other, restored, own = trained(no_decay=after)
    for p in restored.params:
        restored.optimizer.state[p]["exp_avg"].zero_()
    restored.load_state_dict(own.by_number(names.by_name(optimizer.state_dict()), restored.param_groups))
    wanted = moments(model, optimizer)
    assert all(torch.equal(wanted[key], value) for key, value in moments(other, restored).items())
    assert [group["weight_decay"] for group in restored.param_groups] == ([0.1, 0.0] if after else [0.1])


def test_a_numbered_state_is_in_the_order_of_the_checkpoints_parameters():
    model, optimizer, names = trained()
    named = names.by_name(optimizer.state_dict())
    order = [
        "middle.bias",
        "out.weight",
        "norm.weight",
        "embed.weight",
        "middle.weight",
        "norm.bias",
    ]
    distinct = ["middle.bias", "embed.weight", "norm.weight", "middle.weight", "norm.bias"]
    group = {**named["param_groups"][0], "params": [10, 11, 12, 13, 14]}
    numbered = {
        "state": {10 + i: named["state"][name] for i, name in enumerate(distinct)},
        "param_groups": [group],
    }
    restored = names.by_number(numbered, optimizer.param_groups, order)
    for index, name in enumerate(NAMES):
        assert torch.equal(restored["state"][index]["exp_avg"], named["state"][name]["exp_avg"])


def test_fairseqs_flat_state_is_cut_in_the_order_of_the_checkpoints_parameters():
    model, optimizer, names = trained()
    named = names.by_name(optimizer.state_dict())
    order = NAMES[::-1]
    flat = {
        key: torch.cat([named["state"][name][key].flatten() for name in order]) for key in ("exp_avg", "exp_avg_sq")
    }
    state = {
        "state": {0: {"step": 3, **flat}},
        "param_groups": [{**named["param_groups"][0], "params": [0]}],
        "loss_scale": 4.0,
    }
    restored = names.by_number(state, optimizer.param_groups, order)
    for index, name in enumerate(NAMES):
        assert torch.equal(restored["state"][index]["exp_avg"], named["state"][name]["exp_avg"])
        assert restored["state"][index]["step"] == 3


def test_parameters_of_the_criterion_come_after_the_models():
    model, criterion = Model(), nn.Linear(2, 2)
    params = [*model.parameters(), *criterion.parameters()]
    names = ParameterNames(model, criterion, [{"params": params}])
    assert names.names == [*NAMES, "criterion.weight", "criterion.bias"]


@pytest.mark.parametrize("named", [True, False])
def test_a_state_of_another_model_is_a_user_error(named):
    _, optimizer, names = trained()
    state = names.by_name(optimizer.state_dict()) if named else optimizer.state_dict()
    other = nn.Linear(3, 3)
    own = ParameterNames(other, nn.Module(), [{"params": list(other.parameters())}])
    with user_error("5 parameters, the model has 2.*--reset-optimizer"):
        own.by_number(state, [{"params": list(other.parameters())}], list(other.state_dict()))


def test_a_state_of_another_layout_passes_unchanged():
    _, optimizer, names = trained()
    assert names.by_name({"rounds": 3}) == {"rounds": 3} == names.by_number({"rounds": 3}, optimizer.param_groups)


# Layouts


def numbered(*sizes: int, **settings) -> dict:
    """A state over parameters of *sizes*, one a group, whose moments are their number."""
    return {
        "state": {n: {"exp_avg": torch.full((size,), float(n)), "step": n} for n, size in enumerate(sizes)},
        "param_groups": [{"params": [n], "lr": 0.1 * n, **settings} for n in range(len(sizes))],
        "rounds": 3,
    }


def names_of(*sizes: int, groups: tuple[int, ...] = ()) -> tuple[ParameterNames, list[dict]]:
    """Names of parameters a, b, … of *sizes* in groups of so many, and the groups."""
    model = nn.ParameterDict({chr(97 + n): nn.Parameter(torch.zeros(size)) for n, size in enumerate(sizes)})
    parameters = list(model.values())
    cuts = torch.tensor([0, *(groups or [len(sizes)])]).cumsum(0).tolist()
    grouped = [{"params": parameters[low:high], "lr": 1.0} for low, high in zip(cuts, cuts[1:], strict=False)]
    return ParameterNames(model, nn.Module(), grouped), grouped


def test_names_and_shapes_are_in_the_optimizers_order_and_groups():
    names, _ = names_of(2, 3, 4, 5, groups=(1, 2, 1))
    assert names.names == ["a", "b", "c", "d"] and names.groups == [["a"], ["b", "c"], ["d"]]
    assert names.shapes == {"a": (2,), "b": (3,), "c": (4,), "d": (5,)}
    assert names.aliases == {name: name for name in "abcd"}


def test_a_tied_parameter_has_the_name_of_its_first_place_under_all_of_them():
    names = ParameterNames(model := Model(), nn.Module(), [{"params": list(model.parameters())}])
    assert names.aliases["out.weight"] == names.aliases["embed.weight"] == "embed.weight"


def test_parameters_that_no_checkpoint_has_are_named_by_their_number():
    loose, model = nn.Parameter(torch.zeros(7)), nn.Linear(2, 2)
    groups = [{"params": [model.weight, loose]}, {"params": [model.bias]}]
    names = ParameterNames(model, nn.Module(), groups)
    assert names.names == ["weight", "parameters.1", "bias"] and names.shapes["parameters.1"] == (7,)
    assert names.groups == [["weight", "parameters.1"], ["bias"]]


def test_naming_keeps_settings_of_groups_and_whatever_else_there_is():
    names, _ = names_of(2, 3, groups=(1, 1))
    named = names.by_name(numbered(2, 3, betas=(0.9, 0.98)))
    assert named["rounds"] == 3 and list(named["state"]) == ["a", "b"] and named["state"]["b"]["step"] == 1
    assert named["param_groups"] == [
        {"params": ["a"], "lr": 0.0, "betas": (0.9, 0.98)},
        {"params": ["b"], "lr": 0.1, "betas": (0.9, 0.98)},
    ]


def test_parameters_without_a_state_have_none_after_naming_and_numbering():
    names, groups = names_of(2, 3, groups=(1, 1))
    state = numbered(2, 3)
    del state["state"][0]
    named = names.by_name(state)
    assert list(named["state"]) == ["b"]
    assert list(names.by_number(named, groups)["state"]) == [1]


@pytest.mark.parametrize(
    "state", [{"param_groups": 3, "state": {}}, {"param_groups": [{"params": [0]}], "state": {}}, {"rounds": 3}]
)
def test_a_state_of_another_layout_is_copied_as_it_is(state):
    names, _ = names_of(2, 3)
    found = names.by_name(state)
    assert found == state and found is not state


def test_a_state_that_is_no_state_of_groups_is_restored_as_it_is():
    names, groups = names_of(2, 3)
    for state in ({"rounds": 3}, {"param_groups": None, "rounds": 3}):
        found = names.by_number(state, groups)
        assert found == state and found is not state


def test_a_group_takes_the_settings_of_its_first_parameters_group():
    names, groups = names_of(2, 3, 4, groups=(2, 1))
    named = {
        "state": {},
        "param_groups": [{"params": ["a"], "lr": 0.1}, {"params": ["b", "c"], "lr": 0.2, "eps": 1e-8}],
    }
    restored = names.by_number(named, groups)["param_groups"]
    assert restored == [{"params": [0, 1], "lr": 0.1}, {"params": [2], "lr": 0.2, "eps": 1e-8}]


@pytest.mark.parametrize("same", [True, False])
def test_only_a_group_of_other_parameters_keeps_its_own_weight_decay(same):
    names, groups = names_of(2, 3, groups=(1, 1))
    groups = [{**groups[0], "weight_decay": 0.5}, {**groups[1], "weight_decay": 0.0}]
    stored = [["a"], ["b"]] if same else [["a", "b"]]
    named = {"state": {}, "param_groups": [{"params": members, "weight_decay": 0.1} for members in stored]}
    restored = names.by_number(named, groups)["param_groups"]
    assert [group["weight_decay"] for group in restored] == ([0.1, 0.1] if same else [0.5, 0.0])


def test_groups_in_another_order_are_the_same_groups():
    names, groups = names_of(2, 3, groups=(1, 1))
    groups = [{**group, "weight_decay": 0.5} for group in groups]
    named = {
        "state": {},
        "param_groups": [{"params": ["b"], "weight_decay": 0.2}, {"params": ["a"], "weight_decay": 0.1}],
    }
    assert [group["weight_decay"] for group in names.by_number(named, groups)["param_groups"]] == [0.1, 0.2]


def refusal(names: ParameterNames, state: dict, groups: list[dict], stored: tuple[str, ...] = ()) -> str:
    with pytest.raises(UserError) as error:
        names.by_number(state, groups, stored)
    return error.value.with_flags


ADVICE = "it belongs to another model; use --reset-optimizer to start without it"


@pytest.mark.parametrize(
    "stored, examples",
    [
        ("a", " (b differ)"),
        ("abc", " (c differ)"),
        ("ade", " (b, d, e differ)"),
        ("adec", " (b, c, d, … differ)"),
        ("bazyx", " (x, y, z differ)"),
    ],
)
def test_a_state_of_other_parameters_names_up_to_three_that_differ(stored, examples):
    names, groups = names_of(2, 3)
    state = {"state": {}, "param_groups": [{"params": list(stored)}]}
    assert refusal(names, state, groups) == (
        f"checkpoint: its optimizer state is for {len(stored)} parameters, the model has 2{examples}: {ADVICE}"
    )


def test_a_numbered_state_of_another_number_of_parameters_is_refused():
    names, groups = names_of(2, 3)
    message = f"checkpoint: its optimizer state is for 3 parameters, the model has 2: {ADVICE}"
    assert refusal(names, numbered(2, 3, 4), groups, ("a", "b")) == message


def test_numbers_are_in_the_models_order_where_the_checkpoint_names_other_parameters():
    names, groups = names_of(2, 2)
    for stored in ((), ("a",), ("a", "c"), ("a", "x", "y")):
        restored = names.by_number(numbered(2, 2), groups, stored)
        assert [restored["state"][n]["step"] for n in (0, 1)] == [0, 1]
    restored = names.by_number(numbered(2, 2), groups, ("x", "b", "y", "a", "b"))
    assert [restored["state"][n]["step"] for n in (0, 1)] == [1, 0]


def test_buffers_of_a_checkpoint_are_no_parameters_of_its_order():
    model = nn.BatchNorm1d(2)  # weight, bias and three buffers
    groups = [{"params": [model.bias, model.weight]}]
    names = ParameterNames(model, nn.Module(), groups)
    restored = names.by_number(numbered(2, 2), groups, ("running_mean", "weight", "bias", "running_var"))
    assert [restored["state"][n]["step"] for n in (0, 1)] == [1, 0]


def test_numbers_of_a_criterions_parameters_follow_the_models():
    model, criterion = nn.Linear(2, 2, bias=False), nn.Linear(3, 3, bias=False)
    groups = [{"params": [criterion.weight, model.weight]}]
    names = ParameterNames(model, criterion, groups)
    assert names.names == ["criterion.weight", "weight"]
    restored = names.by_number(numbered(4, 9), groups, ("weight",))
    assert [restored["state"][n]["step"] for n in (0, 1)] == [1, 0]


def test_a_flat_state_is_cut_with_its_numbers_and_settings_and_others_shared():
    names, groups = names_of(2, 3, groups=(1, 1))
    state = {
        "state": {
            5: {"exp_avg": torch.arange(5.0), "step": 7, "scalar": torch.tensor(2.0), "name": "x", "none": None},
            6: {"exp_avg": torch.zeros(1)},
        },
        "param_groups": [{"params": [5], "lr": 0.5}],
        "rounds": 3,
    }
    restored = names.by_number(state, groups, ("b", "a"))
    assert restored["rounds"] == 3 and list(restored["state"]) == [0, 1]
    assert restored["state"][1]["exp_avg"].tolist() == [0, 1, 2] and restored["state"][0]["exp_avg"].tolist() == [3, 4]
    for entry in restored["state"].values():
        assert (entry["step"], float(entry["scalar"]), entry["name"], entry["none"]) == (7, 2.0, "x", None)
    assert restored["param_groups"] == [{"params": [0], "lr": 0.5}, {"params": [1], "lr": 0.5}]


def test_a_flat_state_of_another_size_is_refused():
    names, groups = names_of(2, 3)
    for size in (4, 6):
        state = {"state": {0: {"exp_avg": torch.zeros(size)}}, "param_groups": [{"params": [0]}]}
        assert "is for 1 parameters, the model has 2" in refusal(names, state, groups)


def test_a_flat_state_before_the_first_update_is_empty_for_every_parameter():
    names, groups = names_of(2, 3)
    restored = names.by_number({"state": {}, "param_groups": [{"params": [0], "lr": 0.5}]}, groups)
    assert restored["param_groups"] == [{"params": [0, 1], "lr": 0.5}]
    assert not any(restored["state"].values())


def test_the_state_of_a_single_parameter_is_not_flat():
    names, groups = names_of(4)
    state = {"state": {0: {"exp_avg": torch.zeros(2, 2)}}, "param_groups": [{"params": [0]}]}
    assert names.by_number(state, groups, ("a",))["state"][0]["exp_avg"].shape == (2, 2)


# Conversion


def test_each_value_is_converted_with_its_parameter_and_nothing_else():
    parameters = [nn.Parameter(torch.zeros(n)) for n in (1, 2)]
    state = {
        "state": {"a": {"x": 1, "y": 2}, "b": {"x": 3}, "other": {"x": 4}},
        "param_groups": [{"params": ["a"], "lr": 0.1}, {"params": ["b"]}],
        "rounds": 3,
    }
    found = convert_state(state, parameters, lambda p, value: (len(p), value))
    assert found["state"] == {"a": {"x": (1, 1), "y": (1, 2)}, "b": {"x": (2, 3)}, "other": {"x": 4}}
    assert found["param_groups"] == state["param_groups"] and found["rounds"] == 3
    assert state["state"]["a"] == {"x": 1, "y": 2}


def test_entries_beyond_the_parameters_are_left_as_they_are():
    state = {"state": {0: {"x": 1}, 1: {"x": 2}}, "param_groups": [{"params": [0, 1]}]}
    parameters = [nn.Parameter(torch.zeros(n)) for n in (1, 2, 3)]
    assert convert_state(state, parameters[:1], lambda p, value: len(p))["state"] == {0: {"x": 1}, 1: {"x": 2}}
    assert convert_state(state, parameters, lambda p, value: 5 * len(p))["state"] == {0: {"x": 5}, 1: {"x": 10}}


def test_a_state_of_another_layout_is_not_converted():
    for state in ({"rounds": 3}, {"param_groups": None, "state": {0: {"x": 1}}}):
        found = convert_state(state, [], lambda p, value: None)
        assert found == state and found is not state
