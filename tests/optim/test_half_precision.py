"""Parameters of half precision: arithmetic in float32, in little memory."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import pytest
import runs
import torch
from torch.profiler import ProfilerActivity, profile

from fairseq import checkpoint
from fairseq.optim import build_optimizer, elementwise
from fairseq.training.averaging import WeightAverage
from fairseq.training.gradients import norm_and_factor

SETTINGS = {"nag": {"momentum": 0.9}, "adam": {}, "sgd": {"momentum": 0.9}}
STATE_BYTES = {"nag": 4, "adam": 8, "sgd": 4}
SHAPES = [(300, 200), (7,), (50, 40), (1000,)]
CHUNK = 1000


def allocated(function: Callable[[], object]) -> tuple[int, int]:
    """The most bytes of tensors that *function* holds at a time, and those left when it ends."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, now


def parameters(shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator).half()) for shape in shapes]
    for p in made:
        p.grad = (torch.randn(p.shape, generator=generator) * 1e-3).half()
    return made


def build(name, params):
    return build_optimizer(Namespace(optimizer=name, lr=[0.1], weight_decay=0.1, **SETTINGS[name]), params)


@pytest.mark.parametrize("name", SETTINGS)
def test_an_update_allocates_its_state_and_a_few_chunks(name, monkeypatch):
    monkeypatch.setattr(elementwise, "CHUNK", CHUNK)
    params = parameters()
    count = sum(p.numel() for p in params)
    optimizer = build(name, params)
    peak, state = allocated(lambda: optimizer.scaled_step(0.5))
    assert state == pytest.approx(STATE_BYTES[name] * count, rel=0.01)
    assert peak <= state + 5 * 4 * CHUNK
    peak, _ = allocated(lambda: optimizer.scaled_step(torch.tensor(0.5)))
    assert peak <= 5 * 4 * CHUNK < count


def test_adam_needs_twelve_bytes_a_parameter_with_parameters_and_gradients(monkeypatch):
    monkeypatch.setattr(elementwise, "CHUNK", CHUNK)

    def update():
        params = parameters(shapes=[(200_000,)])
        _, factor = norm_and_factor(params, 0.5, 1.0, torch.device("cpu"))
        optimizer = build("adam", params)
        for _ in range(2):
            optimizer.scaled_step(factor)
        return optimizer

    kept = []
    peak, _ = allocated(lambda: kept.append(update()))
    assert peak / 200_000 < 12.5


def test_the_norm_and_the_average_are_computed_without_copies(monkeypatch):
    monkeypatch.setattr(elementwise, "CHUNK", CHUNK)
    params = parameters()
    whole = torch.cat([p.grad.double().flatten() for p in params]).norm()
    gnorm, _ = norm_and_factor(params, 1.0, 0.0, torch.device("cpu"))
    assert gnorm.item() == pytest.approx(whole.item(), rel=1e-6)
    assert allocated(lambda: norm_and_factor(params, 1.0, 0.1, torch.device("cpu")))[0] <= 2 * 4 * CHUNK
    average = WeightAverage(params, 1)
    average.update(1)
    # The mean of many updates is in float64: the weights of one tensor are widened at a time.
    assert allocated(lambda: average.update(2))[0] <= 8 * max(p.numel() for p in params)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("chunk", [1024, 60_000])
def test_chunks_do_not_change_an_update(name, chunk, monkeypatch):
    whole, cut = parameters(), parameters()
    strided = torch.nn.Parameter(torch.ones(30, 20).half().t())
    strided.grad = torch.ones(20, 30).half()
    one, other = build(name, [*whole, strided]), build(name, cut)
    for _ in range(3):
        one.scaled_step(0.3)
        monkeypatch.setattr(elementwise, "CHUNK", chunk)
        other.scaled_step(0.3)
        monkeypatch.undo()
    for p, q in zip(whole, cut, strict=True):
        assert torch.equal(p, q)
        for key, value in one.optimizer.state[p].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.optimizer.state[q][key]))


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_divided_in_float32_where_half_precision_would_give_zero(name):
    params = parameters()
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    for p, q in zip(params, wide, strict=True):
        q.grad = p.grad.float() * 1e-6  # below the smallest float16, 6e-8
        assert not (p.grad * 1e-6).any()
    one, other = build(name, params), build(name, wide)
    one.scaled_step(1e-6)
    other.step()
    for p, q in zip(params, wide, strict=True):
        for key, value in other.optimizer.state[q].items():
            assert torch.allclose(torch.as_tensor(one.optimizer.state[p][key]), torch.as_tensor(value), rtol=1e-6)


def test_training_with_half_parameters_keeps_small_gradients(tmp_path):
    flags = f"{runs.NO_DROPOUT} --optimizer adam --max-update 1 --max-tokens 512 --no-epoch-checkpoints"
    found = {}
    for precision in ("", "--memory-efficient-fp16"):
        folder = tmp_path / (precision.strip("-") or "full")
        runs.train(folder, runs.BASELINE, flags, precision)
        state = checkpoint.load(folder / "checkpoint_last.pt")["last_optimizer_state"]["state"]
        found[precision] = torch.cat([state[key]["exp_avg"].flatten() for key in state])
    full, half = found.values()
    used = full != 0
    assert ((half == 0) & used).sum() < 1e-3 * used.sum()
    error = ((half - full).abs() / full.abs().clamp(min=1e-12))[used]
    assert error.median() < 0.02


def test_plug_ins_that_define_step_get_scaled_gradients():
    from fairseq.optim import FairseqOptimizer

    class Plugin(FairseqOptimizer):
        def __init__(self, params):
            super().__init__(Namespace())
            self._optimizer = torch.optim.SGD(params, lr=1.0)
            self.calls = 0

        def step(self):
            self.calls += 1
            self._optimizer.step()

    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    plugin = Plugin([p])
    plugin.scaled_step(torch.tensor(0.25))
    assert plugin.calls == 1 and p.tolist() == [-0.25] * 3
