"""What a run tells: its description, its lines, bars and curves."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from small_runs import FIVE, SmallRun, a_run, state, the_run

from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.training import log as lines
from fairseq.training import loop
from fairseq.training.callbacks.checkpoints import Checkpoints
from fairseq.training.callbacks.log import Log
from fairseq.training.callbacks.validation import Validation
from fairseq.training.clock import Clock
from fairseq.training.due import Due
from fairseq.training.log import Reporter
from fairseq.training.stages import Stage


def told(caplog: pytest.LogCaptureFixture, run: SmallRun) -> str:
    caplog.set_level(logging.INFO)
    caplog.clear()
    run.part(Log).describe(run)
    return caplog.messages[0]


def test_a_run_describes_model_data_device_and_stage(caplog: pytest.LogCaptureFixture) -> None:
    run = a_run()
    count = sum(parameter.numel() for parameter in run.model.parameters())
    begin = f"transformer_lm_tiny: {count:,} parameters on cpu"
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
    assert (extra["best"], extra["without_improvement"]) == (3.0, 0)
    assert extra["previous_training_time"] == 12.0 and extra["batches"] == run.batches_signature()
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
    run = a_run(flags, "--log-interval 7", world=World(0 if first else 1, 1))
    bars: list[dict[str, Any]] = []
    monkeypatch.setattr(lines, "progress_bar", lambda items, **settings: bars.append(settings))
    run.part(Log).reporter.bar([], 3, 9, start=2)
    assert bars == [{"log_format": kind, "log_interval": 7, "epoch": 3, "total": 9, "start": 2}]


@pytest.mark.parametrize(("flags", "kind"), [("--no-progress-bar", "simple"), ("", None)])
def test_without_a_format_the_bar_chooses_one_unless_lines_are_asked_for(
    flags: str, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = training_settings(runs.arguments(FIVE.replace("--log-format json", ""), flags))
    bars: list[dict[str, Any]] = []
    monkeypatch.setattr(lines, "progress_bar", lambda items, **settings: bars.append(settings))
    the_run(settings).part(Log).reporter.bar([], 1, 1)
    assert bars[0]["log_format"] is kind or bars[0]["log_format"] == kind


def test_lines_have_both_clocks_and_count_groups_of_batches(tmp_path: Path) -> None:
    log = runs.train(tmp_path, FIVE, "--update-freq 2 --max-epoch 1 --no-save --disable-validation")
    found = [line for line in log if "num_updates" in line]
    assert [(line["num_updates"], line["update"]) for line in found] == [(1, 2 / 5), (2, 4 / 5), (3, 1.0)]
    assert sum(line["wpb"] for line in found) == 2670 and found[2]["wpb"] <= 640, "the rest is an update of its own"
    for line in (*found, {name.removeprefix("train_"): value for name, value in log[-1].items()}):
        assert 0 < line["train_wall"] <= line["wall"]


def test_bars_count_the_updates_of_an_epoch_and_the_run_its_total(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[tuple[Any, ...]] = []
    show = Reporter.bar

    def bar(self: Reporter, items: Any, epoch: int, total: int, **place: Any) -> Any:
        run = place.get("run")
        bars.append((epoch, total, place["start"], run.start, run.total))
        return show(self, items, epoch, total, **place)

    monkeypatch.setattr(Reporter, "bar", bar)
    flags = [FIVE, "--disable-validation --update-freq 2,5 --no-epoch-checkpoints --max-epoch 3 --max-update"]
    runs.train(tmp_path, *flags, "2")
    runs.train(tmp_path, *flags, "5")
    assert bars == [(1, 3, 0, 0, 2), (1, 3, 2, 2, 5), (2, 1, 0, 2, 5), (3, 1, 0, 2, 5)]


def test_folders_take_turns_and_processes_agree_on_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        loop,
        "check_agreement",
        lambda world, splits, counts: compared.append((world.size, sorted(splits), counts["updates so far"])),
    )
    folders = Path(f"{runs.DATA}:{runs.DATA}")
    runs.train(tmp_path, FIVE, "--max-epoch 2 --no-save", data=folders)
    assert compared == [(1, ["test", "valid"], 0), (1, ["valid"], 5)]


def test_weights_that_are_not_finite_are_named_with_the_update_and_not_saved() -> None:
    run = state(a_run("--no-epoch-checkpoints"), updates=7)
    with torch.no_grad():
        next(run.model.parameters())[0] = torch.nan
    with pytest.raises(UserError, match="^update 7: the weights "):
        run.part(Checkpoints).save(run)


def test_a_line_of_a_stage_names_it() -> None:
    run = a_run("--log-interval 2", stage=Stage(2, 16, 9))
    run.begin_epoch()
    assert run.part(Log).interval(run).items() >= {"stage": 2, "tokens_per_sample": 16}.items()


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


# --- what bars and recorders are given


class Bar:
    """A bar that shows nothing and tells what it is given."""

    def __init__(self, items: Any, told: list[Any], **settings: Any) -> None:
        self.items, self.told, self.settings = items, told, settings

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def __iter__(self) -> Any:
        return iter(self.items)

    def close(self) -> None:
        pass

    def log(self, line: Any, tag: str, step: int, eta: Any) -> Any:
        values = line()
        self.told.append((tag, step, eta(values) is not None, values.get("stage")))
        return {"shown": step}

    def print(self, stats: Any, tag: str) -> Any:
        self.told.append((tag, stats["num_updates"], stats["epoch"], stats.get("stage")))
        return stats


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    """The bars of a run, all of which tell one list."""
    made: list[Bar] = []
    told: list[Any] = []
    monkeypatch.setattr(
        lines,
        "progress_bar",
        lambda items, **settings: made.append(Bar(items, told, **settings)) or made[-1],
    )
    return made


def test_each_line_is_shown_and_recorded_by_its_kind_and_update(
    bars: list[Bar], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    records: list[Any] = []
    recorded: list[Any] = []

    @contextlib.contextmanager
    def recording(*args: Any) -> Any:
        recorded.append(args)
        yield lambda *values: records.append(values)

    monkeypatch.setattr(lines, "recording", recording)
    monkeypatch.setattr(Clock, "elapsed", lambda self: 2.0)
    flags = ["--stages 8:2,16:7 --max-update 7 --update-freq 2 --max-tokens 640 --no-save --save-dir", tmp_path]
    run = state(a_run(*flags, stage=Stage(2, 16, 7)), updates=2)
    run.train()
    progress = run.part(Log).progress
    assert recorded == [(run.settings.common, str(tmp_path), 2, False)] and progress.start == 2
    training, validation, *others = [bar.settings for bar in bars]
    assert (training["epoch"], training["total"], training["start"]) == (1, 3, 0)
    assert training["run"] is progress and progress.total == 7
    prefix = "valid on 'test' subset"
    assert (validation["epoch"], validation["total"], validation["prefix"]) == (1, 1, prefix)
    assert [other["epoch"] for other in others] == [2, 2]
    inner = [("train_inner", updates, True, 2) for updates in (3, 4, 5)]
    ends = [("train", 5, 1, 2), ("test", 5, 1, 2)]
    assert bars[0].told[:5] == [*inner, *ends]
    assert [values[1:] for values in records[:5]] == [entry[:2] for entry in (*inner, *ends)]
    assert [values[0] for values in records[:3]] == [{"shown": updates} for updates in (3, 4, 5)]
    assert records[4][0]["wps"] == records[4][0]["wpb"] / 2
    assert run.validation["test"].epoch == 1, "whatever is random in validation is that of the first epoch"
    assert run.validation["test"].iterations_in_epoch == 1, "the first step alone"


def test_a_bar_begins_at_the_updates_of_its_epoch_that_are_over(bars: list[Bar]) -> None:
    run = state(a_run("--update-freq 2 --max-update 8 --no-save --disable-validation"), updates=7, read=2)
    run.train()
    assert (bars[0].settings["start"], bars[0].settings["total"]) == (1, 3)
    progress = run.part(Log).progress
    assert (progress.start, progress.updates, progress.total) == (7, 7, 8), "a bar counts them on"


def test_the_best_figure_is_of_the_first_split(bars: list[Bar]) -> None:
    run = a_run("--valid-subset test,valid")
    records: list[Any] = []
    run.part(Validation).reporter.record = lambda *values: records.append(values)  # type: ignore[method-assign]
    run.best, run.due = run.best.validated(0.01), Due(3)
    figure = run.part(Validation).measure(run)
    assert figure is not None
    (first, *_), (second, *_) = records
    assert (first["best_loss"], first["loss"]) == (0.01, figure) and figure > 1
    assert second["best_loss"] == second["loss"] != figure


def test_a_process_that_is_not_the_first_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []

    @contextlib.contextmanager
    def recording(*args: Any) -> Any:
        recorded.append(args[0])
        yield lambda *values: None

    monkeypatch.setattr(lines, "recording", recording)
    a_run("--max-update 1 --no-save --disable-validation", world=World(1, 1)).train()
    assert recorded == [None]


def test_an_update_has_other_batches_of_its_epoch() -> None:
    run = a_run()
    assert run.rebatch == run.batches.rebatch


def test_the_time_left_counts_the_time_that_is_over() -> None:
    run = a_run("--stop-time-hours 1")
    run.trained_before = 600.0
    left = lines.seconds_left({"num_updates": 1, "ups": 1.0}, run.cfg, run.batches, run.wall())
    assert left is not None and 2900 < left <= 3000


def test_an_epochs_line_is_of_its_own_updates(tmp_path: Path) -> None:
    log = runs.train(tmp_path, FIVE, "--max-epoch 2 --no-save --disable-validation")
    lines = runs.updates(log)
    for epoch, summary in enumerate(runs.summaries(log, "train"), start=1):
        own = [line for line in lines if line["epoch"] == epoch]
        tokens = sum(line["wpb"] for line in own)
        assert len(own) == 5 and summary["wpb"] == tokens / 5
        assert summary["loss"] == pytest.approx(sum(line["loss"] * line["wpb"] for line in own) / tokens, abs=2e-3)
