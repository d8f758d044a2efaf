"""States of optimizers: restored bit for bit, from fairseq's files, between our Adam and apex's,
and refused."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from mistakes import logged, user_error
from optimizers import RATES, build, parameters, train

from fairseq.checkpoint import load
from fairseq.errors import UserError
from fairseq.modules import devices

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


class FakeFusedAdam(torch.optim.Optimizer):
    """As apex's: the number of updates is kept in the group."""

    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.seen = []

    def step(self, closure=None):
        self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])


def test_apexs_adam_is_used_where_it_is_and_takes_over_our_state(monkeypatch, caplog):
    caplog.set_level("INFO")
    state = build("adam", parameters())
    train(state, RATES[:3])
    state = state.state_dict()

    apex, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    apex.optimizers, optimizers.FusedAdam = optimizers, FakeFusedAdam
    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    assert not isinstance(build("adam", parameters()).optimizer, FakeFusedAdam)  # apex has no CPU kernels
    monkeypatch.setattr(devices, "is_cuda", lambda device: True)
    assert not isinstance(build("adam", parameters(), no_apex=True).optimizer, FakeFusedAdam)
    fused = build("adam", parameters())
    assert isinstance(fused.optimizer, FakeFusedAdam)
    assert logged(caplog) == ["--optimizer adam: using NVIDIA apex's FusedAdam; --no-apex turns it off"]
    assert fused.param_groups[0]["betas"] == (0.9, 0.98) and fused.param_groups[0]["weight_decay"] == 0.1
    for p in fused.params:
        p.grad = torch.ones_like(p)
    fused.scaled_step(0.25)
    assert len(fused.optimizer.seen) == 1 and all((grad == 0.25).all() for grad in fused.optimizer.seen[0])
    fused.load_state_dict(state)
    assert fused.param_groups[0]["step"] == 3

    apexs = fused.state_dict()
    for entry in apexs["state"].values():
        entry.pop("step")
    ours = build("adam", parameters(), no_apex=True)
    ours.load_state_dict(apexs)
    assert [entry["step"] for entry in ours.state_dict()["state"].values()] == [3, 3, 3]
