"""Checkpoints: whole at every instant, harmless to load, kept and named as asked."""

from __future__ import annotations

import argparse
import builtins
import errno
import os
import pickle
import re
import subprocess
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from states import a_state

from fairseq.checkpoint import load, save
from fairseq.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden"


def assert_same(left: object, right: object) -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right) and left.dtype == right.dtype
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert type(left) is type(right) and len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right and type(left) is type(right)


def only_line(error: pytest.ExceptionInfo[UserError], path: object) -> str:
    message = str(error.value)
    assert "\n" not in message and str(path) in message
    return message


# Saving


def test_what_is_saved_is_what_is_loaded(tmp_path):
    save(tmp_path / "c.pt", a_state())
    state = load(tmp_path / "c.pt")
    state["extra_state"].pop("train_iterator")  # made from the epoch, as for fairseq's oldest
    for name in ("decoder_normalize_before", "decoder_input_dim", "decoder_output_dim"):
        del state["args"][name]  # as transformer_lm was before 0.12
    assert_same(state, a_state())
    assert os.listdir(tmp_path) == ["c.pt"]


def test_a_saved_file_has_the_permissions_of_any_other(tmp_path):
    save(tmp_path / "c.pt", a_state())
    (tmp_path / "plain").touch()
    assert (tmp_path / "c.pt").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("stage", ["write", "fsync", "replace"])
def test_no_space_left_keeps_the_old_checkpoint(tmp_path, monkeypatch, stage):
    path = tmp_path / "c.pt"
    save(path, a_state(1.0))

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    def half_written(state, file):
        file.write(b"PK\x03\x04 half of a")
        full()

    if stage == "write":
        monkeypatch.setattr(torch, "save", half_written)
    else:
        monkeypatch.setattr(os, stage, full)
    with pytest.raises(UserError, match="No space left on device.*free some space") as error:
        save(path, a_state(2.0))
    only_line(error, path)
    monkeypatch.undo()
    assert_same(load(path)["model"], a_state(1.0)["model"])
    assert os.listdir(tmp_path) == ["c.pt"]


def test_a_bug_while_saving_is_no_user_error_and_leaves_nothing(tmp_path):
    path = tmp_path / "c.pt"
    save(path, a_state(1.0))
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        save(path, {**a_state(2.0), "bad": lambda: None})
    assert_same(load(path)["model"], a_state(1.0)["model"])
    assert os.listdir(tmp_path) == ["c.pt"]


def test_a_missing_folder_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="No such file or directory"):
        save(tmp_path / "nowhere" / "c.pt", a_state())


