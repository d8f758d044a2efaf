"""What a resumed run restores, and what it begins anew."""

from __future__ import annotations

import contextlib
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from mistakes import logged, user_error
from small_runs import FIVE, a_run, state

from fairseq import checkpoint
from fairseq.config.settings import training_settings
from fairseq.data.indexed_dataset import IndexedCorpus, IndexedWriter
from fairseq.data.position import CheckpointOrigin
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.system import checksums
from fairseq.training.build import build_state
from fairseq.training.loop import limit_reached
from fairseq.training.resume import restore, restoring
from fairseq.training.stages import Stage
from fairseq.training.update import update


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
    for name in ("best", "without_improvement"):
        assert after["extra_state"][name] == before["extra_state"][name] is not None


def test_a_whole_run_equals_its_parts(tmp_path: Path) -> None:
    flags = [FIVE, runs.ADAM, runs.DROPOUT, "--no-epoch-checkpoints --log-interval 3 --max-update"]
    whole = runs.train(tmp_path / "whole", *flags, "7")
    parts = [line for updates in (4, 7) for line in runs.train(tmp_path / "parts", *flags, f"{updates}")]
    one, other = (runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "parts"))
    for extra in (one["extra_state"], other["extra_state"]):
        for name in ("best", "without_improvement"):  # the first part ends with a validation
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
    extra |= {"previous_training_time": 1000.0, "best": 1.5, "without_improvement": 4}

    def best(*flags: str) -> tuple[Any, ...]:
        run = a_run(runs.ADAM, *flags)
        restore(run, stored, "x.pt")
        return run.best, run.without_improvement, run.wall() > 1000, limit_reached(run, False) is not None

    assert best() == (1.5, 4, True, False)
    assert best("--patience 4") == (1.5, 4, True, True)
    assert best("--reset-meters --patience 4") == (None, 0, False, False)
    assert best("--reset-optimizer --patience 4") == (None, 0, True, False)
    assert best("--best-checkpoint-metric ppl") == (None, 0, True, False), "another metric"
    del extra["validation"]
    stored["args"]["best_checkpoint_metric"] = None  # of fairseq, which calls it loss
    assert best()[0] == 1.5
    stored["args"]["best_checkpoint_metric"] = "ppl"
    assert best("--best-checkpoint-metric ppl")[0] == 1.5
    assert best()[0] is None
    stored["args"]["best_checkpoint_metric"] = "loss"
    del extra["previous_training_time"]
    assert best() == (1.5, 4, False, False)
    run = a_run(runs.ADAM)
    restore(run, stored, "x.pt")
    assert run.trained_before == 0.0


