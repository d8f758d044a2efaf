"""The arithmetic of an update: the norm and clipping of gradients, and the mean of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from mistakes import user_error
from torch import nn

from fairseq.config.settings import OptimizationConfig
from fairseq.training.averaging import WeightAverage, restore_weights, weight_average
from fairseq.training.gradients import norm_and_factor

CPU = torch.device("cpu")


def parameters(*gradients: list[float] | None, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters with these gradients."""
    made = [nn.Parameter(torch.zeros(len(values or [0.0]), dtype=dtype)) for values in gradients]
    for parameter, values in zip(made, gradients, strict=True):
        parameter.grad = None if values is None else torch.tensor(values, dtype=dtype)
    return made


# --- norm and clipping


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5)])
def test_the_norm_is_that_of_all_gradients_times_the_factor(dtype: torch.dtype, factor: float | torch.Tensor) -> None:
    gradients = parameters([3.0], None, [4.0, 12.0], dtype=dtype)
    gnorm, unclipped = norm_and_factor(gradients, factor, 0.0, CPU)
    assert gnorm.dtype == torch.float32 and gnorm.shape == () and gnorm.item() == 6.5
    assert float(unclipped) == 0.5, "0 clips nothing"
    assert [p.grad if p.grad is None else p.grad.tolist() for p in gradients] == [[3.0], None, [4.0, 12.0]]


@pytest.mark.parametrize(("clip_norm", "norm"), [(0.25, 0.25), (1.0, 1.0), (6.5, 6.5), (7.0, 6.5), (100.0, 6.5)])
def test_the_factor_lowers_the_norm_to_its_limit_and_never_raises_it(clip_norm: float, norm: float) -> None:
    gnorm, factor = norm_and_factor(parameters([3.0], [4.0, 12.0]), 0.5, clip_norm, CPU)
    assert gnorm.item() == 6.5, "before clipping"
    assert float(factor) * 13 == pytest.approx(norm, rel=1e-5)


def test_gradients_of_zero_stay_zero_and_without_gradients_the_norm_is_zero() -> None:
    for gradients in (parameters([0.0, 0.0]), parameters(None), []):
        gnorm, factor = norm_and_factor(gradients, 2.0, 1.0, CPU)
        assert gnorm.item() == 0.0 and float(factor) == 2.0


def test_the_norm_is_that_of_the_parts_of_all_processes() -> None:
    gnorm, factor = norm_and_factor(parameters([3.0]), 0.5, 1.0, CPU, lambda norm: (norm.square() + 16.0).sqrt())
    assert gnorm.item() == 2.5 and float(factor) * 5 == pytest.approx(1.0, rel=1e-5)


# --- the mean of weights


def averaged(
    start: int, updates: int, dtypes: tuple[torch.dtype, ...], decay: float = 1.0
) -> tuple[list[nn.Parameter], WeightAverage]:
    """An average from update *start* on, of parameters that were 1, 2, 3 … after the updates."""
    weights = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes]
    average = WeightAverage(weights, start, decay)
    for update in range(1, updates + 1):
        for weight in weights:
            weight.data.fill_(update)
        average.update(update)
    return weights, average


MIXED = (torch.float32, torch.float16)


@pytest.mark.parametrize(("start", "count", "mean"), [(1, 5, 3.0), (3, 3, 4.0), (5, 1, 5.0)])
def test_the_mean_counts_updates_from_its_first_on(start: int, count: int, mean: float) -> None:
    weights, average = averaged(start, 5, MIXED)
    assert average.count == count and all(value.dtype == torch.float64 for value in average.mean)
    pointers = [weight.data_ptr() for weight in weights]
    with pytest.raises(KeyError), average.in_place():
        assert [weight.tolist() for weight in weights] == [[mean] * 2] * 2
        raise KeyError
    assert [weight.tolist() for weight in weights] == [[5.0] * 2] * 2, "after an error, too"
    assert [weight.data_ptr() for weight in weights] == pointers


def test_without_a_decay_all_updates_count_alike() -> None:
    weight = nn.Parameter(torch.zeros(1))
    average = WeightAverage([weight], 1)
    for update in (1, 2, 3):
        weight.data.fill_(update)
        average.update(update)
    assert average.mean[0].tolist() == [2.0]


