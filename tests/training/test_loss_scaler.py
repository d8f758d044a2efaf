"""The loss scale of --fp16: each of its flags, its end, and its state."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import runs

from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.training.gradients import LossScaler


def a_scaler(flags: str = "", world: World | None = None) -> LossScaler:
    """The scaler of a run with *flags*."""
    settings = training_settings(runs.arguments(runs.BASELINE, "--fp16", flags))
    return LossScaler(settings.common, (world or World()).size)


def scales(scaler: LossScaler, history: Sequence[bool]) -> list[float]:
    """The scale after each update of *history*, which says which of them overflow."""
    found = []
    for overflow in history:
        scaler.update(overflow)
        found.append(scaler.scale)
    return found


def reference(
    history: Sequence[bool], scale: float, window: int, tolerance: float = 0.0, threshold: float = 0.0
) -> list[float]:
    """The same from the definition of the flags, looking back at all updates since the last change
    of the scale."""
    found, change = [], 0
    for number, overflow in enumerate(history, start=1):
        since = history[change:number]
        if overflow and sum(since) >= tolerance * len(since):
            scale, change = max(scale / 2, threshold), number
        elif not any(since[-window:]) and len(since) >= window:
            scale, change = scale * 2, number
        found.append(scale)
    return found


def a_history(seed: int, share: float, length: int = 400) -> list[bool]:
    draw = random.Random(seed)
    return [draw.random() < share for _ in range(length)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "flags, settings",
    [
        ("--fp16-init-scale 8 --fp16-scale-window 5", {"scale": 8.0, "window": 5}),
        ("--fp16-scale-window 1", {"scale": 128.0, "window": 1}),
        ("--fp16-scale-window 9 --fp16-scale-tolerance 0.25", {"scale": 128.0, "window": 9, "tolerance": 0.25}),
        ("--fp16-scale-window 7 --fp16-scale-tolerance 1", {"scale": 128.0, "window": 7, "tolerance": 1.0}),
        ("--fp16-scale-window 9 --threshold-loss-scale 32", {"scale": 128.0, "window": 9, "threshold": 32.0}),
    ],
)
def test_the_scale_follows_its_flags(flags, settings, seed):
    history = a_history(seed, share=0.15)
    assert scales(a_scaler(flags), history) == reference(history, **settings)


def test_a_tolerated_overflow_starts_the_window_anew():
    flags = "--fp16-scale-window 5 --fp16-scale-tolerance 0.3"
    assert scales(a_scaler(flags), [False, False, True] + [False] * 5) == [128, 128] + [64] * 5 + [128], "1 / 3 is much"
    assert scales(a_scaler(flags), [False] * 3 + [True] + [False] * 5) == [128] * 8 + [256], "1 / 4 is tolerated"


@pytest.mark.parametrize("frequency, processes, window", [(1, 1, 2**14), (4, 2, 2**11)])
def test_the_window_is_16384_batches_by_default(frequency: int, processes: int, window: int) -> None:
    scaler = a_scaler("", World(0, processes))
    scaler.begin_epoch(frequency)
    assert scales(scaler, [False] * window)[-2:] == [128, 256]


def test_the_end_comes_below_the_lowest_scale():
    scaler = a_scaler("--fp16-init-scale 16 --min-loss-scale 4")
    assert scales(scaler, [True] * 2) == [8, 4] and scaler.exhausted() is None, "4 is not below 4"
    scaler.update(True)
    assert scaler.exhausted() == "the loss scale fell below `min_loss_scale` 4"
    assert scales(a_scaler(), [True] * 20)[-1] == 128 / 2**20 > 1e-4 > 128 / 2**21, "the default"


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--fp16-init-scale 3.4e38",
        "--threshold-loss-scale 128",
        "--threshold-loss-scale 1e-30 --min-loss-scale 1e-38",
        "--fp16-scale-tolerance 1",
        "--fp16-scale-tolerance 0.9 --fp16-scale-window 2",
        "--fp16-scale-tolerance 1 --threshold-loss-scale 1e-38 --min-loss-scale 1e-38",
        "--min-loss-scale 1e-300 --fp16-init-scale 3.4e38",
    ],
)
def test_overflows_in_a_row_end_every_run_but_not_before_each_scale_was_tried(flags):
    scaler = a_scaler(flags)
    scales(scaler, [False] * 100 + [True, True, False])  # what was before does not count
    tried = [scaler.scale]
    while scaler.exhausted() is None:
        scaler.update(True)
        tried.append(scaler.scale)
        assert len(tried) <= 257, "no run goes on for ever"
    if len(tried) <= 256:
        assert scaler.scale < scaler.lowest <= min(tried[:-1])
    else:
        assert "256 updates in a row overflowed" in str(scaler.exhausted())
    if not scaler.tolerance and scaler.threshold is None:
        assert tried == [tried[0] / 2**halvings for halvings in range(len(tried))]


def test_the_end_names_the_settings_that_hold_the_scale():
    scaler = a_scaler("--threshold-loss-scale 128 --fp16-scale-tolerance 0.5")
    scales(scaler, [True] * 256)
    assert scaler.exhausted() == (
        "256 updates in a row overflowed, the last one at loss scale 128, `threshold_loss_scale` 128, "
        "`fp16_scale_tolerance` 0.5"
    )


@pytest.mark.parametrize("flags", ["--fp16-scale-window 6 --fp16-scale-tolerance 0.2", "--threshold-loss-scale 64"])
def test_a_restored_scaler_goes_on_as_the_one_that_was_saved(flags):
    history = a_history(5, share=0.1)
    for cut in (40, 41, 42, 43, 399):
        whole, first, second = (a_scaler(flags) for _ in range(3))
        scales(first, history[:cut])
        second.load_state_dict(first.state_dict())
        assert scales(whole, history)[cut:] == scales(second, history[cut:])
        assert whole.state_dict() == second.state_dict()


def test_overflows_in_a_row_are_counted_across_a_resumption():
    first, second = (a_scaler("--threshold-loss-scale 128") for _ in range(2))
    scales(first, [True] * 255)
    second.load_state_dict(first.state_dict())
    assert second.exhausted() is None
    second.update(True)
    assert "256 updates in a row" in str(second.exhausted())


def test_a_restored_state_counts_its_window_from_the_last_change():
    scaler = a_scaler("--fp16-scale-window 3")
    scaler.load_state_dict({"scale": 2.0, "updates": 11, "last_rescale": 10, "overflows": 0})
    assert scales(scaler, [False, False]) == [2, 4]
