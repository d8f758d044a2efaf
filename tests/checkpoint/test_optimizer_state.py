"""Optimizer states in checkpoints are by parameter name; numbered ones, ours of version 0.1 and fairseq's, are read."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from torch import nn

from fairseq.checkpoint.optimizer_state import ParameterNames
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
    with pytest.raises(UserError, match="5 parameters, the model has 2.*--reset-optimizer"):
        own.by_number(state, [{"params": list(other.parameters())}], list(other.state_dict()))


def test_a_state_of_another_layout_passes_unchanged():
    _, optimizer, names = trained()
    assert names.by_name({"rounds": 3}) == {"rounds": 3} == names.by_number({"rounds": 3}, optimizer.param_groups)
