"""Checkpoints are named and kept as asked."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
from kills import leftover
from mistakes import logged, user_error
from states import a_state, restored

from fairseq.checkpoint import CheckpointManager, load, save
from fairseq.checkpoint.manager import SavePoint
from fairseq.config.settings import CheckpointConfig
from fairseq.errors import UserError
from fairseq.text.tokenizers import Tokenizer
from fairseq.text.tokenizers.base import Space


def saved(tmp_path: Path, *points: tuple[int, int, bool, float | None], **settings) -> CheckpointManager:
    config = CheckpointConfig(save_dir=str(tmp_path / "s"), **settings)
    keeper, sign = CheckpointManager(config), -1 if config.maximize_best_checkpoint_metric else 1
    best = math.inf
    for epoch, updates, end_of_epoch, figure in points:
        is_best = figure is not None and sign * figure < best
        paths = keeper.due(SavePoint(epoch, updates, end_of_epoch, is_best, figure))
        if paths:
            keeper.save(a_state(float(updates)), paths)
        best = min(best, sign * figure) if is_best and figure is not None else best
    return keeper


def files(tmp_path: Path) -> dict[str, int]:
    return {path.name: int(load(path)["model"]["w"][0]) for path in (tmp_path / "s").iterdir()}


def test_checkpoints_have_fairseqs_names(tmp_path):
    points = [(1, 5, False, None), (1, 10, True, 3.0), (2, 15, False, 4.0), (2, 20, True, 2.0)]
    saved(tmp_path, *points, save_interval_updates=5)
    assert files(tmp_path) == {
        "checkpoint_1_5.pt": 5, "checkpoint1.pt": 10, "checkpoint_2_15.pt": 15, "checkpoint2.pt": 20,
        "checkpoint_best.pt": 20, "checkpoint_last.pt": 20,
    }  # fmt: skip


def test_intervals_and_switches_decide_which_are_written(tmp_path):
    def names(epoch=2, updates=6, end=True, best=False, **settings):
        config = CheckpointConfig(save_dir=str(tmp_path), **settings)
        return [path.name for path in CheckpointManager(config).due(SavePoint(epoch, updates, end, best))]

    assert names() == ["checkpoint2.pt", "checkpoint_last.pt"]
    assert names(save_interval=2) == ["checkpoint2.pt", "checkpoint_last.pt"]
    assert names(save_interval=3) == ["checkpoint_last.pt"]
    assert names(no_epoch_checkpoints=True, best=True) == ["checkpoint_best.pt", "checkpoint_last.pt"]
    assert names(end=False, save_interval_updates=3) == ["checkpoint_2_6.pt", "checkpoint_last.pt"]
    assert names(end=False, save_interval_updates=4) == ["checkpoint_last.pt"]
    assert names(no_last_checkpoints=True) == ["checkpoint2.pt"]


@pytest.mark.parametrize("name", ["../stolen.pt", "/tmp/stolen.pt", "checkpoint_words_1.pt/x", "checkpoint_best.pt"])
def test_a_milestone_in_a_checkpoint_names_no_other_file(tmp_path: Path, name: str) -> None:
    manager = CheckpointManager(CheckpointConfig(save_dir=str(tmp_path)))
    with pytest.raises(UserError, match="checkpoint: .* is no name of a milestone"):
        manager.due(SavePoint(epoch=1, updates=1, milestone=name))
    assert tmp_path / "checkpoint_words_5.pt" in manager.due(SavePoint(1, 1, milestone="checkpoint_words_5.pt"))


def written(folder: Path, figure: float | None, **settings: Any) -> list[str]:
    config = {"no_last_checkpoints": True, "no_epoch_checkpoints": True, "keep_best_checkpoints": 2, **settings}
    paths = CheckpointManager(CheckpointConfig(save_dir=str(folder), **config)).due(
        SavePoint(epoch=1, updates=1, end_of_epoch=True, is_best=False, figure=figure)
    )
    assert all(path.parent == folder for path in paths)
    return [path.name for path in paths]


def test_a_figure_is_among_the_best_as_long_as_few_are_better(tmp_path: Path) -> None:
    name = "checkpoint.best_loss_{:.4f}.pt"
    for figure in (None, float("nan")):
        assert written(tmp_path, figure) == []
    for before in ((), (3.0,)):
        for figure in before:
            (tmp_path / name.format(figure)).touch()
        for figure in (0.0, -1.5, 3.0, 9.0):
            assert written(tmp_path, figure) == [name.format(figure)]
    (tmp_path / name.format(5.0)).touch()
    assert written(tmp_path, 4.99) == [name.format(4.99)]
    for figure in (5.0, 5.1):
        assert written(tmp_path, figure) == []
    more = {"maximize_best_checkpoint_metric": True}
    assert written(tmp_path, 3.01, **more) == [name.format(3.01)]
    assert written(tmp_path, 3.0, **more) == written(tmp_path, 2.0, **more) == []
    # As in fairseq, files of another metric do not count.
    assert written(tmp_path, 7.0, best_checkpoint_metric="ppl") == ["checkpoint.best_ppl_7.0000.pt"]
    assert written(tmp_path, 1.0, best_checkpoint_metric="ppl") == ["checkpoint.best_ppl_1.0000.pt"]


def test_ranked_files_are_told_apart_by_six_digits_and_infinite_figures_are_not_ranked(tmp_path: Path) -> None:
    points = [(n, n, True, figure) for n, figure in enumerate((math.inf, 3e-5, 2e-5, 8.76612, 8.76614, 4e-5), 1)]
    saved(tmp_path, *points, no_epoch_checkpoints=True, keep_best_checkpoints=2)
    names = {name for name in files(tmp_path) if name.startswith("checkpoint.best_")}
    assert names == {"checkpoint.best_loss_2e-05.pt", "checkpoint.best_loss_3e-05.pt"}
    assert files(tmp_path)["checkpoint.best_loss_2e-05.pt"] == 3
    names = [written(tmp_path / "other", figure)[0] for figure in (8.76612, 8.76614)]
    assert names == ["checkpoint.best_loss_8.76612.pt", "checkpoint.best_loss_8.76614.pt"]


def test_updates_are_saved_within_epochs_at_multiples_of_the_interval(tmp_path: Path) -> None:
    def due(updates: int, end: bool, **settings: Any) -> list[str]:
        config = CheckpointConfig(save_dir=str(tmp_path), no_last_checkpoints=True, **settings)
        paths = CheckpointManager(config).due(SavePoint(epoch=3, updates=updates, end_of_epoch=end, is_best=False))
        return [path.name for path in paths]

    assert due(4, False) == [] == due(5, False, save_interval_updates=4)
    assert due(4, False, save_interval_updates=4) == due(4, False, save_interval_updates=1) == ["checkpoint_3_4.pt"]
    assert due(4, True, save_interval_updates=4) == ["checkpoint3.pt"]
    assert due(4, True, save_interval=2) == []


@pytest.mark.parametrize(("maximize", "expected"), [(False, 2), (True, 4)])
def test_the_best_is_the_least_or_the_greatest(tmp_path, maximize, expected):
    points = [(1, 1, True, 3.0), (2, 2, True, 1.0), (3, 3, True, float("nan")), (4, 4, True, 5.0)]
    saved(tmp_path, *points, maximize_best_checkpoint_metric=maximize, no_epoch_checkpoints=True)
    assert files(tmp_path) == {"checkpoint_best.pt": expected, "checkpoint_last.pt": 4}


def test_continue_once_is_read_until_there_is_a_last_checkpoint(tmp_path):
    save(tmp_path / "other.pt", a_state(3.0))
    once = {"continue_once": str(tmp_path / "other.pt")}
    keeper = saved(tmp_path, **once)
    assert restored(keeper) == tmp_path / "other.pt"
    assert restored(saved(tmp_path, (1, 1, True, None), **once)) == tmp_path / "s" / "checkpoint_last.pt"


def test_further_names_are_copied_where_there_are_no_links(tmp_path, monkeypatch):
    def no_links(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    saved(tmp_path, (1, 1, True, 1.0), (2, 2, True, 0.5))
    assert files(tmp_path) == {
        "checkpoint1.pt": 1, "checkpoint2.pt": 2, "checkpoint_best.pt": 2, "checkpoint_last.pt": 2,
    }  # fmt: skip


def test_all_names_of_a_save_are_one_file_on_the_disk(tmp_path):
    saved(tmp_path, (1, 1, True, 1.0))
    assert len(files(tmp_path)) == 3
    assert {path.stat().st_nlink for path in (tmp_path / "s").glob("*.pt")} == {3}


def test_a_failed_save_leaves_the_checkpoints_before_it(tmp_path, monkeypatch):
    keeper = saved(tmp_path, (1, 1, True, 3.0))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        keeper.save(a_state(2.0), keeper.due(SavePoint(epoch=2, updates=2, end_of_epoch=True, is_best=True)))
    assert files(tmp_path) == {"checkpoint1.pt": 1, "checkpoint_best.pt": 1, "checkpoint_last.pt": 1}


def test_what_not_to_save_is_not_saved(tmp_path):
    saved(tmp_path, (1, 1, True, 3.0), no_save=True)
    assert not (tmp_path / "s").exists()


def test_leftovers_of_killed_saves_are_removed_at_the_start(tmp_path):
    saved(tmp_path, (1, 1, True, None))
    leftover(tmp_path / "s" / "checkpoint_last.pt").write_bytes(b"half")
    saved(tmp_path)
    assert set(os.listdir(tmp_path / "s")) == {"checkpoint1.pt", "checkpoint_last.pt"}


def test_a_run_starts_from_the_last_checkpoint_or_the_given_one(tmp_path):
    keeper = saved(tmp_path)
    assert restored(keeper) is None
    saved(tmp_path, (1, 1, True, None))
    assert restored(keeper) == tmp_path / "s" / "checkpoint_last.pt"
    assert restored(saved(tmp_path, restore_file="checkpoint1.pt")) == tmp_path / "s" / "checkpoint1.pt"
    save(other := tmp_path / "other.pt", a_state())
    assert restored(saved(tmp_path, restore_file=str(other))) == other
    with user_error("--restore-file gone.pt: file not found.*leave it out to resume from"):
        restored(saved(tmp_path, restore_file="gone.pt"))


@pytest.mark.parametrize("name", ["restore_file", "continue_once"])
def test_a_missing_checkpoint_is_an_error_unless_a_job_that_is_started_again_names_its_last(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def keeper(path: str) -> CheckpointManager:
        return CheckpointManager(CheckpointConfig(save_dir=str(tmp_path), **{name: path}))  # type: ignore[arg-type]

    flag = f"--{name.replace('_', '-')}"
    with user_error(f"^{flag} gone.pt: file not found; also looked in {tmp_path}; leave it out to begin anew$"):
        restored(keeper("gone.pt"))
    last = tmp_path / "x" / "checkpoint_last.pt"
    assert caplog.messages == [] and restored(keeper(str(last))) is None
    assert logged(caplog) == [f"{flag} {last}: file not found; also looked in {tmp_path}; training begins anew"]
    last.parent.mkdir()
    last.symlink_to("checkpoint_1_9.parts")
    with user_error(f"{flag} {last}: file not found"):
        restored(keeper(str(last)))


@pytest.mark.parametrize("kind", ["private file", "another JSON file", "folder", "dangling link"])
def test_nothing_but_a_tokenizer_is_copied_from_the_data(kind: str, tmp_path: Path) -> None:
    data, private = tmp_path / "data", tmp_path / "private"
    data.mkdir()
    (data / "dict.txt").write_text("a 1\n")
    private.write_text('{"version": 1, "token": "secret"}' if kind == "another JSON file" else "root:secret\n")
    path = data / "tokenization.json"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "none" if kind == "dangling link" else private)
    with pytest.raises(UserError, match=f"{path}: .*; run fairseq-preprocess again"):
        saved(tmp_path).keep_dictionary(data / "dict.txt")
    assert not (tmp_path / "s" / "tokenization.json").exists()


def test_the_tokenizer_of_the_data_is_copied_and_that_of_another_run_removed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "dict.txt").write_text("a 1\n")
    Tokenizer(Space()).save(data, ["a"])
    keeper = saved(tmp_path)
    for _ in range(2):
        keeper.keep_dictionary(data / "dict.txt")
        for name in ("dict.txt", "tokenization.json"):
            assert (keeper.folder / name).read_bytes() == (data / name).read_bytes()
    (data / "tokenization.json").unlink()
    keeper.keep_dictionary(data / "dict.txt")
    assert not (keeper.folder / "tokenization.json").exists()


@pytest.mark.parametrize("name", ["dict.txt", "tokenization.json"])
def test_a_folder_in_place_of_the_dictionary_or_tokenizer_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "dict.txt").write_text("the 3\n")
    (tmp_path / "s" / name).mkdir(parents=True)
    with user_error(rf"s/{name}: cannot be written \(Is a directory\); remove it or choose another --save-dir"):
        saved(tmp_path).keep_dictionary(tmp_path / "dict.txt")
