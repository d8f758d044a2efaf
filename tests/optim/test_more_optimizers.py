"""Adagrad, Adafactor and LAMB: their papers' formulas, half precision, and states that travel."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest
import runs
import torch
from mistakes import user_error
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq.errors import UserError
from fairseq.optim import build_optimizer, elementwise
from fairseq.optim.groups import NO_DECAY
from fairseq.training.averaging import WeightAverage

SETTINGS = {
    "adagrad": {"weight_decay": 0.1},
    "adafactor": {"beta1": 0.9, "weight_decay": 0.1, "scale_parameter": True},
    "lamb": {"weight_decay": 0.1},
}
SHAPES = [(3, 4), (5,), (2, 3, 4)]


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in SHAPES]


def build(name, params, **settings):
    return build_optimizer(Namespace(**{"optimizer": name, "lr": [0.1], **SETTINGS[name], **settings}), params)


def gradients(steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES] for _ in range(steps)]


def train(optimizer, grads, factor=None):
    for step in grads:
        for p, grad in zip(optimizer.params, step, strict=True):
            p.grad = grad.to(p.dtype)
        if factor is None:
            optimizer.step()
        else:
            optimizer.scaled_step(factor)


def adafactor(p, grads, lr=0.1, beta1=0.9, decay=0.1):
    """Algorithm 5 of the paper, matrix by matrix, with the row and column means as sums over the
    whole product."""
    rows = columns = square = first = 0.0
    for t, grad in enumerate(grads, 1):
        beta2 = 1 - t**-0.8
        squares = grad**2 + 1e-30
        if p.dim() > 1:
            rows = beta2 * rows + (1 - beta2) * squares.mean(-1, keepdim=True)
            columns = beta2 * columns + (1 - beta2) * squares.mean(-2, keepdim=True)
            second = rows * columns / rows.mean(-2, keepdim=True)
        else:
            square = beta2 * square + (1 - beta2) * squares
            second = square
        update = grad / second.sqrt()
        update = update / max(1.0, update.square().mean().sqrt().item())
        rate = lr * max(1e-3, p.square().mean().sqrt().item())
        first = beta1 * first + (1 - beta1) * rate * update
        p = p * (1 - decay * rate) - first
    return p


def lamb(params, grads, lr=0.1, decay=0.1):
    first, second = [0.0] * len(params), [0.0] * len(params)
    for t, step in enumerate(grads, 1):
        norm = math.sqrt(sum(grad.square().sum().item() for grad in step))
        for i, grad in enumerate(step):
            grad = grad / max(1.0, norm)
            first[i] = 0.9 * first[i] + 0.1 * grad
            second[i] = 0.999 * second[i] + 0.001 * grad**2
            update = first[i] / (1 - 0.9**t) / ((second[i] / (1 - 0.999**t)).sqrt() + 1e-8) + decay * params[i]
            params[i] = params[i] - lr * params[i].norm() / update.norm() * update
    return params


def test_adafactor_follows_the_paper():
    params, grads = parameters(torch.float64), gradients(5)
    wanted = [adafactor(p.detach().clone(), [step[i] for step in grads]) for i, p in enumerate(params)]
    train(build("adafactor", params), grads)
    for p, value in zip(params, wanted, strict=True):
        assert torch.allclose(p, value, atol=1e-9)


def test_adafactors_relative_step_replaces_the_rate():
    one, other = parameters(), parameters()
    train(build("adafactor", one, lr=[0.1], relative_step=True), gradients(3))
    train(build("adafactor", other, lr=[7.0], relative_step=True), gradients(3))
    assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


def test_lamb_follows_the_paper_and_clips_the_global_norm():
    params, grads = parameters(torch.float64), gradients(5)
    wanted = lamb([p.detach().clone() for p in params], grads)
    train(build("lamb", params), grads)
    for p, value in zip(params, wanted, strict=True):
        assert torch.allclose(p, value, atol=1e-6)


def test_adagrad_is_torchs_own():
    ours, theirs = parameters(), parameters()
    train(build("adagrad", ours), gradients(4))
    optimizer = torch.optim.Adagrad(theirs, lr=0.1, weight_decay=0.1)
    for step in gradients(4):
        for p, grad in zip(theirs, step, strict=True):
            p.grad = grad.float()
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_factor_scales_gradients(name):
    one, other = parameters(torch.float64), parameters(torch.float64)
    train(build(name, one), gradients(3), factor=torch.tensor(0.25))
    train(build(name, other), [[0.25 * grad for grad in step] for step in gradients(3)])
    assert all(torch.allclose(p, q, atol=1e-7) for p, q in zip(one, other, strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_restored_optimizer_goes_on_bit_for_bit(name, tmp_path):
    params = parameters()
    optimizer = build(name, params)
    train(optimizer, gradients(3))
    torch.save({"model": [p.detach() for p in params], "state": optimizer.state_dict()}, tmp_path / "state.pt")
    train(optimizer, gradients(3, seed=2))
    stored = torch.load(tmp_path / "state.pt", weights_only=True)
    again = [torch.nn.Parameter(p) for p in stored["model"]]
    restored = build(name, again)
    restored.load_state_dict(stored["state"])
    train(restored, gradients(3, seed=2))
    assert all(torch.equal(p, q) for p, q in zip(params, again, strict=True))


@pytest.mark.parametrize("name", ["adafactor", "lamb"])
def test_half_precision_parameters_are_updated_in_float32(name):
    half = parameters(torch.float16)
    full = [torch.nn.Parameter(p.detach().float()) for p in half]
    one, other = build(name, half), build(name, full)
    for step in gradients(3):
        narrow = [grad.half() for grad in step]
        for p, q in zip(half, full, strict=True):
            q.data.copy_(p.data)
        train(one, [narrow])
        train(other, [[grad.float() for grad in narrow]])
        assert all(torch.equal(p, q.half()) for p, q in zip(half, full, strict=True))


def test_an_optimizer_whose_state_would_be_half_precision_is_refused(tmp_path):
    with user_error("--memory-efficient-fp16: the state of Adagrad"):
        runs.train(tmp_path, runs.BASELINE, "--optimizer adagrad --memory-efficient-fp16 --max-update 1")


def test_invalid_settings_are_user_errors():
    with user_error("--warmup-init: needs --relative-step"):
        build("adafactor", parameters(), warmup_init=True)
    with user_error("--adafactor-eps 1.0: expected two numbers"):
        build("adafactor", parameters(), adafactor_eps="1")
    with user_error("--lamb-betas 0.9: expected two numbers"):
        build("lamb", parameters(), lamb_betas="0.9")


class Operators(TorchDispatchMode):
    """The number of operators that run."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def operators(step, count):
    """The operators of a second ``step(params)`` on *count* parameters with gradients."""
    params = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(count)]
    update = step(params)
    for p in params:
        p.grad = torch.ones(2, 3)
    update(1)  # makes the state
    with Operators() as running:
        update(2)
    return running.count


