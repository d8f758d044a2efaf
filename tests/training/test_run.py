"""A run: when it validates, saves and ends, what it restores and what it tells; each with a few small updates."""

from __future__ import annotations

import io
import json
import logging
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch

from fairseq import checkpoint
from fairseq.config.settings import DataConfig, training_settings
from fairseq.distributed import Interruption, World
from fairseq.errors import UserError
from fairseq.training import run as run_module
from fairseq.training.run import Run
from fairseq.training.saving import Saver
from fairseq.training.stages import Stage

# An epoch has 5 updates of 40 rows of 16 tokens; the last one has 7 rows, one of them short.
FIVE = f"{runs.BASELINE} --decoder-layers 1 --max-tokens 640 --max-valid-steps 1"


def a_run(*flags: Any, world: World | None = None, stage: Stage | None = None, manager: Any = None) -> Run:
    settings = training_settings(runs.arguments(FIVE, *flags))
    return Run(settings, world or World(), manager, stage, Interruption())


# --- when


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Validations, whose figure is 9 - updates but for update 4, and what is saved."""
    found: list[tuple[Any, ...]] = []

    def validate(self: Run, epoch: int) -> float:
        updates = self.trainer.num_updates
        found.append(("validate", epoch, updates))
        return 7.5 if updates == 4 else 9.0 - updates

    def save(self: Saver, state: dict[str, Any], **point: Any) -> None:
        extra = state["extra_state"]
        assert (
            extra["val_loss"] == point["figure"] and state["optimizer_history"][-1]["num_updates"] == point["updates"]
        )
        best = "best" if point["is_best"] else ""
        assert not best or extra["best_saved"] == point["figure"]
        end = "end" if point["end_of_epoch"] else ""
        found.append(("save", point["epoch"], point["updates"], end, best, point["figure"]))

    monkeypatch.setattr(Run, "_validate", validate)
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
        ("--max-epoch 2 --save-interval 2", [("validate", 1, 5), *both(2, 10, "end")]),
        ("--max-epoch 1 --save-interval 2", both(1, 5, "end")),
        ("--max-epoch 3 --validate-interval 2 --no-save", [("validate", 2, 10), ("validate", 3, 15)]),
        ("--max-epoch 2 --validate-interval 3", [("save", 1, 5, "end", "", None), *both(2, 10, "end")]),
        ("--max-epoch 1 --validate-interval-updates 2", [("validate", 1, 2), ("validate", 1, 4), *both(1, 5, "end")]),
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
    assert events[-2:] == both(1, 3, best="best")  # the first one that is saved; 8 was the best seen, of update 1
    assert len(events) == 4


def test_a_run_saves_at_its_end_when_its_time_is_over(tmp_path: Path, events: list[Any]) -> None:
    updates = runs.updates(runs.train(tmp_path, FIVE, "--max-update 9 --stop-time-hours 1e-9"))
    assert (updates, events) == ([], []), "late before the first update, by the setting's name"


# --- the limits of a run


def state(run: Run, updates: int = 0, epoch: int = 1, read: int = 0, rate: float = 1.0) -> Run:
    """*run* after so many updates and batches of an epoch."""
    run.trainer.num_updates = updates
    run.batches.load_state_dict({"epoch": epoch, "iterations_in_epoch": read})
    run.trainer.get_lr = lambda: rate  # type: ignore[method-assign]
    return run


def test_the_limit_is_the_first_setting_that_is_reached() -> None:
    run = a_run("--max-update 9 --max-epoch 3 --stop-min-lr 0.1 --stop-time-hours 2")

    def limit(**point: Any) -> tuple[str, str] | None:
        found = state(run, **point).limit()
        assert run._at_limit() is (found is not None)
        return None if found is None else (found.setting, found.remedy)

    assert limit() is None and limit(updates=8, epoch=2, read=3) is None
    assert limit(updates=9) == limit(updates=10) == ("--max-update 9", "raise")
    assert limit(updates=8, epoch=3, read=4) is None
    assert limit(updates=8, epoch=3, read=5) == limit(updates=8, epoch=4) == ("--max-epoch 3", "raise")
    for rate, expected in ((0.1, ("--stop-min-lr 0.1", "lower")), (0.11, None), (0.05, ("--stop-min-lr 0.1", "lower"))):
        assert limit(updates=5, epoch=2, rate=rate) == limit(updates=5, epoch=1, read=5, rate=rate) == expected
    assert limit(updates=4, read=4, rate=0.01) is None, "within an epoch"
    assert limit(updates=0, rate=0.01) is None, "a rate that warms up"
    run.stop.late = True
    assert limit(updates=9) == ("--stop-time-hours 2", "raise")
    run.stop.late, run.stopped = False, True
    assert limit(updates=9) == ("--stop-time-hours 2", "raise")
    run.stop.interrupted = True
    assert limit(updates=9) == ("a signal", "raise")


def test_patience_and_the_end_of_the_stages_are_limits() -> None:
    run = a_run("--patience 2 --max-update 9")
    for figure in (1.0, 2.0):
        run.best = run.best.validated(figure)
        run._check_patience()
        assert not run.stopped and run.limit() is None
    run.best = run.best.validated(3.0)
    run._check_patience()
    found = run.limit()
    assert run.stopped and found is not None and found.setting == "--patience 2"
    staged = state(a_run("--stages 8:4,16:9", stage=Stage(1, 8, 4)), updates=4)
    found = staged.limit()
    assert found is not None and found.setting == "the end of --stages 8:4,16:9"


def test_without_patience_no_number_of_validations_ends_a_run(caplog: pytest.LogCaptureFixture) -> None:
    run = a_run()
    for figure in range(50):
        run.best = run.best.validated(float(figure))
    run._check_patience()
    assert not run.stopped and run.limit() is None and caplog.messages == []


def test_a_stage_is_done_at_its_last_update_unless_something_else_ended_it() -> None:
    stage = Stage(1, 8, 4)
    run = a_run("--stages 8:4,16:9", stage=stage)
    assert run.max_update == 4
    assert [state(run, updates=updates).stage_is_done() for updates in (3, 4, 5)] == [False, True, True]
    run.stopped = True
    assert not run.stage_is_done()
    run.stopped, run.stop.late = False, True
    assert not run.stage_is_done()
    assert not state(a_run("--max-update 4"), updates=4).stage_is_done(), "without stages"


def test_a_run_without_an_update_has_no_last_message() -> None:
    run = a_run("--max-update 4")
    run.progress = run_module.RunProgress(4, 4)
    assert state(run, updates=4).describe_end(1.0) is None
    run.progress = run_module.RunProgress(0, 0)
    assert state(run, updates=3).describe_end(1.0) is None, "it goes on"
    message = state(run, updates=4).describe_end(2.0)
    assert message == "done training in 2.0 seconds (0:00:02); --max-update 4 is reached after 4 updates; no validation"
    run.best = run.best.validated(2.5)
    assert "; best validation loss 2.5" in str(run.describe_end(2.0))


def test_minutes_between_saves_count_from_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(run_module.time, "perf_counter", lambda: now[0])
    run, never = a_run("--save-interval-minutes 2"), a_run("--save-interval-minutes 0")
    due = []
    for now[0] in (1120.0, 1121.0, 1e9):
        due.append((run._save_is_due(), never._save_is_due()))
    assert due == [(False, False), (True, False), (True, False)]
    now[0] = 1060.0
    run.trained_before = 100.0
    assert run.wall() == 160.0


def test_wishes_are_the_processs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run("--stop-time-hours 1 --save-interval-minutes 1")
    assert run.stop.wishes() == (False, False, False)
    run.started -= 3601
    assert run.stop.wishes() == (True, False, False)
    run.saved_at -= 61
    assert run.stop.wishes() == (True, False, True)


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
    assert all(line["best_loss"] == line["loss"] for line in second), "it has no best of its own"
    names = ["epoch", "loss", "nll_loss", "ppl", "wpb", "bsz", "num_updates", "best_loss"]
    assert list(first[0]) == names and {line["epoch"] for line in first} == {1}
    assert {line["wpb"] for line in second} == {640.0}, "one step of 40 rows"


def test_the_best_is_the_largest_where_that_is_asked_for(tmp_path: Path) -> None:
    flags = "--max-update 2 --validate-interval-updates 1 --no-save"
    log = runs.train(tmp_path, FIVE, flags, "--maximize-best-checkpoint-metric --best-checkpoint-metric ppl")
    first, second = runs.summaries(log, "test")
    assert second["best_ppl"] == max(first["ppl"], second["ppl"]) and "best_loss" not in first


def test_a_metric_that_validation_has_not_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="^--best-checkpoint-metric los: not a figure of validation; .*loss"):
        a_run("--best-checkpoint-metric los")
    for name in ("ppl", "wpb", "bsz"):
        a_run("--best-checkpoint-metric", name)


def test_validation_leaves_speeds_and_the_order_of_training_alone(tmp_path: Path) -> None:
    flags = [FIVE, runs.DROPOUT, "--max-update 4 --no-save"]
    plain = runs.train(tmp_path, *flags, "--disable-validation")
    checked = runs.train(tmp_path, *flags, "--validate-interval-updates 1")
    assert runs.updates(plain) == runs.updates(checked)
    assert not runs.summaries(plain, "test") and len(runs.summaries(checked, "test")) == 4


@pytest.mark.parametrize(("names", "splits"), [("a", ["a"]), ("a, b", ["a", "b"])])
def test_splits_are_names_between_commas(names: str, splits: list[str]) -> None:
    assert run_module._splits(DataConfig(valid_subset=names)) == splits


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
        a_run(flags)
    assert error.value.with_flags.startswith(message)


# --- going on


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after 7 updates, in the second epoch."""
    folder = tmp_path_factory.mktemp("trained")
    runs.train(folder, FIVE, runs.ADAM, "--max-update 7 --no-epoch-checkpoints --validate-interval-updates 3")
    return folder / "checkpoint_last.pt"


