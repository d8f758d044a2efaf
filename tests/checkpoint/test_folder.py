"""The folder of a run's checkpoints: what is found, written, kept, locked and removed in it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from mistakes import user_error
from states import a_state, restored

from fairseq.checkpoint import CheckpointManager, load, save
from fairseq.checkpoint.manager import SavePoint, find_checkpoint, is_model
from fairseq.config.settings import CheckpointConfig
from fairseq.errors import UserError


def manager(folder: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(save_dir=str(folder), **settings))


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def sharded(folder: Path) -> Path:
    """A folder that is taken for a checkpoint of sharded training."""
    folder.mkdir()
    (folder / "plain.pt").write_text("{}")
    return folder


def value(path: Path) -> int:
    return int(load(path)["model"]["w"][0])


# What a path leads to


def test_of_a_folder_the_best_checkpoint_is_read_else_the_plain_or_the_last_one(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        find_checkpoint(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}: no checkpoint in this folder; expected checkpoint_best.pt, checkpoint.pt, checkpoint_last.pt"
    )
    for name in ("checkpoint_last.pt", "checkpoint.pt", "checkpoint_best.pt"):
        assert not is_model(tmp_path / name)
        (tmp_path / name).touch()
        assert find_checkpoint(tmp_path) == find_checkpoint(str(tmp_path)) == tmp_path / name
        assert is_model(tmp_path) and is_model(str(tmp_path / name))


def test_a_file_a_missing_path_and_a_sharded_checkpoint_are_themselves(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    folder = sharded(tmp_path / "a.parts")
    for path in (tmp_path / "model.bin", tmp_path / "none.pt", folder):
        assert find_checkpoint(path) == path
    assert is_model(folder)
    (folder / "checkpoint_last.pt").touch()
    assert find_checkpoint(folder) == folder


def test_files_of_other_names_and_folders_without_a_checkpoint_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    (tmp_path / "checkpoint1.pt").touch()
    (tmp_path / "folder.pt").mkdir()
    assert is_model(tmp_path / "checkpoint1.pt")
    for path in (tmp_path, tmp_path / "model.bin", tmp_path / "none.pt", tmp_path / "folder.pt"):
        assert not is_model(path)


# Saving


def test_of_a_run_that_saves_nothing_no_file_is_due_and_no_folder_made(tmp_path: Path) -> None:
    nothing = manager(tmp_path / "s", no_save=True)
    assert nothing.due(SavePoint(epoch=1, updates=1, end_of_epoch=True, is_best=True, figure=1.0)) == []
    nothing.keep_dictionary(tmp_path / "none")
    nothing.set_best_aside()
    with nothing.locked():
        assert not (tmp_path / "s").exists()


def test_a_checkpoint_that_a_link_shares_with_other_runs_stays_when_training_saves(tmp_path: Path) -> None:
    keeper, shared = manager(tmp_path / "run"), tmp_path / "pretrained.pt"
    save(shared, a_state(1.0))
    content = shared.read_bytes()
    paths = [tmp_path / "run" / name for name in ("checkpoint_best.pt", "checkpoint_last.pt")]
    for path in paths:
        path.symlink_to(shared)
    keeper.save(a_state(2.0), paths)
    assert shared.read_bytes() == content and not any(path.is_symlink() for path in paths)
    assert [value(path) for path in paths] == [2, 2] and paths[0].samefile(paths[1])


def test_a_file_replaces_links_to_sharded_checkpoints_which_go(tmp_path: Path) -> None:
    keeper = manager(tmp_path)
    paths = [tmp_path / "checkpoint_last.pt", tmp_path / "checkpoint_best.pt"]
    with keeper.saving_folder(paths, epoch=1, updates=5) as folder:
        (folder / "plain.pt").write_text("{}")
    assert names(tmp_path) == {"checkpoint_1_5.parts", "checkpoint_last.pt", "checkpoint_best.pt"}
    assert all(os.readlink(path) == "checkpoint_1_5.parts" for path in paths)
    keeper.save(a_state(3.0), paths[:1])
    assert not paths[0].is_symlink() and value(paths[0]) == 3
    assert names(tmp_path) == {"checkpoint_1_5.parts", "checkpoint_last.pt", "checkpoint_best.pt"}
    keeper.save(a_state(4.0), paths)
    assert names(tmp_path) == {"checkpoint_last.pt", "checkpoint_best.pt"}
    assert [value(path) for path in paths] == [4, 4] and paths[0].samefile(paths[1])


def test_a_folder_under_any_name_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for number in range(2):
        keeper = manager(tmp_path / str(number))
        paths = [tmp_path / str(number) / f"checkpoint{n}.pt" for n in range(2)]
        paths[number].mkdir()
        with pytest.raises(UserError) as error:
            keeper.save(a_state(), paths)
        advice = "cannot be written (Is a directory); remove it or choose another --save-dir"
        assert error.value.with_flags == f"{paths[number]}: {advice}"
        assert names(tmp_path / str(number)) == {paths[number].name}


def test_a_checkpoint_under_a_name_of_its_own_is_neither_resumed_from_nor_removed(tmp_path: Path) -> None:
    keeper = manager(tmp_path, keep_last_epochs=1)
    assert keeper.save_as("average.pt", a_state(2.0)) == tmp_path / "average.pt" and value(tmp_path / "average.pt") == 2
    for epoch in (1, 2):
        keeper.save(a_state(), keeper.due(SavePoint(epoch=epoch, updates=epoch, end_of_epoch=True, is_best=False)))
    assert names(tmp_path) == {"average.pt", "checkpoint2.pt", "checkpoint_last.pt"}


def test_a_sharded_checkpoint_of_the_same_update_gets_the_next_number(tmp_path: Path) -> None:
    keeper = manager(tmp_path)
    for name in ("a", "b", "c"):
        with keeper.saving_folder([tmp_path / f"{name}.pt"], epoch=1, updates=5) as folder:
            (folder / "content").write_text(name)
            assert not (tmp_path / f"{name}.pt").exists()
    for name, number in (("a", ""), ("b", "-2"), ("c", "-3")):
        assert os.readlink(tmp_path / f"{name}.pt") == f"checkpoint_1_5{number}.parts"
        assert (tmp_path / f"{name}.pt" / "content").read_text() == name


def test_a_failure_while_a_folder_is_written_leaves_what_was_there(tmp_path: Path) -> None:
    keeper, link = manager(tmp_path), tmp_path / "checkpoint_last.pt"
    with keeper.saving_folder([link], epoch=1, updates=5):
        pass
    with pytest.raises(KeyError), keeper.saving_folder([link], epoch=1, updates=6):
        raise KeyError
    assert os.readlink(link) == "checkpoint_1_5.parts" and names(tmp_path) == {link.name, "checkpoint_1_5.parts"}


def test_sharded_checkpoints_are_removed_with_the_last_name_that_is_kept(tmp_path: Path) -> None:
    keeper = manager(tmp_path, keep_interval_updates=1)
    other, run = sharded(tmp_path / "checkpoint_own.parts"), tmp_path / "tensorboard"
    run.mkdir()
    for updates in (5, 6):
        paths = [tmp_path / f"checkpoint_1_{updates}.pt", tmp_path / "checkpoint_last.pt"]
        with keeper.saving_folder(paths, epoch=1, updates=updates) as folder:
            (folder / "plain.pt").write_text("{}")
    expected = {"checkpoint_1_6.parts", "checkpoint_1_6.pt", "checkpoint_last.pt", other.name, run.name}
    assert names(tmp_path) == expected


@pytest.mark.parametrize("keep", [-1, 0])
def test_all_are_kept_where_no_number_is_given(tmp_path: Path, keep: int) -> None:
    settings = {"keep_last_epochs": keep, "keep_interval_updates": keep, "keep_best_checkpoints": keep}
    there = {"checkpoint1.pt", "checkpoint2.pt", "checkpoint_1_1.pt", "checkpoint.best_loss_1.0000.pt"}
    for name in there:
        (tmp_path / name).touch()
    manager(tmp_path, **settings).save(a_state(), [tmp_path / "checkpoint_last.pt"])
    assert names(tmp_path) == there | {"checkpoint_last.pt"}


@pytest.mark.parametrize("pattern, kept", [(1, {1, 2, 3, 4}), (2, {2, 3, 4}), (3, {3, 4}), (0, {4}), (-1, {4})])
def test_multiples_of_a_pattern_are_kept(tmp_path: Path, pattern: int, kept: set[int]) -> None:
    for number in (1, 2, 3, 4):
        (tmp_path / f"checkpoint_1_{number}.pt").touch()
    keeper = manager(tmp_path, keep_interval_updates=1, keep_interval_updates_pattern=pattern)
    keeper.save(a_state(), [tmp_path / "checkpoint_last.pt"])
    assert names(tmp_path) == {f"checkpoint_1_{number}.pt" for number in kept} | {"checkpoint_last.pt"}


@pytest.mark.parametrize("maximize", [False, True])
def test_of_each_kind_the_highest_numbers_and_the_best_figures_are_kept(tmp_path: Path, maximize: bool) -> None:
    kinds = ("checkpoint{}.pt", "checkpoint_1_{}.pt", "checkpoint.best_loss_{}.0000.pt")
    for kind in kinds:
        for number in (2, 9, 10):
            (tmp_path / kind.format(number)).touch()
    settings = {"keep_last_epochs": 1, "keep_interval_updates": 2, "keep_best_checkpoints": 1}
    keeper = manager(tmp_path, maximize_best_checkpoint_metric=maximize, **settings)
    keeper.save(a_state(), [tmp_path / "checkpoint_last.pt"])
    best = kinds[2].format(10 if maximize else 2)
    assert names(tmp_path) == {"checkpoint10.pt", "checkpoint_1_10.pt", "checkpoint_1_9.pt", best, "checkpoint_last.pt"}


def test_the_best_of_the_next_stage_gets_the_next_number(tmp_path: Path) -> None:
    keeper, best = manager(tmp_path), tmp_path / "checkpoint_best.pt"
    for number in (1, 2, 3):
        best.write_text(str(number))
        keeper.set_best_aside()
        assert (tmp_path / f"checkpoint_best{number}.pt").read_text() == str(number)
    best.write_text("7")
    keeper.set_best_aside(7)
    assert (tmp_path / "checkpoint_best7.pt").read_text() == "7" and not best.exists()


# The dictionary


def test_a_dictionary_is_written_again_only_if_it_changed(tmp_path: Path) -> None:
    keeper, source = manager(tmp_path / "s"), tmp_path / "dict.en.txt"
    source.write_text("a 1\n")
    keeper.keep_dictionary(source)
    copy = tmp_path / "s" / "dict.txt"
    first = copy.stat().st_ino
    keeper.keep_dictionary(str(source))
    assert copy.stat().st_ino == first
    source.write_text("b 1\n")
    keeper.keep_dictionary(source)
    assert copy.read_text() == "b 1\n" and names(tmp_path / "s") == {"dict.txt"}


def test_a_dictionary_that_cannot_be_read_or_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, source = manager(tmp_path / "s"), tmp_path / "dict.txt"
    with pytest.raises(UserError, match=f"^{source}: .*; make the data folder again$"):
        keeper.keep_dictionary(source)
    source.write_text("a 1\n")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with user_error(f"^--save-dir {tmp_path / 's' / 'dict.txt'}: cannot be written"):
        keeper.keep_dictionary(source)


# Where training starts


def test_a_checkpoint_to_finetune_from_and_one_to_resume_from_exclude_each_other(tmp_path: Path) -> None:
    keeper = manager(tmp_path, restore_file="a.pt", finetune_from_model="b.pt")
    with pytest.raises(UserError) as error:
        keeper.restore_paths()
    assert error.value.with_flags == (
        "--finetune-from-model: cannot be combined with --restore-file a.pt; give one of them"
    )
    assert manager(tmp_path, finetune_from_model="b.pt").restore_paths() == []


def test_a_file_to_restore_is_looked_for_here_and_then_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keeper = manager(tmp_path / "s", restore_file="a.pt")
    with user_error("^--restore-file a.pt: file not found"):
        keeper.restore_paths()
    (tmp_path / "s" / "a.pt").touch()
    assert keeper.restore_paths() == [tmp_path / "s" / "a.pt"]
    (tmp_path / "a.pt").touch()
    assert keeper.restore_paths() == [Path("a.pt")]


def test_a_folder_to_continue_from_leads_to_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoint_best.pt").touch()
    keeper = manager(tmp_path / "s", continue_once=str(tmp_path / "other"))
    assert keeper.restore_paths() == [tmp_path / "other" / "checkpoint_best.pt"]


def test_a_link_to_a_missing_checkpoint_gives_way_to_the_newest_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoint_last.pt").symlink_to("checkpoint_1_9.parts")
    (tmp_path / "checkpoint_1_8.pt").symlink_to("checkpoint_1_8.parts")  # missing, too
    with pytest.raises(UserError, match=f"^{tmp_path / 'checkpoint_last.pt'}: file not found"):
        restored(manager(tmp_path))
    for number, time in ((1, 2000), (2, 3000), (3, 1000)):
        save(tmp_path / f"checkpoint{number}.pt", a_state())
        os.utime(tmp_path / f"checkpoint{number}.pt", (time, time))
    caplog.clear()
    assert restored(manager(tmp_path)) == tmp_path / "checkpoint2.pt"
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'checkpoint_last.pt'}: file not found; check the path",
        f"{tmp_path / 'checkpoint2.pt'}: restored instead of checkpoint_last.pt",
    ]


# The lock


def test_a_filesystem_without_locks_is_logged_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    with manager(tmp_path).locked():
        pass
    (record,) = caplog.records
    assert record.levelname == "WARNING" and str(tmp_path) in record.getMessage()


# The folder


def test_a_folder_is_made_with_its_parents_and_one_that_is_there_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        manager(folder)
        assert folder.is_dir()
        (folder / "kept").touch()


def test_a_folder_that_cannot_be_made_or_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as error:
        manager(tmp_path / "file" / "s")
    assert error.value.with_flags == (
        f"--save-dir {tmp_path / 'file' / 's'}: cannot be made (Not a directory); choose another folder"
    )
    for missing in (os.W_OK, os.X_OK):
        monkeypatch.setattr(os, "access", lambda path, mode, missing=missing: not mode & missing)
        with pytest.raises(UserError) as error:
            manager(tmp_path)
        assert error.value.with_flags == f"--save-dir {tmp_path}: cannot be written to; choose another folder"
