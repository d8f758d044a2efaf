"""Optimizers: fairseq's updates, number by number, and states that travel."""

from __future__ import annotations

import copy
import math
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from mistakes import logged, user_error
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq.checkpoint import load
from fairseq.errors import UserError
from fairseq.optim import OPTIMIZERS, FairseqOptimizer, adam, build_optimizer, register_optimizer

GOLDEN = Path(__file__).parents[1] / "golden"
SHAPES = [(3, 4), (5,), (2, 1, 3)]
SETTINGS = {
    "nag": {"momentum": 0.9, "weight_decay": 0.1},
    "adam": {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-3, "weight_decay": 0.1},
    "sgd": {"momentum": 0.9, "weight_decay": 0.1},
}
RATES = [0.1, 0.1, 0.3, 0.0, 0.2, 0.05]


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in SHAPES]


def build(name, params, **settings):
    return build_optimizer(Namespace(optimizer=name, lr=[0.1], **{**SETTINGS[name], **settings}), params)


def train(optimizer, rates, seed=1, skip=lambda step, index: False):
    """Steps with random gradients, the same for one seed."""
    generator = torch.Generator().manual_seed(seed)
    for step, rate in enumerate(rates):
        for index, p in enumerate(optimizer.params):
            grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            p.grad = None if skip(step, index) else grad
        optimizer.set_lr(rate)
        optimizer.step()


class Scalar:
    """One number under one of the three rules, in plain Python."""

    def __init__(self, rule, value, momentum=0.9, decay=0.1, betas=(0.9, 0.98), eps=1e-3):
        self.rule, self.value = rule, value
        self.momentum, self.decay, self.betas, self.eps = momentum, decay, betas, eps
        self.buffer = self.first = self.second = 0.0
        self.steps, self.old_rate = 0, 0.1

    def step(self, rate, grad):
        self.steps += 1
        getattr(self, self.rule)(rate, grad)
        self.old_rate = rate

    def nag(self, rate, grad):
        factor = rate / self.old_rate if self.old_rate else 1.0
        value = self.value * (1 - rate * self.decay)
        self.value = value + self.momentum**2 * factor * self.buffer - (1 + self.momentum) * rate * grad
        self.buffer = self.momentum * factor * self.buffer - rate * grad

    def sgd(self, rate, grad):
        self.buffer = self.momentum * self.buffer + grad + self.decay * self.value
        self.value -= rate * self.buffer

    def adam(self, rate, grad):
        beta1, beta2 = self.betas
        self.first = beta1 * self.first + (1 - beta1) * grad
        self.second = beta2 * self.second + (1 - beta2) * grad * grad
        size = rate * math.sqrt(1 - beta2**self.steps) / (1 - beta1**self.steps)
        value = self.value * (1 - rate * self.decay)
        self.value = value - size * self.first / (math.sqrt(self.second) + self.eps)


def reference(name, params, rates, seed=1, skip=lambda step, index: False):
    generator = torch.Generator().manual_seed(seed)
    numbers = [[Scalar(name, x) for x in p.detach().double().flatten().tolist()] for p in params]
    for step, rate in enumerate(rates):
        for index, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            if not skip(step, index):
                for number, g in zip(numbers[index], grad.double().flatten().tolist(), strict=True):
                    number.step(rate, g)
    return [torch.tensor([n.value for n in tensor]).view(p.shape) for tensor, p in zip(numbers, params, strict=True)]