def resumed(trained: Path, folder: Path, *flags: Any) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    shutil.copy(trained, folder / "checkpoint_last.pt")
    return runs.train(folder, FIVE, runs.ADAM, "--disable-validation --no-epoch-checkpoints", *flags)


def test_a_resumed_run_goes_on_where_it_was(trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lines = runs.updates(resumed(trained, tmp_path, "--max-update 8"))
    assert [(line["epoch"], line["num_updates"], line["update"]) for line in lines] == [(2, 8, 1 + 3 / 5)]
    assert f"restored {tmp_path}/checkpoint_last.pt: epoch 2, update 7" in caplog.messages
    before, after = (runs.content(path) for path in (trained, tmp_path / "checkpoint_last.pt"))
    for name in ("best", "best_saved", "without_improvement"):
        assert after["extra_state"][name] == before["extra_state"][name] is not None


def test_a_whole_run_equals_its_parts(tmp_path: Path) -> None:
    flags = [FIVE, runs.ADAM, runs.DROPOUT, "--no-epoch-checkpoints --log-interval 3 --max-update"]
    whole = runs.train(tmp_path / "whole", *flags, "7")
    parts = [line for updates in (4, 7) for line in runs.train(tmp_path / "parts", *flags, f"{updates}")]
    one, other = (runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "parts"))
    for extra in (one["extra_state"], other["extra_state"]):
        for name in ("best", "best_saved", "without_improvement"):  # the first part ends with a validation
            del extra[name]
    assert runs.difference(one, other) is None
    last = [line for line in runs.updates(parts) if line["num_updates"] > 4]
    assert last == [line for line in runs.updates(whole) if line["num_updates"] > 4]
    assert runs.summaries(parts, "train") == runs.summaries(whole, "train")