def test_the_best_of_blocks_of_another_length_is_set_aside(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = state(a_run(runs.ADAM), updates=7, epoch=2, read=2)
    before.validated(3.0)
    stored = before.state_dict()

    def resumed_best(*flags: str) -> tuple[float | None, str]:
        run = a_run(runs.ADAM, *flags)
        restore(run, stored, "x.pt")
        return run.best, run.incomparable

    assert resumed_best() == (3.0, "")
    changes = "`tokens_per_sample` 32 (was 16)"
    assert resumed_best("--tokens-per-sample 32") == (None, changes)
    assert f"best validation: starts anew, because it measures something else: {changes}" in caplog.messages
    assert resumed_best("--max-tokens 320")[0] == 3.0
    del stored["extra_state"]["validation"], stored["args"]["tokens_per_sample"]
    assert resumed_best("--tokens-per-sample 32")[0] == 3.0, "of a checkpoint that does not tell its length"


@pytest.mark.parametrize("how", ["other words", "fewer words", "another folder of the same"])
def test_a_run_whose_data_changed_says_so(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    def run_on(data: Path) -> Any:
        checksums.record(data, data)
        return build_state(training_settings(runs.arguments(FIVE, runs.ADAM, data=data)), World())

    before, data = (Path(shutil.copytree(runs.DATA, tmp_path / name)) for name in ("before", "data"))
    stored = state(run_on(before), updates=7, epoch=2, read=2).state_dict()
    corpus = IndexedCorpus(str(data / "valid"))  # what these runs train on
    tokens, sizes = np.array(corpus.tokens), np.array(corpus.sizes)
    if how == "other words":
        tokens = np.where(tokens == 4, 5, tokens)
    lines = len(sizes) // 2 if how == "fewer words" else len(sizes)
    with IndexedWriter(str(data / "valid"), tokens.dtype) as writer:
        writer.add(tokens[: sizes[:lines].sum()], sizes[:lines])
    message = "the data have changed"
    refused = user_error(f"^x.pt: {message}") if how == "fewer words" else contextlib.nullcontext()
    with refused, restoring("x.pt"):
        restore(run_on(data), stored, "x.pt")
    assert (message in caplog.text) is (how == "other words")


def test_a_run_whose_dictionary_changed_says_that_the_data_changed(tmp_path: Path) -> None:
    stored = {**a_run(runs.ADAM).state_dict(), "dictionary": "of other words"}
    with user_error("^x.pt: was trained with another dictionary than .*, or another --save-dir: the data have changed"):
        restore(a_run(runs.ADAM), stored, "x.pt")


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
    run = a_run(flags, base=XL)
    restore(run, state, "x.pt")
    saved, memory = state["extra_state"]["carried"]["memory"], run.task.carried.get("memory") or []
    assert bool(memory) is fits and all(torch.equal(a, b) for a, b in zip(memory, saved, strict=fits))
    dropped = "x.pt: memory dropped, because rows, segments or memory have another length"
    assert (dropped in logged(caplog)) is (not fits and "reset" not in flags)


def test_memory_fits_segments_and_memory_of_the_same_length_in_the_same_order() -> None:
    run = state(a_run("--tokens-from-prev 16", base=XL), updates=3, read=3)
    stored = run.state_dict()
    own = stored["extra_state"]["batches"]
    assert own["batches"] == 42 and own["processes"] == 1 and own["tokens_per_sample"] == 16

    def rows(**signature: Any) -> int:
        extra = {**stored["extra_state"], "batches": {**own, **signature}}
        return a_run("--tokens-from-prev 16", base=XL)._load_position(stored, extra, "x.pt")

    assert rows() == rows(batches=7, processes=2) == 4
    for name in ("tokens_per_sample", "memory_length", "shuffled_with"):
        assert rows(**{name: 3}) == 0


# --- what a run hands on


def test_a_restored_run_has_tensors_of_its_own_unless_they_are_given_away() -> None:
    run = a_run(runs.ADAM)
    update(run, [next(iter(run.batches))])
    for how, shared in (({}, False), ({"adopt": False}, False), ({"adopt": True}, True)):
        stored = run.state_dict()
        moments = {entry["exp_avg"].data_ptr() for entry in stored["last_optimizer_state"]["state"].values()}
        other = a_run(runs.ADAM)
        restore(other, stored, "x.pt", **how)
        found = {entry["exp_avg"].data_ptr() for entry in other.optimizer.optimizer.state.values()}
        assert bool(found & moments) is shared


def test_the_run_that_saved_a_place_is_told_by_its_checkpoint() -> None:
    stored = state(a_run(runs.ADAM), updates=7, epoch=2, read=2).state_dict()
    run, other = a_run(runs.ADAM), a_run(runs.ADAM, "--tokens-per-sample 32")
    told: list[Any] = []
    for each in (run, other):
        each.batches.load_state_dict = lambda place, *saved: bool(told.append(saved))  # type: ignore[method-assign]
        restore(each, stored, "x.pt")
    saved = CheckpointOrigin(same_length=True)
    assert told == [(saved,), (replace(saved, same_length=False),)]


@pytest.mark.parametrize(("before", "same"), [(1, False), (2, True), (None, True)])
def test_a_place_of_another_stage_is_told_as_such(before: int | None, same: bool) -> None:
    stored = state(a_run(runs.ADAM), updates=7, epoch=2, read=2).state_dict()
    if before is not None:
        stored["extra_state"]["stage"] = {"number": before}
    told: list[Any] = []
    run = a_run(runs.ADAM, stage=Stage(2, 16, 9))
    run.batches.load_state_dict = lambda place, saved: bool(told.append(saved))  # type: ignore[method-assign]
    restore(run, stored, "x.pt")
    assert [saved.same_length for saved in told] == [same]


def test_a_state_of_another_optimizer_is_refused_by_its_name() -> None:
    stored = state(a_run(runs.ADAM), updates=7, epoch=2, read=2).state_dict()
    with pytest.raises(UserError, match="^x.pt: made with optimizer adam, not nag"):
        restore(a_run(runs.NAG), stored, "x.pt")