@pytest.mark.parametrize("name", ["nag", "adam", "sgd"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_updates_follow_the_formula(name, dtype, tolerance):
    params = parameters(dtype)
    wanted = reference(name, params, RATES)
    train(build(name, params), RATES)
    for p, value in zip(params, wanted, strict=True):
        assert torch.allclose(p.double(), value.double(), atol=tolerance, rtol=0)


def test_nag_without_momentum_is_gradient_descent_whose_buffer_is_the_last_step():
    params = parameters()
    optimizer = build("nag", params, momentum=0.0, weight_decay=0.0)
    for rate in RATES:
        before = [p.detach().clone() for p in params]
        for index, p in enumerate(params):
            p.grad = torch.full_like(p, index + 1.0)
        optimizer.set_lr(rate)
        optimizer.scaled_step(0.5)
        for index, (p, was) in enumerate(zip(params, before, strict=True)):
            step = torch.full_like(p, -rate * 0.5 * (index + 1))
            torch.testing.assert_close(p.detach(), was + step)
            torch.testing.assert_close(optimizer.optimizer.state[p]["momentum_buffer"], step)


def test_adam_adds_epsilon_where_torch_does_if_asked_to():
    params, theirs, ours_without = parameters(), parameters(), parameters()
    optimizer = torch.optim.AdamW(theirs, lr=0.1, betas=(0.9, 0.98), eps=1e-3, weight_decay=0.1)
    train(build("adam", params, adam_torch_eps=True), RATES)
    train(build("adam", ours_without), RATES)
    generator = torch.Generator().manual_seed(1)
    for rate in RATES:
        for p in theirs:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    for p, wanted, other in zip(params, theirs, ours_without, strict=True):
        assert torch.allclose(p, wanted, atol=1e-6, rtol=0)
        assert not torch.allclose(other, wanted, atol=1e-4, rtol=0)


def test_adam_counts_the_updates_of_each_parameter():
    def skip(step, index):
        return index == 1 and step < 3

    params = parameters()
    wanted = reference("adam", params, RATES, skip=skip)
    train(build("adam", params), RATES, skip=skip)
    for p, value in zip(params, wanted, strict=True):
        assert torch.allclose(p, value, atol=1e-5, rtol=0)


def test_nag_takes_a_rate_that_rises_beyond_the_range_of_float32():
    params = parameters(torch.float32)
    optimizer = build("nag", params)
    for rate in (1e-8, 1e38):
        optimizer.set_lr(rate)
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert all(p.isfinite().all() for p in params)  # the buffers are 0


class Operators(TorchDispatchMode):
    """The operators that run, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "kernel"), [("nag", "_fused_sgd_.default"), ("adam", "_fused_adamw_.default")])
@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25)])
def test_a_step_is_one_pass_over_the_parameters_that_scales_gradients_too(name, kernel, factor):
    pair = [build(name, parameters(), weight_decay=0.0) for _ in range(2)]
    for rate in RATES[:3]:
        for optimizer, scale in zip(pair, (1.0, 4.0), strict=True):
            for index, p in enumerate(optimizer.params):
                p.grad = torch.full_like(p, scale * (index + 1))
            optimizer.set_lr(rate)
        pair[0].step()
        with Operators() as operators:
            pair[1].scaled_step(factor)
        large = [n for n in operators.names if n.startswith("_foreach") or "fused" in n]
        assert large == [kernel]
    for one, other in zip(pair[0].params, pair[1].params, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["nag", "adam"])
def test_a_gradient_may_be_laid_out_otherwise_than_its_parameter(name):
    pair = [build(name, parameters()) for _ in range(2)]
    for optimizer in pair:
        for p in optimizer.params:
            p.grad = torch.arange(float(p.numel())).view(p.shape)
    pair[1].params[0].grad = pair[0].params[0].grad.t().contiguous().t()
    for optimizer in pair:
        optimizer.step()
    assert all(torch.equal(*both) for both in zip(pair[0].params, pair[1].params, strict=True))


def _gap(x):
    """*x* as part of a larger tensor."""
    return torch.stack([x, torch.full_like(x, 7.0)], dim=-1)[..., 0]


@pytest.mark.parametrize("name", ["nag", "adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [lambda x: x.t().contiguous().t(), _gap])
def test_a_parameter_need_not_be_contiguous_even_after_its_state_is_restored(name, dtype, layout):
    values = [p.detach() for p in parameters(dtype)][:2]
    pair = [[torch.nn.Parameter(layout(x) if odd else x.clone()) for x in values] for odd in (True, False)]
    assert not pair[0][0].is_contiguous()
    for params in pair:
        optimizer = build(name, params)
        train(optimizer, RATES[:2])
        optimizer.load_state_dict(optimizer.state_dict())
        train(optimizer, RATES[2:], seed=5)
    for one, other in zip(*pair, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    if layout is _gap:
        assert all((p.detach().as_strided((p.numel(),), (2,), 1) == 7.0).all() for p in pair[0])


@pytest.mark.parametrize("name", ["nag", "adam", "sgd"])
def test_half_precision_parameters_are_updated_in_float32(name):
    half, full = parameters(torch.float16), [torch.nn.Parameter(p.detach().float()) for p in parameters(torch.float16)]
    one, other = build(name, half), build(name, full)
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        for p, q in zip(half, full, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).half()
            q.grad = p.grad.float()
            q.data.copy_(p.data)  # only the parameter is rounded, never the state
        one.step()
        other.step()
        for p, q in zip(half, full, strict=True):
            assert torch.equal(p, q.half())
    for p in half:
        for value in one.optimizer.state[p].values():
            assert not isinstance(value, torch.Tensor) or value.dtype == torch.float32


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


@pytest.mark.parametrize("name", ["nag", "adam", "sgd"])
def test_equal_runs_are_equal_bit_for_bit(name):
    first, second = parameters(), parameters()
    train(build(name, first), RATES)
    train(build(name, second), RATES)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def test_sgd_is_torchs_own():
    ours, theirs = parameters(), parameters()
    train(build("sgd", ours), RATES)

    class Theirs(FairseqOptimizer):
        def __init__(self, args, params):
            super().__init__(args)
            self._optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)

    train(Theirs(Namespace(), theirs), RATES)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, atol=1e-6)


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


def test_frozen_parameters_are_left_out():
    params = parameters()
    params[1].requires_grad_(False)
    assert len(build("nag", params).params) == 2


def test_classes_have_the_names_that_checkpoints_store():
    assert [OPTIMIZERS[n].__name__ for n in ("nag", "adam", "sgd")] == ["FairseqNAG", "FairseqAdam", "SGD"]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("nag", {"momentum": 1.5}, "--momentum 1.5"),
        ("adam", {"adam_betas": "(0.9,)"}, "--adam-betas 0.9: expected two numbers"),
        ("adam", {"adam_betas": "0.9,one"}, "--adam-betas"),
        ("adam", {"adam_eps": -1}, "--adam-eps -1"),
        ("sgd", {"lr": [-1]}, "--lr -1"),
    ],
)
def test_wrong_settings_are_user_errors(name, settings, message):
    with user_error(message):
        build_optimizer(Namespace(**{"optimizer": name, "lr": [0.1], **settings}), parameters())


def test_an_unknown_optimizer_is_a_user_error_with_the_nearest_names():
    with user_error("--optimizer adm: .*did you mean adam"):
        build_optimizer(Namespace(optimizer="adm", lr=[0.1]), parameters())


def test_a_plug_in_of_fairseqs_older_style_works():
    @register_optimizer("test_rprop")
    class Plugin(FairseqOptimizer):
        def __init__(self, args, params):
            super().__init__(args)
            self._optimizer = torch.optim.Rprop(params, **self.optimizer_config)

        @staticmethod
        def add_args(parser):
            parser.add_argument("--rprop-rate", type=float, default=0.5)

        @property
        def optimizer_config(self):
            return {"lr": self.args.rprop_rate}

    parser = ArgumentParser()
    OPTIMIZERS["test_rprop"].add_args(parser)
    args = parser.parse_args(["--rprop-rate", "0.25"])
    args.optimizer = "test_rprop"
    optimizer = build_optimizer(args, parameters())
    assert isinstance(optimizer, Plugin) and optimizer.get_lr() == 0.25
    train(optimizer, [0.1])
    with pytest.raises(ValueError, match="must extend FairseqOptimizer"):
        register_optimizer("test_no_optimizer")(dict)


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
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True)
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


BAD_STEPS = ["x", None, -1, math.nan, math.inf, 2**31, 10**5000, torch.tensor(math.nan), torch.ones(2)]


@pytest.mark.parametrize("value", BAD_STEPS, ids=range(len(BAD_STEPS)))
@pytest.mark.parametrize("fused", [True, False])
def test_an_invalid_number_of_updates_is_named_wherever_it_is_kept(monkeypatch, fused, value):
    ours = build("adam", parameters())
    train(ours, RATES[:3])
    if fused:
        monkeypatch.setattr(adam, "_apex_adam", lambda params: FakeFusedAdam)
    state = ours.state_dict()
    of_group, of_parameter = copy.deepcopy(state), copy.deepcopy(state)
    for entry in of_group["state"].values():
        del entry["step"]
    of_group["param_groups"][0]["step"] = value
    of_parameter["state"][1]["step"] = value
    for broken, name in ((of_group, "step of group 0"), (of_parameter, "step of a parameter")):
        message = f"^checkpoint: its optimizer state lacks a valid {name}: .*, expected a number from 0 to 2147483647; "
        with pytest.raises(UserError, match=message):
            build("adam", parameters()).load_state_dict(broken)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["nag", "adam", "sgd"])
def test_updates_on_a_gpu_follow_the_formula_without_waiting_for_it(name):
    params = parameters()
    wanted = reference(name, params, RATES)
    on_gpu = [torch.nn.Parameter(p.detach().cuda()) for p in params]
    optimizer = build(name, on_gpu, no_apex=True)
    generator = torch.Generator().manual_seed(1)
    for rate in RATES:
        for p in on_gpu:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).float().cuda()
        optimizer.set_lr(rate)
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for p, value in zip(on_gpu, wanted, strict=True):
        assert torch.allclose(p.cpu(), value, atol=1e-5, rtol=0)
