"""Damaged, unfinished and ill-typed checkpoints are found before anything of them is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections import namedtuple

import pytest
import runs
import torch
from mistakes import user_error
from states import restored

from fairseq.checkpoint import CheckpointManager, describe_mismatch, load, save
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


def test_a_flipped_bit_in_the_weights_is_reported(tmp_path):
    path = tmp_path / "c.pt"
    save(path, a_state())
    flip_a_bit(path)
    with pytest.raises(UserError, match="c.pt: cannot be read as a checkpoint: truncated or damaged .*data/0"):
        load(path)


def test_records_that_expand_are_rejected(tmp_path):
    save(tmp_path / "c.pt", a_state())
    with (
        zipfile.ZipFile(tmp_path / "c.pt") as source,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for item in source.infolist():
            target.writestr(item.filename, source.read(item))
    with pytest.raises(UserError, match="bomb.pt: rejected: its records expand"):
        load(tmp_path / "bomb.pt")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_that_are_not_finite_are_refused(tmp_path, value, dtype):
    weights = torch.ones(100, dtype=dtype)
    weights[37] = value
    save(tmp_path / "c.pt", a_state(model={"fine": torch.ones(2), "empty": torch.ones(0), "bad": weights}))
    with pytest.raises(UserError, match="c.pt: weights of bad are infinite or NaN"):
        load(tmp_path / "c.pt")


def test_a_placeholder_that_fairseq_left_uninitialised_may_hold_anything(tmp_path):
    save(tmp_path / "c.pt", a_state(model={"decoder.embed_positions._float_tensor": torch.tensor([float("nan")])}))
    assert load(tmp_path / "c.pt")["model"].keys() == {"decoder.embed_positions._float_tensor"}


@pytest.mark.parametrize("place", ["model", "last_optimizer_state", "extra_state"])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(10**7, 10**6),
        torch.arange(9.0).as_strided((5, 5), (1, 1)),
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
    ],
    ids=["expanded", "overlapping", "sparse", "meta"],
)
def test_tensors_that_the_file_does_not_hold_are_refused(tmp_path, tensor, place):
    state = a_state(last_optimizer_state={}, extra_state={"train_iterator": {}})
    state[place]["x"] = [tensor] if place == "extra_state" else tensor
    torch.save(state, tmp_path / "c.pt")
    name = f"{place}.x.0" if place == "extra_state" else f"{place}.x"
    with pytest.raises(UserError, match=f"c.pt: {name} is not a dense tensor that the file holds"):
        load(tmp_path / "c.pt")


def test_a_list_that_contains_itself_is_rejected(tmp_path):
    itself = []
    itself.append(itself)
    torch.save(a_state(extra_state={"carried": {"x": itself}}), tmp_path / "c.pt")
    with pytest.raises(UserError, match=r"c.pt: not a checkpoint \('extra_state.carried.x.0' is a value that contains"):
        load(tmp_path / "c.pt")


@pytest.mark.parametrize(
    "double, repeated",
    [
        (lambda x: [x, x], r"its \d+ values repeat to more than 2\^5\d"),
        (lambda x: (x, x), "its values repeat to more than 1,048,576 in one tuple"),
        (lambda x: {"a": x, "b": x}, r"its \d+ values repeat to more than 2\^5\d"),
        (lambda x: Namespace(a=x, b=x), r"its \d+ values repeat to more than 2\^5\d"),
    ],
)
def test_values_that_double_at_each_level_are_rejected_in_linear_time(tmp_path, double, repeated):
    value = "x"
    for _ in range(50):
        value = double(value)
    torch.save(a_state(args={"new": value}), tmp_path / "c.pt")
    with pytest.raises(UserError, match=rf"c.pt: not a checkpoint \({repeated}\)"):
        load(tmp_path / "c.pt")


def test_a_pair_that_many_parameters_share_is_read(tmp_path):
    pair = (0.9, 0.98)
    torch.save(a_state(extra_state={"carried": {"x": [pair] * 200_000}}), tmp_path / "c.pt")
    assert load(tmp_path / "c.pt")["model"]


@pytest.mark.parametrize("value, reason", [(10**400, "a number of 1,329 bits"), ([[[[]]]], None)])
def test_whole_numbers_and_depth_have_bounds(tmp_path, value, reason):
    for _ in range(0 if reason else 60):
        value = [value]
    torch.save(a_state(extra_state={"carried": {"x": value}}), tmp_path / "c.pt")
    with pytest.raises(UserError, match=reason or "nested deeper than 64 levels"):
        load(tmp_path / "c.pt")


def test_parameters_without_text_as_names_are_refused(tmp_path):
    torch.save({"args": {}, "model": {5: torch.ones(1)}}, tmp_path / "c.pt")
    with pytest.raises(UserError, match="c.pt: not a checkpoint"):
        load(tmp_path / "c.pt")


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
    with pytest.raises(UserError, match="checkpoint_last.pt: cannot be read"):
        restored(manager(tmp_path))


def test_training_goes_on_from_the_newest_good_checkpoint(tmp_path):
    runs.train(tmp_path, runs.BASELINE, "--max-update 4 --save-interval-updates 2 --disable-validation")
    flip_a_bit(tmp_path / "checkpoint_last.pt")
    shutil.copy(tmp_path / "checkpoint_1_2.pt", tmp_path / "checkpoint_1_3.pt")
    (tmp_path / "checkpoint_1_4.pt").unlink()
    log = runs.train(tmp_path, runs.BASELINE, "--max-update 5 --disable-validation")
    assert [line["num_updates"] for line in runs.updates(log)] == [3, 4, 5]


def test_saving_checks_for_room_and_leaves_what_was_there(tmp_path, monkeypatch):
    save(tmp_path / "c.pt", a_state())
    before = (tmp_path / "c.pt").read_bytes()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 1_100_000))
    save(tmp_path / "small.pt", a_state())
    with pytest.raises(UserError, match=r"c.pt: cannot be written: needs 9 MiB, 1 MiB are free"):
        save(tmp_path / "c.pt", a_state(model={"w": torch.zeros(2_000_000), "tied": torch.zeros(1)}))
    assert (tmp_path / "c.pt").read_bytes() == before and len(os.listdir(tmp_path)) == 2


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


def test_a_failed_run_leaves_what_it_saved(tmp_path):
    with pytest.raises(KeyError), manager(tmp_path / "s").locked():
        (tmp_path / "s" / "checkpoint_last.pt").touch()
        raise KeyError
    assert (tmp_path / "s" / "checkpoint_last.pt").exists()


def test_a_killed_run_leaves_no_lock(tmp_path):
    code = (
        "import sys; from fairseq.checkpoint import CheckpointManager\n"
        "from fairseq.config.settings import CheckpointConfig\n"
        "with CheckpointManager(CheckpointConfig(save_dir=sys.argv[1])).locked():\n"
        "    print('locked', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=runs.environment(),
    )
    assert process.stdout.readline() == b"locked\n"
    with pytest.raises(UserError, match="another run"), manager(tmp_path).locked():
        pass
    process.kill()
    process.communicate()
    with manager(tmp_path).locked():
        pass


GROUP = {"params": [0], "lr": 0.1}
PLACES = {
    "optimizer_history": [1, "text", {"a": 1}, [1], ["x"]],
    "optimizer_history.num_updates": ["text", None, 1.5, -1, [1], True],
    "optimizer_history.criterion_name": [1, None, [1]],
    "optimizer_history.optimizer_name": [1, None, ["x"]],
    "optimizer_history.lr_scheduler_state": [1, "text", [1], {1: 2}],
    "last_optimizer_state": [1, "text", [1]],
    "last_optimizer_state.param_groups": [1, None, "text", [], {}, [1], [{}], [{"params": 1}], [{"params": [1.5]}]],
    "last_optimizer_state.state": [1, None, "text", [1], {0: 1}, {0: {1: 2}}, {0: {"step": "x"}}],
    "extra_state": [1, "text", [1]],
    "extra_state.train_iterator": [1, "text", [1], {"epoch": 0}, {"epoch": "1"}, {"iterations_in_epoch": None}],
    "extra_state.previous_training_time": ["text", [1], {}, torch.ones(2)],
    "extra_state.best": ["text", [1], {}],
    "extra_state.without_improvement": ["text", None, -1],
    "extra_state.loss_scaler": [1, "text", {"scale": 0}, {"scale": "x"}, {"updates": 1.5}],
    "extra_state.average": [1, {"count": "x"}, {"mean": 1}],
    "extra_state.random": [1, "text", {}],
    "args": [1, "text", [1], {1: 2}],
}


@pytest.mark.parametrize("place", PLACES)
def test_wrong_types_are_refused_in_one_line(tmp_path, place):
    for wrong in PLACES[place]:
        state = a_state(
            optimizer_history=[{"num_updates": 1}],
            last_optimizer_state={"state": {}, "param_groups": [dict(GROUP)]},
            extra_state={"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
        )
        part, _, field = place.partition(".")
        holder = state if not field else state[part][-1] if isinstance(state[part], list) else state[part]
        holder[field or part] = wrong
        save(tmp_path / "c.pt", state)
        with pytest.raises(UserError, match="c.pt: not a checkpoint") as error:
            load(tmp_path / "c.pt")
        assert "\n" not in str(error.value)


def test_training_holds_the_lock_of_its_folder_and_frees_it(tmp_path):
    with manager(tmp_path).locked(), user_error("--save-dir .*: another run writes"):
        runs.train(tmp_path, runs.BASELINE, "--max-update 1 --disable-validation")
    runs.train(tmp_path, runs.BASELINE, "--max-update 1 --disable-validation")


def test_a_folder_under_the_name_of_a_checkpoint_is_one_line(tmp_path):
    (tmp_path / "checkpoint_best.pt").mkdir()
    manager = CheckpointManager(CheckpointConfig(save_dir=str(tmp_path)))
    with pytest.raises(UserError, match="checkpoint_best.pt: cannot be written .Is a directory"):
        manager.save(a_state(), [tmp_path / "checkpoint_last.pt", tmp_path / "checkpoint_best.pt"])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_best.pt"]