def test_before_its_first_update_there_is_no_mean() -> None:
    weights, average = averaged(6, 5, MIXED)
    assert average.state_dict() == {"count": 0, "mean": [], "weights": []}
    with average.in_place():
        assert [weight.tolist() for weight in weights] == [[5.0] * 2] * 2
    other, restored = averaged(2, 3, MIXED)
    restored.load_state_dict(average.state_dict())
    assert (restored.count, restored.mean) == (0, []) and other[0].tolist() == [3.0, 3.0]


def test_a_restored_mean_goes_on_from_the_weights_that_were_saved() -> None:
    _, average = averaged(2, 4, MIXED)  # the mean is 3
    weights, restored = averaged(2, 0, MIXED)
    restored.load_state_dict(average.state_dict())
    assert [weight.tolist() for weight in weights] == [[4.0] * 2] * 2
    for weight in weights:
        weight.data.fill_(7.0)
    restored.update(5)
    assert [mean.tolist() for mean in restored.mean] == [[4.0] * 2] * 2, "(2 + 3 + 4 + 7) / 4"
    assert [mean.tolist() for mean in average.mean] == [[3.0] * 2] * 2, "a copy"


def test_a_uniform_mean_counts_the_last_of_very_many_updates() -> None:
    weights, average = averaged(1, 0, [torch.float32])
    average.count, average.mean = 10**6, [torch.full_like(weights[0], 1.0, dtype=torch.float64)]
    for _ in range(1000):
        weights[0].data.fill_(1.001)
        average.update(10**6)
    expected = 1 + (weights[0][0].item() - 1) * 1000 / 1_001_000
    assert average.mean[0].tolist() == pytest.approx([expected] * 2, rel=1e-12)


def decayed(values: Sequence[float], decay: float) -> float:
    """The mean of *values* in which one that is n updates old counts decay^n."""
    ages = [decay**age for age in reversed(range(len(values)))]
    return sum(value * age for value, age in zip(values, ages, strict=True)) / sum(ages)


@pytest.mark.parametrize(("start", "updates"), [(1, 1), (1, 2), (1, 9), (3, 6)])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.999])
def test_an_exponential_mean_counts_older_weights_less_and_initial_ones_not(
    decay: float, start: int, updates: int
) -> None:
    _, average = averaged(start, updates, MIXED, decay)
    expected = decayed(range(start, updates + 1), decay)
    assert [mean.tolist() for mean in average.mean] == [pytest.approx([expected] * 2, rel=1e-6)] * 2
    weights, restored = averaged(start, 0, MIXED, decay)
    restored.load_state_dict(average.state_dict())
    for one in (restored, average):
        for weight in one.parameters:
            weight.data.fill_(20.0)
        one.update(updates + 1)
    assert restored.mean[0].tolist() == average.mean[0].tolist(), "to the last bit"
    assert weights[0].tolist() == [20.0, 20.0]
    expected = decayed([*range(start, updates + 1), 20.0], decay)
    assert restored.mean[1].tolist() == pytest.approx([expected] * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, None),
        ({"ema_decay": 0.5}, (1, 0.5)),
        ({"ema_decay": 0.0}, (1, 0.0)),
        ({"average_weights_from": 3}, (3, 1.0)),
        ({"average_weights_from": 3, "ema_decay": 0.5}, (3, 0.5)),
    ],
)
def test_weights_are_averaged_where_either_flag_asks_for_it(flags: dict[str, Any], expected: Any) -> None:
    average = weight_average(OptimizationConfig(**flags), [])
    assert (None if average is None else (average.start, average.decay)) == expected


@pytest.mark.parametrize("name", ["mean", "weights"])
@pytest.mark.parametrize("wrong", [[torch.ones(1), torch.ones(1)], [torch.ones(2), torch.ones(2, 1)]])
def test_a_mean_of_other_shapes_is_refused_and_never_broadcast(name: str, wrong: list[torch.Tensor]) -> None:
    _, average = averaged(1, 2, MIXED)
    state = {**average.state_dict(), name: wrong}
    with user_error("--reset-optimizer"):
        average.load_state_dict(state)


@pytest.mark.parametrize("values", [[], [torch.ones(2)], [torch.ones(2)] * 3])
def test_weights_of_another_number_of_parameters_are_not_restored_in_part(values: list[torch.Tensor]) -> None:
    weights, average = averaged(1, 2, MIXED)
    with pytest.raises(ValueError, match="zip"):
        restore_weights(weights, {"count": 1, "weights": values})
    with pytest.raises(ValueError, match="zip"):
        average.load_state_dict({**average.state_dict(), "mean": values})
