"""States of optimizers: restored bit for bit, from fairseq's files, between our Adam and apex's,
and refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from mistakes import user_error
from optimizers import RATES, build, parameters, train

from fairseq.checkpoint import load
from fairseq.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", ["nag", "adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_restored_optimizer_goes_on_bit_for_bit(name, dtype, tmp_path):
    params = parameters(dtype)
    optimizer = build(name, params)
    train(optimizer, RATES[:3])
    torch.save({"model": [p.detach() for p in params], "state": optimizer.state_dict()}, tmp_path / "state.pt")
    train(optimizer, RATES[3:], seed=5)

    stored = torch.load(tmp_path / "state.pt", weights_only=True)
    again = [torch.nn.Parameter(p) for p in stored["model"]]
    restored = build(name, again)
    before = copy.deepcopy(stored["state"])
    restored.load_state_dict(stored["state"])
    train(restored, RATES[3:], seed=5)
    for p, q in zip(params, again, strict=True):
        assert torch.equal(p, q)
    for index, entry in before["state"].items():
        for key, value in entry.items():  # the loaded state is a copy: training leaves the file's tensors alone
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(stored["state"]["state"][index][key]))


@pytest.mark.parametrize(
    ("path", "name"), [("language_model/shortformer_stage1.pt", "nag"), ("roberta/checkpoint.pt", "adam")]
)
def test_the_originals_states_load_and_come_out_again(path, name):
    state = load(GOLDEN / path)["last_optimizer_state"]
    count = len(state["param_groups"][0]["params"])
    key = "momentum_buffer" if name == "nag" else "exp_avg"
    params = [torch.nn.Parameter(torch.zeros_like(state["state"][i][key])) for i in range(count)]
    optimizer = build(name, params)
    optimizer.load_state_dict(state)
    written = optimizer.state_dict()
    for index in range(count):
        assert written["state"][index].keys() == state["state"][index].keys()
        for field, value in state["state"][index].items():
            assert torch.equal(torch.as_tensor(written["state"][index][field]), torch.as_tensor(value))
    for field, value in state["param_groups"][0].items():
        assert written["param_groups"][0][field] == value
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_a_state_of_another_model_is_a_user_error():
    optimizer = build("nag", parameters())
    train(optimizer, RATES[:1])
    state = optimizer.state_dict()
    with user_error("3 parameters, the model has 2.*--reset-optimizer"):
        build("nag", parameters()[:2]).load_state_dict(state)
    with user_error("has shape.*--reset-optimizer"):
        build("nag", parameters()[::-1]).load_state_dict(state)


def test_overrides_win_over_the_restored_settings():
    state = build("nag", parameters(), weight_decay=0.1).state_dict()
    optimizer = build("nag", parameters(), weight_decay=0.5)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    optimizer.load_state_dict(state, {"weight_decay": 0.3})
    assert optimizer.param_groups[0]["weight_decay"] == 0.3
    with pytest.raises(UserError, match="optimizer_overrides: no setting 'wait_decay'.*weight_decay"):
        optimizer.load_state_dict(state, {"wait_decay": 0.3})


def test_adam_takes_over_a_state_of_apex_which_counts_updates_by_group():
    before = build("adam", parameters())
    train(before, RATES[:3])
    state = before.state_dict()
    state["param_groups"] = [{**group, "step": 3} for group in state["param_groups"]]
    state["state"] = {n: {k: v for k, v in entry.items() if k != "step"} for n, entry in state["state"].items()}
    ours = build("adam", parameters())
    ours.load_state_dict(state)
    assert [entry["step"] for entry in ours.state_dict()["state"].values()] == [3, 3, 3]