def averaging(params):
    return WeightAverage(params, 1).update


def optimizing(name):
    def step(params):
        optimizer = build(name, params).optimizer
        return lambda number: optimizer.step(factor=torch.tensor(0.5))

    return step


@pytest.mark.parametrize(
    ("step", "each"),
    [(averaging, 1), (optimizing("lamb"), 1), (optimizing("adafactor"), 13)],
    ids=("mean", "lamb", "adafactor"),
)
def test_an_update_of_many_parameters_runs_few_operators(step, each):
    two, twenty = operators(step, 2), operators(step, 20)
    assert twenty - two == 18 * each


def test_large_parameters_are_updated_one_after_the_other():
    params = [torch.ones(count) for count in (4, 6, 1, 30, 2)]
    assert list(elementwise.buckets(params, [3, 3, 3, 3, 1], 10)) == [(3, [0, 1]), (3, [2]), (3, [3]), (1, [4])]


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("update", [1, 100, 20_000, 1_000_000])
def test_adafactors_relative_step_follows_the_paper(update, warmup):
    """The rate is min(1e-2, 1/√t), or min(1e-6 · t, 1/√t) with a warmup (Shazeer & Stern 2018,
    section 8).

    Equal gradients give an update whose clipped root mean square is 1, so parameters move by the
    rate.
    """
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((3,), (5,))]
    settings = {"relative_step": True, "warmup_init": warmup, "scale_parameter": False}
    optimizer = build("adafactor", params, **settings, beta1=None, weight_decay=0.0)
    ones = [[torch.ones_like(p) for p in params]]
    train(optimizer, ones)
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["step"] = update - 1
        entry["exp_avg_sq"].zero_()
    optimizer.load_state_dict(state)
    for p in params:
        p.data.zero_()
    train(optimizer, ones)
    rate = min(1e-6 * update if warmup else 1e-2, 1 / math.sqrt(update))
    for p in params:
        torch.testing.assert_close(p.detach(), torch.full_like(p, -rate), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("exp_avg", None), ("exp_avg", torch.zeros(7))],
)
def test_an_entry_of_the_state_that_is_not_valid_is_named(name, value):
    optimizer = build("lamb", parameters())
    train(optimizer, gradients(1))
    state = optimizer.state_dict()
    state["state"][1][name] = value
    with user_error(f"{name}.*--reset-optimizer|has shape.*--reset-optimizer"):
        build("lamb", parameters()).load_state_dict(state)


def grouped(name, **settings):
    """An optimizer of two groups, the second without decay."""
    params = parameters()
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0, "group": NO_DECAY}]
    optimizer = build(name, groups, **settings)
    train(optimizer, gradients(1))
    return optimizer


def test_settings_in_force_are_those_of_the_decayed_group_as_flags_name_them():
    optimizer = grouped("lamb", lamb_betas=[0.8, 0.9], lamb_eps=1e-5)
    optimizer.param_groups.reverse()
    expected = {"lamb_betas": [0.8, 0.9], "lamb_eps": 1e-5, "weight_decay": 0.1}
    assert expected.items() <= optimizer.settings_in_force().items()


@pytest.mark.parametrize("name", ["lamb", "adafactor"])
def test_an_overridden_weight_decay_is_not_that_of_norms_and_biases(name):
    optimizer = grouped(name)
    optimizer.load_state_dict(grouped(name, weight_decay=0.2).state_dict(), {"weight_decay": 0.3})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    with pytest.raises(UserError, match="optimizer_overrides: no setting 'params'"):
        optimizer.load_state_dict(optimizer.state_dict(), {"params": []})


@pytest.mark.parametrize("adopt", [False, True])
def test_tensors_of_a_state_are_copied_unless_adopted(adopt):
    state = grouped("lamb").state_dict()
    optimizer = grouped("lamb")
    optimizer.load_state_dict(state, adopt=adopt)
    own = optimizer.state_dict()["state"]
    for index, entry in state["state"].items():
        assert (own[index]["exp_avg"].data_ptr() == entry["exp_avg"].data_ptr()) == adopt
        assert torch.equal(own[index]["exp_avg"], entry["exp_avg"])


def test_a_rate_that_is_a_tensor_of_one_element_is_restored():
    state = grouped("lamb").state_dict()
    state["param_groups"][0]["lr"] = torch.tensor([0.25])
    optimizer = grouped("lamb")
    optimizer.load_state_dict(state)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


def test_gradients_are_dropped_not_zeroed():
    optimizer = grouped("lamb")
    optimizer.zero_grad()
    assert all(p.grad is None for p in optimizer.params)
