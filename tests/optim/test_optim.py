"""Optimizers: fairseq's updates, number by number, and states that travel."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace

import pytest
import torch
from mistakes import user_error
from optimizers import RATES, build, parameters, train
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq.optim import OPTIMIZERS, FairseqOptimizer, build_optimizer, register_optimizer


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
def test_equal_runs_are_equal_bit_for_bit(name):
    first, second = parameters(), parameters()
    train(build(name, first), RATES)
    train(build(name, second), RATES)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


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
