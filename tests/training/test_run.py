"""A run: when it validates, saves and ends; each with a few small updates."""

from __future__ import annotations

import io
import logging
import os
import shutil
import signal
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from mistakes import user_error
from small_runs import FIVE, a_run, state

from fairseq.checkpoint import CheckpointManager
from fairseq.checkpoint.manager import SavePoint
from fairseq.config.settings import training_settings
from fairseq.distributed import GradientReducer, Interruption, World
from fairseq.errors import UserError, with_flags
from fairseq.training import Hook, loop, train
from fairseq.training import state as state_module
from fairseq.training.loop import Run, limit_reached, validation_interval
from fairseq.training.saving import Saver
from fairseq.training.stages import Stage

# --- when


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Validations, whose metric is 9 - updates but for update 4, and what is saved."""
    found: list[tuple[Any, ...]] = []

    def validate(self: Run, epoch: int) -> bool:
        updates = self.state.num_updates
        found.append(("validate", epoch, updates))
        return self.state.validated(7.5 if updates == 4 else 9.0 - updates)

    def save(self: Saver, state: dict[str, Any], point: SavePoint) -> None:
        extra = state["extra_state"]
        assert extra["val_loss"] == point.figure and state["optimizer_history"][-1]["num_updates"] == point.updates
        best = "best" if point.is_best else ""
        assert not best or extra["best"] == point.figure
        end = "end" if point.end_of_epoch else ""
        found.append(("save", point.epoch, point.updates, end, best, point.figure))

    monkeypatch.setattr(Run, "validate", validate)
    monkeypatch.setattr(Saver, "save", save)
    return found


def both(epoch: int, updates: int, end: str = "", best: str = "best") -> list[tuple[Any, ...]]:
    figure = 7.5 if updates == 4 else 9.0 - updates
    return [("validate", epoch, updates), ("save", epoch, updates, end, best, figure)]


ENDS = [*both(1, 5, "end"), *both(2, 10, "end")]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--max-epoch 2", ENDS),
        ("--max-epoch 2 --save-interval 2", [*both(1, 5, "end"), *both(2, 10, "end")]),
        ("--max-epoch 1 --save-interval 2", both(1, 5, "end")),
        ("--max-epoch 3 --validate-interval 2 --no-save", [("validate", 2, 10), ("validate", 3, 15)]),
        ("--max-epoch 2 --validate-interval 3", [("save", 1, 5, "end", "", None), *both(2, 10, "end")]),
        ("--max-epoch 1 --validate-interval-updates 2", [*both(1, 2), ("validate", 1, 4), *both(1, 5, "end")]),
        ("--max-epoch 1 --save-interval-updates 2", [*both(1, 2), *both(1, 4, best=""), *both(1, 5, "end")]),
        ("--max-update 3", both(1, 3)),
        ("--max-update 3 --disable-validation", [("save", 1, 3, "", "", None)]),
        ("--max-update 3 --no-save", [("validate", 1, 3)]),
        (
            "--max-update 4 --save-interval-updates 2 --validate-after-updates 4",
            [("save", 1, 2, "", "", None), *both(1, 4)],
        ),
        ("--max-update 8 --update-freq 2,3", [*both(1, 3, "end"), *both(2, 5, "end"), *both(3, 7, "end"), *both(4, 8)]),
    ],
)  # fmt: skip
def test_validations_and_saves_are_where_the_flags_ask_for_them(
    tmp_path: Path, events: list[Any], flags: str, expected: list[Any]
) -> None:
    runs.train(tmp_path, FIVE, flags)
    assert events == expected


def test_patience_ends_the_run_with_a_save_at_the_validation_that_exceeds_it(tmp_path: Path, events: list[Any]) -> None:
    flags = "--validate-interval-updates 1 --max-update 9 --maximize-best-checkpoint-metric"
    runs.train(tmp_path, FIVE, flags, "--patience 2")
    assert events == [*both(1, 1), ("validate", 1, 2), *both(1, 3, best="")]


def test_a_run_saves_at_its_end_when_its_time_is_over(tmp_path: Path, events: list[Any]) -> None:
    updates = runs.updates(runs.train(tmp_path, FIVE, "--max-update 9 --stop-time-hours 1e-9"))
    assert (updates, events) == ([], []), "late before the first update, by the setting's name"


@pytest.mark.parametrize(
    ("flags", "updates", "cost", "interval"),
    [
        ("--max-update 100000", 50_000, 1, 10_000),
        ("--max-update 100000", 10_000, 1, 0),  # epochs end as often
        ("--max-update 3000", 50_000, 1, 1000),
        ("--max-epoch 2", 20_000, 1, 4000),
        ("", 15_001, 1, 1501),
        ("", 1000, 1, 0),
        ("--max-update 100000 --validate-interval-updates 0", 50_000, 1, 0),
        ("--max-update 100000 --validate-interval-updates 7", 50_000, 1, 7),
        ("--max-update 100000 --save-interval-updates 7", 50_000, 1, 0),
        ("--max-update 100000 --save-interval-words 7K", 50_000, 1, 0),
        # Short runs: five, or as many as 5 % of their time allow.
        ("--max-update 560", 1100, 0.001, 112),
        ("--max-update 560", 1100, 0.01, 187),
        ("--max-update 560", 1100, 0.03, 0),
        ("--max-update 560", 500, 0.001, 112),
        ("--max-update 560", 112, 0.001, 0),  # epochs end as often
        ("--max-epoch 3", 300, 0.001, 0),
        ("--max-update 560 --stages 64:560", 1100, 0.001, 0),
        ("--max-update 99", 1100, 0.001, 0),
        ("--max-update 560 --validate-interval 2 --validate-interval-updates 0", 1100, 0.001, 0),
        ("", 500, 0.001, 100),
        ("--max-update 3000", 50_000, 0.0001, 600),
    ],
)
def test_a_run_validates_several_times_by_default(flags: str, updates: int, cost: float, interval: int) -> None:
    settings = training_settings(runs.arguments(FIVE, flags))
    assert validation_interval(settings.checkpoint, settings.optimization, updates, cost) == interval


def test_the_cost_of_a_validation_is_of_the_epochs_folder_and_so_the_same_in_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, float]] = []

    def interval(saving: Any, cfg: Any, updates: int, cost: float) -> int:
        found.append((updates, cost))
        return 0

    monkeypatch.setattr(loop, "validation_interval", interval)
    shutil.copytree(runs.DATA, tmp_path / "other")
    for kind in ("bin", "idx"):
        shutil.copy(runs.DATA / f"test.{kind}", tmp_path / "other" / f"valid.{kind}")
    data: Any = f"{runs.DATA}:{tmp_path / 'other'}"
    runs.train(tmp_path / "whole", FIVE, "--max-epoch 2", data=data)
    whole = found.copy()
    (one, other) = ({cost for _, cost in part} for part in (whole[:5], whole[5:]))
    assert len(one) == len(other) == 1 and one != other
    found.clear()
    for count in (6, 999):
        runs.train(tmp_path / "parts", FIVE, f"--max-epoch 2 --max-update {count}", data=data)
    assert found == whole


def test_a_validation_that_a_long_run_makes_by_default_is_saved(
    tmp_path: Path, events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SHORTEST", 2)
    runs.train(tmp_path, FIVE, "--max-epoch 1")
    assert events == [*both(1, 2), *both(1, 4, best=""), *both(1, 5, "end")]


# --- the limits of a run


def reached(run: Any, late: bool = False) -> str | None:
    found = limit_reached(run, late)
    return None if found is None else with_flags(found)


def test_the_limit_is_the_first_setting_that_is_reached() -> None:
    run = a_run("--max-update 9 --max-epoch 3 --stop-min-lr 0.1 --stop-time-hours 2")

    def limit(**point: Any) -> str | None:
        return reached(state(run, **point))

    assert limit() is None and limit(updates=8, epoch=2, read=3) is None
    assert limit(updates=9) == limit(updates=10) == "--max-update 9"
    assert limit(updates=8, epoch=3, read=4) is None
    assert limit(updates=8, epoch=3, read=5) == limit(updates=8, epoch=4) == "--max-epoch 3"
    for rate, expected in ((0.1, "--stop-min-lr 0.1"), (0.11, None), (0.05, "--stop-min-lr 0.1")):
        assert limit(updates=5, epoch=2, rate=rate) == limit(updates=5, epoch=1, read=5, rate=rate) == expected
    assert limit(updates=4, read=4, rate=0.01) is None, "within an epoch"
    assert limit(updates=0, rate=0.01) is None, "a rate that warms up"
    assert reached(state(run, updates=9), late=True) == "--stop-time-hours 2"


@pytest.mark.parametrize(("patience", "validations"), [(2, 3), (1, 2), (0, None), (-1, None)])
def test_patience_is_the_number_of_validations_that_do_not_improve(patience: int, validations: int | None) -> None:
    run = a_run(f"--patience {patience}")
    for number in range(1, 10):
        run.validated(float(number))
        ends = validations is not None and number >= validations
        assert reached(run) == (f"--patience {patience}" if ends else None)
        assert run.state_dict()["extra_state"]["without_improvement"] == number - 1, "a resumed run knows"


def test_a_stage_is_done_at_its_last_update() -> None:
    run = a_run("--stages 8:4,16:9", stage=Stage(1, 8, 4))
    found = [reached(state(run, updates=updates)) for updates in (3, 4, 5)]
    assert found == [None, "the end of --stages 8:4,16:9", "the end of --stages 8:4,16:9"]


def test_a_rank_asks_for_a_stop_after_a_signal_and_the_first_one_by_its_clock_for_saves_and_the_end() -> None:
    interruption = Interruption()
    run = a_run("--stop-time-hours 1 --save-interval-minutes 1")
    first = Run(run, None, interruption, [])
    assert first.requests() == (False, False, False)
    interruption.signal = signal.SIGTERM
    assert first.requests() == (True, False, False)
    run.started -= 3601
    first.saved_at -= 61
    assert first.requests() == (True, True, True)
    run.world = World(1, 2)
    assert first.requests() == (True, False, False)


# After update 2: the ranks learn of it with update 3. After update 3: its validation is due.
@pytest.mark.parametrize(("flags", "after"), [("", 2), *(("--validate-interval-updates 3", n) for n in (2, 3))])
def test_a_signal_is_followed_by_a_save_and_no_validation(
    tmp_path: Path, events: list[Any], caplog: pytest.LogCaptureFixture, flags: str, after: int
) -> None:
    class Signal(Hook):
        def on_update(self, state: Any) -> None:
            if state.num_updates == after:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_end(self, state: Any) -> None:
            events.append("end")

    caplog.set_level(logging.INFO)
    settings = training_settings(runs.arguments(FIVE, "--max-update 9", flags, "--save-dir", tmp_path))
    with redirect_stdout(io.StringIO()), Interruption() as interruption:
        assert train(settings, World(), interruption, [Signal()]) == signal.SIGTERM
    assert events == [("save", 1, 3, "", "", None), "end"]
    last = tmp_path / "checkpoint_last.pt"
    assert (
        caplog.messages[-1] == f"stopped by SIGTERM after update 3; saved {last}; the same command goes on from there"
    )


def test_without_a_last_checkpoint_a_signal_leaves_the_one_that_was_due(tmp_path: Path, events: list[Any]) -> None:
    class Signal(Hook):
        def on_update(self, state: Any) -> None:
            if state.num_updates == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    flags = "--max-update 9 --save-interval-updates 3 --no-last-checkpoints --save-dir"
    settings = training_settings(runs.arguments(FIVE, flags, tmp_path))
    with redirect_stdout(io.StringIO()), Interruption() as interruption:
        assert train(settings, World(), interruption, [Signal()]) == signal.SIGTERM
    assert events == [("save", 1, 3, "", "", None)]


def test_a_checkpoint_in_the_background_is_completed_also_where_an_error_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = CheckpointManager.save
    monkeypatch.setattr(CheckpointManager, "save", lambda *args: time.sleep(0.3) or slow(*args))

    class Failure(Hook):
        def on_update(self, state: Any) -> None:
            if state.num_updates == 3:
                raise KeyError

    flags = "--max-update 9 --save-interval-updates 2 --disable-validation --async-save --save-dir"
    settings = training_settings(runs.arguments(FIVE, flags, tmp_path))
    with redirect_stdout(io.StringIO()), pytest.raises(KeyError):
        train(settings, World(), hooks=[Failure()])
    assert (tmp_path / "checkpoint_1_2.pt").exists()


def test_a_run_with_nothing_to_do_leaves_the_best_checkpoint_in_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    flags = f"{FIVE} --max-update 2 --validate-interval-updates 1"
    runs.train(tmp_path, flags)
    runs.train(tmp_path, flags.replace("--max-valid-steps 1", ""))
    assert any("starts anew, because it measures something else" in text for text in caplog.messages)
    assert caplog.messages[-1].startswith("nothing to do: ")
    assert [path.name for path in tmp_path.glob("checkpoint_best*")] == ["checkpoint_best.pt"]


# --- validation


def test_each_split_has_a_line_with_its_metrics_and_the_first_ones_best(tmp_path: Path) -> None:
    flags = "--max-update 2 --validate-interval-updates 1 --valid-subset"
    args = runs.arguments(FIVE, flags, "test,valid", "--no-save --save-dir", tmp_path)
    args.valid_subset = "test, valid"
    log = io.StringIO()
    with redirect_stdout(log):
        runs.train_command.main(args)
    lines = runs.records(log.getvalue())
    first, second = runs.summaries(lines, "test"), runs.summaries(lines, "valid")
    assert [line["num_updates"] for line in first] == [line["num_updates"] for line in second] == [1, 2]
    assert [line["best_loss"] for line in first] == [first[0]["loss"], min(line["loss"] for line in first)]
    assert not any("best_loss" in line for line in second), "it decides nothing"
    names = ["epoch", "loss", "nll_loss", "ppl", "wpb", "bsz", "num_updates", "best_loss"]
    assert list(first[0]) == names and {line["epoch"] for line in first} == {1}
    assert {line["wpb"] for line in second} == {640.0}, "one step of 40 rows"


def test_the_best_is_the_largest_where_that_is_asked_for(tmp_path: Path) -> None:
    flags = "--max-update 2 --validate-interval-updates 1 --no-save"
    log = runs.train(tmp_path, FIVE, flags, "--maximize-best-checkpoint-metric --best-checkpoint-metric ppl")
    first, second = runs.summaries(log, "test")
    assert second["best_ppl"] == max(first["ppl"], second["ppl"]) and "best_loss" not in first


def test_a_metric_that_validation_has_not_is_refused_with_the_nearest() -> None:
    with user_error("^--best-checkpoint-metric los: not a figure of validation; .*loss"):
        a_run("--best-checkpoint-metric los")
    for name in ("ppl", "wpb", "bsz"):
        a_run("--best-checkpoint-metric", name)


def test_validation_leaves_speeds_and_the_order_of_training_alone(tmp_path: Path) -> None:
    flags = [FIVE, runs.DROPOUT, "--max-update 4 --no-save"]
    plain = runs.train(tmp_path, *flags, "--disable-validation")
    checked = runs.train(tmp_path, *flags, "--validate-interval-updates 1")
    assert runs.updates(plain) == runs.updates(checked)
    assert not runs.summaries(plain, "test") and len(runs.summaries(checked, "test")) == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--valid-subset test,,valid",
            "--valid-subset 'test,,valid': empty name; --disable-validation skips validation",
        ),
        ("--optimizer-overrides {", "--optimizer-overrides {"),
        ("--profile 5:1", "--profile 5:1: FROM must be less"),
    ],
)
def test_mistakes_that_show_late_are_found_first(flags: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        Run(a_run(flags), None, Interruption(), [])
    assert error.value.with_flags.startswith(message)


# --- groups of batches


# --- seeds


def test_parameters_are_the_same_on_all_ranks_and_dropout_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # The number of processes is one here: nothing is exchanged when a run is made.
    drawn = []
    for rank in (0, 1, 2):
        run = a_run(world=World(rank, 1))
        weights = torch.cat([parameter.flatten() for parameter in run.model.parameters()])
        drawn.append((weights.sum().item(), torch.rand(()).item()))
    assert len({weights for weights, _ in drawn}) == 1
    torch.manual_seed(3)
    assert drawn[0][1] != torch.rand(()).item(), "goes on after the weights"
    assert drawn[1][1] != drawn[2][1]
    for rank in (1, 2):
        torch.manual_seed(3 + rank)
        assert drawn[rank][1] != torch.rand(()).item(), "those of another seed"


# --- what a run is made of


def test_training_and_validation_have_batches_of_their_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run("--max-tokens-valid 320")
    assert len(run.batches) == 5 and len(run.validation["test"]) > 5
    reducer = lambda graph, *args: GradientReducer(graph, World(), "c10d", 25, False)  # noqa: E731
    monkeypatch.setattr(state_module, "data_parallel", reducer)
    third = a_run(world=World(1, 3)).batches
    assert (third.sampler.rank, third.sampler.layout.processes, third.device.type) == (1, 3, "cpu")
