"""A damaged checkpoint is found before a run goes on from it; a folder belongs to one run."""

from __future__ import annotations

import os
import shutil
import time
import zipfile

import pytest
import runs
import torch
from launches import FORK
from mistakes import user_error
from states import restored

from fairseq.checkpoint import CheckpointManager, describe_mismatch, save
from fairseq.config.settings import CheckpointConfig
from fairseq.errors import UserError


def a_state(**parts):
    return {"args": {"arch": "a"}, "model": {"w": torch.arange(5000.0), "v": torch.ones(3)}, **parts}


def flip_a_bit(path, near=None):
    """Damage the largest record of the zip file at *path*, or the one called *near*."""
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda item: item.file_size)
        if near is not None:
            record = next(item for item in archive.infolist() if item.filename.endswith(near))
    content = bytearray(path.read_bytes())
    content[record.header_offset + 200 + record.file_size // 2] ^= 4
    path.write_bytes(content)


def manager(folder, **settings):
    return CheckpointManager(CheckpointConfig(save_dir=str(folder), **settings))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_weights_that_are_no_floating_point_numbers_do_not_fit_a_model(dtype):
    wanted = {"w": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}
    assert describe_mismatch({**wanted, "w": torch.ones(2).bfloat16()}, wanted, "c.pt") is None
    found = describe_mismatch({**wanted, "w": torch.ones(2).to(dtype)}, wanted, "c.pt")
    assert f"1 of another type (w {dtype})" in found


def test_a_damaged_last_checkpoint_gives_way_to_the_newest_good_one(tmp_path, caplog):
    for number, name in enumerate(["checkpoint1.pt", "checkpoint_best.pt", "checkpoint2.pt", "checkpoint_last.pt"]):
        save(tmp_path / name, a_state())
        os.utime(tmp_path / name, (1000 + number, 1000 + number))
    assert restored(manager(tmp_path)) == tmp_path / "checkpoint_last.pt"
    flip_a_bit(tmp_path / "checkpoint_last.pt")
    (tmp_path / "checkpoint2.pt").unlink()
    os.link(tmp_path / "checkpoint_last.pt", tmp_path / "checkpoint2.pt")  # the same bytes
    assert restored(manager(tmp_path)) == tmp_path / "checkpoint_best.pt"
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "checkpoint_best.pt: restored instead of checkpoint_last.pt" in caplog.text
    for name in ("checkpoint_best.pt", "checkpoint1.pt"):
        flip_a_bit(tmp_path / name)
    with pytest.raises(UserError, match=r"checkpoint_last.pt: is damaged: .*data/0 differs from its checksum"):
        restored(manager(tmp_path))


def test_training_goes_on_from_the_newest_good_checkpoint(tmp_path):
    runs.train(tmp_path, runs.BASELINE, "--max-update 4 --save-interval-updates 2 --disable-validation")
    flip_a_bit(tmp_path / "checkpoint_last.pt")
    shutil.copy(tmp_path / "checkpoint_1_2.pt", tmp_path / "checkpoint_1_3.pt")
    (tmp_path / "checkpoint_1_4.pt").unlink()
    log = runs.train(tmp_path, runs.BASELINE, "--max-update 5 --disable-validation")
    assert [line["num_updates"] for line in runs.updates(log)] == [3, 4, 5]


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    one, other = manager(tmp_path / "s"), manager(tmp_path / "s")
    with one.locked():
        with user_error("--save-dir .*s: another run writes checkpoints there"), other.locked():
            pass
        with manager(tmp_path / "s", no_save=True).locked():
            pass
    with other.locked():
        pass
    assert os.listdir(tmp_path / "s") == []


@pytest.mark.parametrize("before", ["absent", "empty", "used"])
def test_a_run_that_fails_at_once_leaves_no_folder_of_its_own(tmp_path, before):
    folder = tmp_path / "s"
    if before != "absent":
        folder.mkdir()
    with pytest.raises(KeyError), manager(folder).locked():
        if before == "used":
            (folder / "checkpoint_last.pt").touch()
        raise KeyError
    assert folder.exists() == (before != "absent")


def test_a_killed_run_leaves_no_lock(tmp_path):
    receive, send = FORK.Pipe(duplex=False)

    def hold():
        with manager(tmp_path).locked():
            send.send("locked")
            time.sleep(runs.TIMEOUT)

    process = FORK.Process(target=hold)
    process.start()
    assert receive.recv() == "locked"
    with pytest.raises(UserError, match="another run"), manager(tmp_path).locked():
        pass
    process.kill()
    process.join()
    with manager(tmp_path).locked():
        pass


def test_training_holds_the_lock_of_its_folder_and_frees_it(tmp_path):
    with manager(tmp_path).locked(), user_error("--save-dir .*: another run writes"):
        runs.train(tmp_path, runs.BASELINE, "--max-update 1 --disable-validation")
    runs.train(tmp_path, runs.BASELINE, "--max-update 1 --disable-validation")