@pytest.mark.parametrize(
    ("reset", "first"),
    [
        ("--reset-dataloader", (1, 8)),
        ("--reset-optimizer", (2, 1)),
        ("--reset-optimizer --reset-dataloader", (1, 1)),
    ],
)
def test_what_is_reset_begins_anew(trained: Path, tmp_path: Path, reset: str, first: tuple[int, int]) -> None:
    lines = runs.updates(resumed(trained, tmp_path, reset, f"--max-update {first[1]}"))
    assert [(line["epoch"], line["num_updates"]) for line in lines] == [first]


def test_best_figures_and_times_are_kept_unless_meters_are_reset() -> None:
    stored = state(a_run(runs.ADAM), updates=7, epoch=2, read=2).state_dict()
    extra = stored["extra_state"]
    extra |= {"previous_training_time": 1000.0, "best": 1.5, "best_saved": 2.5, "without_improvement": 4}

    def best(*flags: str) -> tuple[Any, ...]:
        run = a_run(runs.ADAM, *flags)
        run.restore(stored, "x.pt")
        return run.best.seen, run.best.saved, run.best.without_improvement, run.wall() > 1000, run.stopped

    assert best() == (1.5, 2.5, 4, True, False)
    assert best("--patience 4") == (1.5, 2.5, 4, True, True)
    assert best("--reset-meters --patience 4") == (None, None, 0, False, False)
    assert best("--reset-optimizer") == (None, None, 4, True, False)
    assert best("--best-checkpoint-metric ppl") == (None, None, 0, True, False), "another figure"
    stored["args"]["best_checkpoint_metric"] = None  # of fairseq, which calls it loss
    assert best()[:2] == (1.5, 2.5)
    del extra["previous_training_time"]
    assert best() == (1.5, 2.5, 4, False, False)