def run_python(code: str, folder: Path, *args: object) -> subprocess.CompletedProcess[str]:
    (folder / "code.py").write_text(textwrap.dedent(code))
    return warm.command(folder / "code.py", *args)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_system_refusing_a_large_file_keeps_the_old_checkpoint(tmp_path):
    code = """
        import resource, sys, torch
        from fairseq.checkpoint import load, save
        from fairseq.errors import UserError
        state = {"args": {}, "model": {"w": torch.zeros(1000)}}
        save(sys.argv[1], state)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            save(sys.argv[1], {"args": {}, "model": {"w": torch.ones(1_000_000)}})
        except UserError as error:
            print(error)
        assert torch.equal(load(sys.argv[1])["model"]["w"], torch.zeros(1000))
    """
    folder = tmp_path / "saves"
    folder.mkdir()
    done = run_python(code, tmp_path, folder / "c.pt")
    assert done.returncode == 0, done.stderr
    assert "cannot be written (File too large)" in done.stdout
    assert os.listdir(folder) == ["c.pt"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_killed_while_saving_leaves_whole_checkpoints(tmp_path):
    code = """
        import os, random, signal, sys, time, torch
        from pathlib import Path
        from fairseq.checkpoint import CheckpointManager, load
        from fairseq.checkpoint.manager import SavePoint
        from fairseq.config.settings import CheckpointConfig

        random.seed(1)
        epoch, last_file = 0, Path(sys.argv[1]) / "checkpoint_last.pt"
        for trial in range(12):
            child = os.fork()
            if child == 0:
                alone = trial % 2 == 0  # of the files of a save, the last checkpoint
                config = CheckpointConfig(sys.argv[1], keep_last_epochs=2, no_epoch_checkpoints=alone)
                manager = CheckpointManager(config)
                while True:
                    epoch += 1
                    state = {"args": {}, "model": {"w": torch.full((100_000,), float(epoch))}}
                    paths = manager.due(SavePoint(epoch, epoch, end_of_epoch=True, is_best=not alone))
                    manager.save(state, paths)
            while not last_file.exists():
                time.sleep(0.01)
            time.sleep(random.uniform(0.0, 0.08))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            found = {path: load(path)["model"]["w"] for path in Path(sys.argv[1]).glob("*.pt")}
            for weights in found.values():
                assert weights.shape == (100_000,) and (weights == weights[0]).all()
            last = int(found[last_file][0])
            assert last >= epoch, (last, epoch)
            epoch = last
        CheckpointManager(CheckpointConfig(sys.argv[1]))
        print(epoch, sorted(p.name for p in Path(sys.argv[1]).iterdir() if p.suffix == ".tmp"))
    """
    done = run_python(code, tmp_path, tmp_path / "saves")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")


# Loading


@pytest.mark.parametrize("path", [GOLDEN / "language_model/shortformer_stage1.pt", GOLDEN / "roberta/checkpoint.pt"])
def test_the_originals_checkpoints_load(path):
    state = load(path)
    assert isinstance(state["args"], dict) and state["args"]["tokens_per_sample"] in (32, 64)
    assert state["args"]["batch_size_valid"] == (8 if "roberta" in str(path) else None)
    assert "max_sentences_valid" not in state["args"]
    assert state["optimizer_history"][-1]["num_updates"] in (131, 60)
    assert state["extra_state"]["train_iterator"]["epoch"] == 2
    assert all(isinstance(value, torch.Tensor) for value in state["model"].values())


@pytest.mark.parametrize("zipped", [True, False])
def test_numpy_numbers_come_out_as_pythons(tmp_path, zipped):
    path = tmp_path / "c.pt"
    numbers = [np.float64(1.5), np.float32(0.25), np.int64(-3), np.uint8(7), np.bool_(True), np.dtype(">f8").type(2.5)]
    state = {**a_state(), "extra_state": {"numbers": numbers, "order": OrderedDict(a=1), "nothing": None}}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    found = load(path)["extra_state"]["numbers"]
    assert found == [1.5, 0.25, -3, 7, True, 2.5]
    assert [type(x) for x in found] == [float, float, int, int, bool, float]


def test_numpy_objects_do_not_pass_as_numbers(tmp_path):
    scalar = np.float64(1.0).__reduce__()[0]

    class Smuggler:
        def __reduce__(self):
            return scalar, (np.dtype("O"), b"\0" * 8)

    torch.save({**a_state(), "extra_state": {"x": Smuggler()}}, tmp_path / "c.pt")
    with pytest.raises(UserError, match="not a number type"):
        load(tmp_path / "c.pt")


def test_fairseq_08s_pickled_meters_load_as_values(tmp_path, monkeypatch):
    module = type(sys)("fairseq.meters")
    meters = {}
    for name in ("AverageMeter", "TimeMeter", "StopwatchMeter"):
        meters[name] = type(name, (), {"__module__": "fairseq.meters"})
        setattr(module, name, meters[name])
    monkeypatch.setitem(sys.modules, "fairseq.meters", module)
    stopwatch, average = meters["StopwatchMeter"](), meters["AverageMeter"]()
    stopwatch.sum, stopwatch.n, average.val = 12.5, 3, np.float32(2.0)
    extra = {"train_meters": OrderedDict(train_wall=stopwatch, loss=average), "epoch": 3, "batch_offset": 5}
    state = {**a_state(), "args": argparse.Namespace(max_sentences=4), "extra_state": extra}
    torch.save(state, tmp_path / "c.pt", _use_new_zipfile_serialization=False)
    monkeypatch.undo()
    found = load(tmp_path / "c.pt")
    assert found["args"] == {"batch_size": 4}
    assert found["extra_state"]["previous_training_time"] == 12.5 and "train_meters" not in found["extra_state"]
    assert found["extra_state"]["train_iterator"] == {"epoch": 3, "iterations_in_epoch": 5}


class Reduced:
    """Pickles as a call of *function* on *arguments*."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def hostile_objects(marker: Path) -> dict[str, tuple[object, str]]:
    return {
        "os.system": (Reduced(os.system, f"touch {marker}"), "posix.system"),
        "eval": (Reduced(builtins.eval, f"open({str(marker)!r}, 'w')"), "eval"),
        "exec": (Reduced(builtins.exec, f"open({str(marker)!r}, 'w')"), "exec"),
        "getattr": (Reduced(getattr, "x", "upper"), "getattr"),
        "popen": (Reduced(subprocess.Popen, ["touch", str(marker)]), r"(commands|subprocess)\.Popen"),
        "torch.load": (Reduced(torch.load, str(marker)), "torch.serialization.load"),
        "path": (marker, r"pathlib.*Path"),
    }


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize("place", ["model", "args", "whole"])
@pytest.mark.parametrize("kind", sorted(hostile_objects(Path("x"))))
def test_hostile_pickles_are_refused_by_name_and_run_nothing(tmp_path, kind, place, form):
    marker, path = tmp_path / "marker", tmp_path / "c.pt"
    weapon, name = hostile_objects(marker)[kind]
    state = weapon if place == "whole" else {**a_state(), place: weapon}
    if form == "pickle":
        path.write_bytes(pickle.dumps(weapon if place == "whole" else {"model": {}, place: weapon}, protocol=2))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(UserError) as error:
        load(path)
    assert re.search(rf"rejected: the pickle contains {name}, .*nothing was executed", only_line(error, path))
    assert not marker.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_cut_anywhere_is_a_user_error(tmp_path, zipped):
    whole, path = tmp_path / "whole.pt", tmp_path / "c.pt"
    torch.save(a_state(), whole, _use_new_zipfile_serialization=zipped)
    content = whole.read_bytes()
    for length in [1, 2, 3, 4, 5, 10, *range(50, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:length])
        # Half a name is an unknown name; a header may already claim tensors that the file no longer
        # holds.
        with pytest.raises(UserError, match="truncated|rejected|larger than the file") as error:
            load(path)
        only_line(error, path)


def test_files_that_are_no_checkpoints_are_user_errors(tmp_path):
    path = tmp_path / "c.pt"
    with pytest.raises(UserError, match="file not found"):
        load(path)
    with pytest.raises(UserError, match="is a folder"):
        load(tmp_path)
    path.touch()
    with pytest.raises(UserError, match="is empty"):
        load(path)
    torch.save({"model": {"w": torch.ones(2)}, "args": {}}, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="is truncated: its end is missing; copy it again"):
        load(path)
    for content in (b"text\n" * 100, bytes(range(256)) * 10):
        path.write_bytes(content)
        with pytest.raises(UserError, match="cannot be read as a checkpoint"):
            load(path)
    for state in ({"w": torch.ones(2)}, [1, 2], {"model": 3, "args": {}}, {"model": {"w": 3}, "args": {}}):
        torch.save(state, path)
        with pytest.raises(UserError, match="holds no 'model'"):
            load(path)
    torch.save({"model": {}}, path)
    with pytest.raises(UserError, match="holds no 'args'"):
        load(path)
    torch.save({"model": {}, "args": {}, "extra_state": 5}, path)
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        load(path)
