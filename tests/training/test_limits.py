"""The limits of a run and what its log makes of them: stages, the time that is left, and speeds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import runs
from mistakes import user_error

from fairseq.config.settings import OptimizationConfig, training_settings
from fairseq.training import log
from fairseq.training.length import total_updates
from fairseq.training.stages import Stage, parse_stages, plan, settings_at, stage_at

# --- stages


def test_stages_are_numbered_lengths_with_their_last_update() -> None:
    stages = parse_stages(" 128:140100, 512 : 286000,64:286001")
    assert stages == [Stage(1, 128, 140100), Stage(2, 512, 286000), Stage(3, 64, 286001)]
    assert parse_stages("1:1") == [Stage(1, 1, 1)]
    assert parse_stages("8:5:8, 8 : 9 : : 1e-3,8:12:24:2") == [
        Stage(1, 8, 5, 8),
        Stage(2, 8, 9, None, 0.001),
        Stage(3, 8, 12, 24, 2.0),
    ]


@pytest.mark.parametrize(
    "text",
    ["128", "128:", "a:1", "0:1", "8:0", "8:5,16:5", "8:5,16:4", "8:5,", "8:1:2", "8:-1", "8:5,0:6", "x8:5", "8:5x"]
    + ["8:5:", "8:5::", "8:5:7", "8:5:64:", "8:5::0", "8:5::-1", "8:5::nan", "8:5::inf", "8:5::x", "8:5:64:1:2"]
    + ["8:" + "9" * 5000, "9" * 10 + ":5", "8:5:" + "9" * 20],
)
def test_stages_that_are_malformed_or_do_not_go_on_are_refused(text: str) -> None:
    with user_error("^--stages "):
        parse_stages(text)


@pytest.mark.parametrize(("updates", "number"), [(0, 1), (4, 1), (5, 2), (8, 2), (9, 2), (100, 2)])
def test_the_stage_is_that_of_the_next_update_and_the_last_one_at_the_end(updates: int, number: int) -> None:
    assert stage_at(parse_stages("8:5,16:9"), updates).number == number


def planned(*flags: Any) -> tuple[Any, list[Stage]]:
    settings = training_settings(runs.arguments("--cpu --arch shortformer_tiny --lr 1", *flags))
    return settings, plan(settings)


def test_the_last_of_three_stages_ends_the_run() -> None:
    learned = "--arch transformer_lm_tiny --decoder-learned-pos"
    settings, stages = planned("--max-tokens 64 --stages 8:5,32:9,16:12 --max-update 12", learned)
    assert stage_at(stages, 12) == stages[2]
    of_each = [settings_at(settings, stages, stage) for stage in stages]
    assert [each.optimization.max_update for each in of_each] == [12] * 3
    assert [each.flat["max_target_positions"] for each in of_each] == [32] * 3, "one table for all"
    with user_error("^--max-update 9"):
        planned("--max-tokens 64 --stages 8:5,32:9,16:12 --max-update 9")


def test_a_model_of_a_plug_in_has_no_limit_of_its_own() -> None:
    settings, stages = planned("--max-tokens 64 --stages 8:5,32:9")
    assert plan(replace(settings, model=SimpleNamespace())) == stages


def test_limits_that_a_stage_exceeds_are_refused_before_the_first_one() -> None:
    assert planned("--max-tokens 16 --tokens-per-sample 16")[1] == []
    assert len(planned("--max-tokens 16 --stages 16:5,8:9 --max-update 9")[1]) == 2
    for flags, name in (
        ("--max-tokens 15 --stages 8:5,16:9,8:12", "--max-tokens 15"),
        ("--max-tokens 16 --stages 8:5,16:9 --max-update 5", "--max-update 5"),
        ("--max-tokens 16 --stages 8:5,16:9 --max-target-positions 15", "--max-target-positions 15"),
    ):
        with user_error(f"^{name}"):
            planned(flags)


def test_a_stage_has_its_batches_and_rate_and_the_others_the_runs() -> None:
    settings, stages = planned("--max-tokens 24 --batch-size 2 --stages 8:5:64:0.5,16:9,32:12:32,8:15::2")
    of_each = [settings_at(settings, stages, stage) for stage in stages]
    batches = [(each.data.max_tokens, each.data.batch_size) for each in of_each]
    assert batches == [(64, None), (24, 2), (32, None), (24, 2)]
    assert [each.lr_scheduler.lr for each in of_each] == [[0.5], [1.0], [1.0], [2.0]]


def test_what_contradicts_a_later_stage_is_refused_before_the_first_one() -> None:
    for flags, message in (
        ("--max-tokens 15 --stages 8:5,16:9:16,16:12", "--max-tokens 15: --stages .* needs 16"),
        ("--max-tokens 64 --stages 8:5:64:2,16:9:15", r"--stages .* 15 tokens .* block of 16; raise stage 2's TOKENS"),
        ("--lr-scheduler reduce_lr_on_plateau --stages 8:5,16:9::1", "--stages: --lr-scheduler reduce_lr_on_plateau"),
        ("--lr-scheduler cosine --max-lr 2 --stages 8:5::1", "--stages: --lr is the minimum with --max-lr"),
        ("--lr-scheduler wsd --warmup-updates 4 --stages 8:5:8,16:9:16:1 --decay-updates 6", "--warmup-updates 4"),
    ):
        with user_error(f"^{message}"):
            planned(flags)
    assert planned("--max-tokens 15 --stages 8:5,16:9:16")[1], "a limit that the longer stage does not have"
    assert planned("--max-tokens 15 --stages 8:5:16,16:9:16")[1], "nor any other"
    planned("--lr-scheduler reduce_lr_on_plateau --stages 8:5,16:9:16")
    planned("--lr-scheduler cosine --max-lr 2 --stages 8:5:64")


@pytest.mark.parametrize(
    ("limit", "lengths"), [(8, [8, 32]), (32, [8, 32]), (64, [64, 64]), (20, [20, 32]), (4, [8, 32])]
)
def test_validation_batches_follow_the_stage_or_are_longer_ones_of_their_own(limit: int, lengths: list[int]) -> None:
    settings, stages = planned(f"--max-tokens 64 --stages 8:5,32:9 --max-tokens-valid {limit}")
    of_each = [settings_at(settings, stages, stage) for stage in stages]
    assert [each.data.max_tokens_valid for each in of_each] == lengths
    assert [each.flat["tokens_per_sample"] for each in of_each] == [8, 32]
    assert [each.optimization.max_update for each in of_each] == [9, 9], "schedules see the whole run"


# --- time


def at(epoch: int, read: int, batches: int = 10) -> Any:
    """An iterator of epochs of *batches*, of which *read* are read."""

    class Batches(SimpleNamespace):
        def __len__(self) -> int:
            return batches

    return Batches(epoch=epoch, iterations_in_epoch=read, known_counts=lambda: [batches])


@pytest.mark.parametrize("frequencies", [[1], [3], [4, 1, 2]])
@pytest.mark.parametrize(("max_epoch", "max_update"), [(1, 0), (3, 0), (4, 7), (4, 700), (0, 7)])
def test_the_total_is_that_of_a_run_that_is_counted_update_by_update(
    frequencies: list[int], max_epoch: int, max_update: int
) -> None:
    cfg = OptimizationConfig(max_epoch=max_epoch, max_update=max_update, update_freq=frequencies)
    points = []  # epoch, batches read, updates so far
    updates = 0
    for epoch in range(1, (max_epoch or 4) + 1):
        frequency = frequencies[min(epoch, len(frequencies)) - 1]
        for read in range(0, 10, frequency):
            points.append((epoch, read, updates))
            updates += 1
    total = min(value for value in (updates if max_epoch else 0, max_update) if value)
    for epoch, read, done in points:
        assert total_updates(cfg, done, at(epoch, read)) == total


def test_without_a_limit_there_is_no_total_and_no_end() -> None:
    cfg = OptimizationConfig()
    assert total_updates(cfg, 5, at(1, 5)) is None
    assert log.seconds_left({"num_updates": 5, "ups": 2.0}, cfg, at(1, 5), 10.0) is None


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({"max_update": 25}, 10.0),
        ({"max_update": 5}, 0.0),
        ({"max_update": 3}, 0.0),
        ({"stop_time_hours": 0.5}, 1700.0),
        ({"stop_time_hours": 0.01}, 0.0),
        ({"max_update": 25, "stop_time_hours": 0.5}, 10.0),
        ({"max_update": 25000, "stop_time_hours": 0.5}, 1700.0),
        ({"max_epoch": 2}, 7.5),
    ],
)
def test_the_time_left_is_that_to_the_first_limit(settings: dict[str, Any], seconds: float) -> None:
    cfg = OptimizationConfig(**settings)
    line = {"num_updates": 5, "ups": 2.0}
    assert log.seconds_left(line, cfg, at(1, 5), 100.0) == pytest.approx(seconds)
    assert log.seconds_left({**line, "ups": 0.0}, cfg, at(1, 5), 100.0) is None, "before the first update"


def test_the_time_left_is_known_at_any_speed() -> None:
    line = {"num_updates": 5, "ups": 0.25}
    assert log.seconds_left(line, OptimizationConfig(max_update=6), at(1, 5), 100.0) == 4.0


def test_a_clock_leaves_out_pauses_and_laps_end_when_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    clock = log.Clock({})
    assert clock.elapsed() == clock.lap() == 1e-9, "never zero: speeds divide by it"
    now[0] = 103.0
    assert (clock.lap(ends=False), clock.lap(), clock.elapsed()) == (3.0, 3.0, 3.0)
    with clock.paused():
        now[0] = 110.0
    now[0] = 112.0
    assert (clock.lap(), clock.elapsed()) == (2.0, 5.0)


def test_speeds_count_what_was_done_since_the_clock_was_made() -> None:
    meter: Any = SimpleNamespace(tokens=1000.0, updates=10)
    clock = log.Clock({"train": meter})
    meter.tokens, meter.updates = 1600.0, 13
    assert clock.speeds("train", meter, 2.0) == {"wps": 300.0, "ups": 1.5}