def test_the_best_of_blocks_of_another_length_is_set_aside(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = state(a_run(runs.ADAM), updates=7, epoch=2, read=2)
    before.best = before.best.validated(3.0)
    stored = before.state_dict()
    stored["extra_state"]["stage"] = {"number": 3}
    aside: list[Any] = []
    manager = SimpleNamespace(set_best_aside=aside.append)
    run = a_run(runs.ADAM, "--tokens-per-sample 32", manager=manager)
    run.restore(stored, "x.pt")
    assert run.best.seen is None and aside == [3]
    assert "best checkpoint: starts anew, because validation losses of 16 and 32 tokens differ" in caplog.messages
    del stored["extra_state"]["stage"]
    run.restore(stored, "x.pt")
    assert aside == [3, None]
    a_run(runs.ADAM, "--tokens-per-sample 32").restore(stored, "x.pt")  # not the first process
    same = a_run(runs.ADAM, manager=manager)
    same.restore(stored, "x.pt")
    assert same.best.seen is not None and len(aside) == 2
    del stored["extra_state"]["batches"]
    run = a_run(runs.ADAM, "--tokens-per-sample 32", manager=manager)
    run.restore(stored, "x.pt")
    assert run.best.seen is not None, "of a checkpoint that does not tell its length"


# --- memory that goes on

XL = f"{runs.SHORTFORMER} --decoder-layers 1"


@pytest.mark.parametrize(
    ("flags", "fits"),
    [("", True), ("--tokens-per-sample 8", False), ("--tokens-from-prev 8", False), ("--reset-dataloader", False)],
)
def test_rows_go_on_with_their_memory_where_it_fits(
    tmp_path: Path, flags: str, fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    runs.train(tmp_path, XL, "--max-update 2 --disable-validation --no-epoch-checkpoints")
    state = checkpoint.read(tmp_path / "checkpoint_last.pt")
    run = Run(training_settings(runs.arguments(XL, flags)), World(), None, None, Interruption())
    run.restore(state, "x.pt")
    saved, memory = state["extra_state"]["carried"]["memory"], run.task.carried.get("memory") or []
    assert bool(memory) is fits and all(torch.equal(a, b) for a, b in zip(memory, saved, strict=fits))
    dropped = "x.pt: memory dropped, because rows, segments or memory have another length"
    assert (dropped in caplog.messages) is (not fits and "reset" not in flags)


def test_memory_fits_segments_and_memory_of_the_same_length_in_the_same_order() -> None:
    run = a_run()
    own = run._batches_signature()
    assert own["batches"] == 5 and own["processes"] == 1 and own["tokens_per_sample"] == 16
    assert run._memory_fits(own) and run._memory_fits({**own, "batches": 7, "processes": 2})
    for name in ("tokens_per_sample", "memory_length"):
        assert not run._memory_fits({**own, name: 3})
    assert not run._memory_fits({**own, "shuffled_with": 3})


# --- what is told


def told(caplog: pytest.LogCaptureFixture, run: Run) -> str:
    caplog.set_level(logging.INFO)
    caplog.clear()
    run._describe()
    return caplog.messages[0]


def test_a_run_describes_model_data_device_and_stage(caplog: pytest.LogCaptureFixture) -> None:
    run = a_run()
    count = sum(parameter.numel() for parameter in run.trainer.model.parameters())
    begin = f"transformer_lm_tiny: {count:,} parameters, 5 batches per epoch on cpu"
    assert told(caplog, run) == begin
    run.stage = Stage(2, 16, 9)
    assert told(caplog, run) == f"{begin}, stage 2 (16 tokens)"
    run.stage, run.world = None, World(0, 4)
    assert told(caplog, run) == f"{begin} × 4 processes"


def test_checkpoints_hold_place_stage_best_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = state(a_run("--stages 8:4,16:9", stage=Stage(2, 16, 9)), updates=3, read=3)
    run.best = run.best.validated(3.0)
    monkeypatch.setattr(run, "wall", lambda: 12.0)
    extra = run.state_dict()["extra_state"]
    assert extra["stage"] == {"number": 2, "tokens_per_sample": 16, "max_update": 9}
    assert (extra["best"], extra["best_saved"], extra["without_improvement"]) == (3.0, None, 0)
    assert extra["previous_training_time"] == 12.0 and extra["batches"] == run._batches_signature()
    assert (extra["train_iterator"]["epoch"], extra["train_iterator"]["iterations_in_epoch"]) == (1, 3)
    assert "stage" not in a_run().state_dict()["extra_state"]


@pytest.mark.parametrize(
    ("flags", "first", "kind"),
    [
        ("--log-format json", True, "json"),
        ("--log-format none --no-progress-bar", True, "none"),
        ("--log-format json", False, "none"),
    ],
)
def test_the_first_process_alone_shows_a_bar(
    flags: str, first: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(flags, "--log-interval 7")
    run.world = World(0 if first else 1, 1)
    bars: list[dict[str, Any]] = []
    monkeypatch.setattr(run_module, "progress_bar", lambda items, **settings: bars.append(settings))
    run._bar([], 3, 9, start=2)
    assert bars == [{"log_format": kind, "log_interval": 7, "epoch": 3, "total": 9, "start": 2}]


@pytest.mark.parametrize(("flags", "kind"), [("--no-progress-bar", "simple"), ("", None)])
def test_without_a_format_the_bar_chooses_one_unless_lines_are_asked_for(
    flags: str, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = training_settings(runs.arguments(FIVE.replace("--log-format json", ""), flags))
    run = Run(settings, World(), None, None, Interruption())
    bars: list[dict[str, Any]] = []
    monkeypatch.setattr(run_module, "progress_bar", lambda items, **settings: bars.append(settings))
    run._bar([], 1, 1)
    assert bars[0]["log_format"] is kind or bars[0]["log_format"] == kind


def test_lines_have_both_clocks_and_count_groups_of_batches(tmp_path: Path) -> None:
    log = runs.train(tmp_path, FIVE, "--update-freq 2 --max-epoch 1 --no-save --disable-validation")
    lines = [line for line in log if "num_updates" in line]
    assert [(line["num_updates"], line["update"]) for line in lines] == [(1, 2 / 5), (2, 4 / 5), (3, 1.0)]
    assert sum(line["wpb"] for line in lines) == 2670 and lines[2]["wpb"] <= 640, "the rest is an update of its own"
    for line in (*lines, {name.removeprefix("train_"): value for name, value in log[-1].items()}):
        assert 0 < line["train_wall"] <= line["wall"]


def test_bars_count_the_updates_of_an_epoch_and_the_run_its_total(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[tuple[Any, ...]] = []
    show = Run._bar

    def bar(self: Run, items: Any, epoch: int, total: int, **place: Any) -> Any:
        run = place.get("run")
        bars.append((epoch, total, place["start"], run.start, run.total))
        return show(self, items, epoch, total, **place)

    monkeypatch.setattr(Run, "_bar", bar)
    flags = [FIVE, "--disable-validation --update-freq 2,5 --no-epoch-checkpoints --max-epoch 3 --max-update"]
    runs.train(tmp_path, *flags, "2")
    runs.train(tmp_path, *flags, "5")
    assert bars == [(1, 3, 0, 0, 2), (1, 3, 2, 2, 5), (2, 1, 0, 2, 5), (3, 1, 0, 2, 5)]


def test_the_schedule_is_given_the_figure_of_an_epochs_validation(
    tmp_path: Path, events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Any, ...]] = []
    for name in ("begin_epoch", "end_epoch"):
        monkeypatch.setattr(run_module.Trainer, name, lambda self, *args, name=name: told.append((name, *args)))
    runs.train(tmp_path, FIVE, "--max-epoch 2 --validate-interval 2 --no-save")
    ends = [("begin_epoch", 1), ("end_epoch", 1, None), ("begin_epoch", 2), ("end_epoch", 2, -1.0)]
    assert told == ends


def test_folders_take_turns_and_processes_agree_on_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        run_module,
        "check_agreement",
        lambda world, splits, updates: compared.append((world.size, sorted(splits), updates)),
    )
    folders = Path(f"{runs.DATA}:{runs.DATA}")
    runs.train(tmp_path, FIVE, "--max-epoch 2 --no-save", data=folders)
    assert compared == [(1, ["test", "valid"], 0), (1, ["valid"], 0), (1, ["valid"], 5)]


def test_weights_that_are_not_finite_are_named_with_the_update_and_not_saved() -> None:
    run = state(a_run("--no-epoch-checkpoints"), updates=7)
    with torch.no_grad():
        next(run.trainer.model.parameters())[0] = torch.nan
    with pytest.raises(UserError, match="^update 7: the weights "):
        run._save(1, 7, False, None)


def test_a_line_of_a_stage_names_it() -> None:
    run = a_run("--log-interval 2", stage=Stage(2, 16, 9))
    clock = run_module.Clock(run.trainer.meters)
    assert run._interval(clock).items() >= {"stage": 2, "tokens_per_sample": 16}.items()


def test_lines_within_an_interval_leave_its_sums(tmp_path: Path) -> None:
    flags = "--max-update 5 --no-save --disable-validation --log-interval"
    each = runs.updates(runs.train(tmp_path, FIVE, flags, "1"))
    lines = runs.updates(runs.train(tmp_path, FIVE, flags, "4"))
    assert [line["num_updates"] for line in lines] == [1, 2, 4], "the first ones come early"
    for line in lines:
        done = each[: line["num_updates"]]
        mean = sum(update["loss"] * update["wpb"] for update in done) / sum(update["wpb"] for update in done)
        assert line["loss"] == pytest.approx(mean)


def test_curves_begin_where_the_run_resumes(tmp_path: Path) -> None:
    flags = [FIVE, "--no-epoch-checkpoints --metrics-file", tmp_path / "m.jsonl", "--max-update"]
    for updates in ("2", "6"):
        runs.train(tmp_path / "run", *flags, updates)
    found = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    steps = {tag: [line["step"] for line in found if line["tag"] == tag] for tag in ("train_inner", "train", "test")}
    assert steps == {"train_inner": [1, 2, 3, 4, 5, 6], "train": [5], "test": [2, 5, 6]}
    assert {"loss", "wall", "train_wall"} <= found[0].keys()


# --- groups of batches


@pytest.mark.parametrize(
    ("read", "size", "groups"), [(0, 2, [2, 2, 1]), (3, 2, [2]), (0, 9, [5]), (4, 1, [1]), (5, 1, [])]
)
def test_the_rest_of_an_epoch_comes_in_groups_without_reading_ahead(read: int, size: int, groups: list[int]) -> None:
    class Epoch:
        iterations_in_epoch = read
        taken = 0

        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Any:
            for number in range(read, 5):
                self.taken += 1
                yield {"id": number}

    epoch: Any = Epoch()
    found, taken = [], []
    for group in run_module._groups(epoch, size):
        found.append(len(group))
        taken.append(epoch.taken)
    assert found == groups and taken == [sum(groups[: n + 1]) for n in range(len(groups))]


@pytest.mark.parametrize(
    ("updates", "interval", "due"), [(6, 3, True), (7, 3, False), (6, 0, False), (6, -1, False), (1, 1, True)]
)
def test_intervals_of_updates(updates: int, interval: int, due: bool) -> None:
    assert run_module._is_due(updates, interval) is due


# --- seeds


def test_parameters_are_the_same_on_all_ranks_and_dropout_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # The number of processes is one here: nothing is exchanged when a run is made.
    drawn = []
    for rank in (0, 1, 2):
        run = a_run(world=World(rank, 1))
        assert run.trainer.world is run.world is run.saver.world and run.world.rank == rank
        weights = torch.cat([parameter.flatten() for parameter in run.trainer.model.parameters()])
        drawn.append((weights.sum().item(), torch.rand(()).item()))
    assert len({weights for weights, _ in drawn}) == 1 and len({number for _, number in drawn}) == 3


def test_an_update_that_is_not_finite_is_saved_for_inspection_unless_nothing_is(tmp_path: Path) -> None:
    for flags in ("", "--no-save"):
        folder = tmp_path / f"run{flags}"
        with pytest.raises(UserError, match="infinite or NaN"):
            runs.train(folder, FIVE, "--max-update 9 --lr 1e30 --clip-norm 0", flags)
        assert (folder / "nonfinite.pt").exists() is (not flags)
    saved = checkpoint.read(tmp_path / "run" / "nonfinite.pt")
    finding = saved["extra_state"]["nonfinite"]
    assert finding["update"] == saved["optimizer_history"][-1]["num_updates"] + 1
    assert finding["place"].startswith("the ") and len(finding["ids"]) == 40
