"""Recorders: each update is there once, however often a run was interrupted."""

from __future__ import annotations

import json
import logging
import resource
import sys
import threading
import time

import pytest
import runs
from mistakes import user_error

from fairseq.config.settings import CommonConfig
from fairseq.logging.recorders import log_file, recording, tensorboard


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert len({step for step, _ in found}) == len(found), "a step is there once"
    return dict(found)


def test_tensorboard_gets_the_figures_of_each_tag_and_each_step_once(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    for after, last in ((0, 6), (4, 8)):  # interrupted after update 6, resumed from 4
        # Files are read in the order of their names, which begin with the second.
        monkeypatch.setattr(time, "time", lambda after=after: 1.7e9 + after)
        with recording(CommonConfig(tensorboard_logdir=str(tmp_path)), after=after) as record:
            for step in range(after + 2, last + 1, 2):
                record({"loss": float(step + after), "num_updates": step, "name": "text"}, "train_inner", step)
            record({"loss": 0.5}, "valid", last)
    assert scalars(tmp_path / "train_inner") == {2: 2, 4: 4, 6: 10, 8: 12}
    assert scalars(tmp_path / "valid")[8] == 0.5


def test_a_run_that_starts_again_replaces_the_steps_of_the_one_before(tmp_path):
    pytest.importorskip("tensorboard")
    for loss in (1.0, 2.0):
        with recording(CommonConfig(tensorboard_logdir=str(tmp_path))) as record:
            for step in (1, 2):
                record({"loss": loss}, "train", step)
    assert scalars(tmp_path / "train") == {1: 2.0, 2: 2.0}


def test_json_lines_are_those_of_the_run_as_it_went_on(tmp_path):
    path = tmp_path / "logs" / "metrics.jsonl"
    for after, steps in ((0, (2, 4, 6)), (4, (6, 8))):
        with recording(CommonConfig(metrics_file=str(path)), after=after) as record:
            for step in steps:
                record({"loss": step + 0.5 * after, "ppl": float("inf")}, "train_inner", step)
                record(None, "train_inner", step)
        with open(path, "a") as file:
            file.write('{"tag": "train_in')  # killed while writing
    with recording(CommonConfig(metrics_file=str(path)), after=8):
        pass
    assert read(path)[-1] == {"tag": "train_inner", "step": 8, "loss": 10.0, "ppl": None}
    assert [(line["step"], line["loss"]) for line in read(path)] == [(2, 2.0), (4, 4.0), (6, 8.0), (8, 10.0)]


def test_run_and_its_resumption_are_recorded(tmp_path):
    flags = [runs.BASELINE, f"--metrics-file {tmp_path}/metrics.jsonl --no-epoch-checkpoints --log-format none"]
    runs.train(tmp_path / "run", flags, "--max-update 2")
    runs.train(tmp_path / "run", flags, "--max-update 4")
    found = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in found if line["tag"] == "train_inner"] == [1, 2, 3, 4]
    assert [line["step"] for line in found if line["tag"] == "test"] == [2, 4]
    assert all(line["loss"] > 0 for line in found)


def test_nothing_is_recorded_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with recording(None) as record:
        record({"loss": 7.0}, "train", 1)
    assert list(tmp_path.iterdir()) == []


def test_missing_tensorboard_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    common = CommonConfig(tensorboard_logdir=str(tmp_path))
    with user_error(r"--tensorboard-logdir: .*pip install tensorboard"), recording(common):
        pass


def test_places_that_cannot_be_written_are_user_errors(tmp_path):
    def fails(message, **settings):
        with user_error(message), recording(CommonConfig(**settings)):
            pass

    (tmp_path / "file").write_text("a text\n")
    fails("--metrics-file .*: not a file of figures", metrics_file=str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "a text\n"
    fails("--metrics-file .*cannot be written", metrics_file=str(tmp_path / "file" / "metrics"))
    pytest.importorskip("tensorboard")
    fails("--tensorboard-logdir .*cannot be made", tensorboard_logdir=str(tmp_path / "file" / "logs"))
    # As in a folder that only another user can write, or on a full disk.
    (tmp_path / "valid").write_text("in place of a folder\n")
    with (
        user_error("--tensorboard-logdir .*cannot be written .*; choose another folder"),
        tensorboard(str(tmp_path)) as write,
    ):
        write({"loss": 1.0}, "valid", 1)


def test_a_log_file_on_a_full_disk_is_a_user_error() -> None:
    with user_error("--log-file /dev/full: cannot be written .No space left on device"), log_file("/dev/full"):
        logging.getLogger().error("a message")


def test_tensorboard_on_a_full_disk_is_a_user_error_without_a_traceback_of_its_thread(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    tracebacks: list[threading.ExceptHookArgs] = []
    before = threading.enumerate()
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with (
            user_error(f"^--tensorboard-logdir {tmp_path}: cannot be written .File too large.; choose"),
            tensorboard(str(tmp_path)) as write,
        ):
            for step in range(200):
                write({"loss": 1.0}, "train_inner", step)
                if step == 100:
                    write({"loss": 1.0}, "valid", step)
            write({"loss": 1.0}, "train", 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not tracebacks

    # Of other threads they are shown as ever.
    with tensorboard(str(tmp_path / "other")):
        thread = threading.Thread(target=open, args=(tmp_path / "nowhere",))
        thread.start()
        thread.join()
    assert len(tracebacks) == 1 and threading.enumerate() == before


def test_a_log_is_added_to_a_text_only_and_an_empty_one_is_not_left(tmp_path):
    runs.train(tmp_path / "run", runs.SHORT, "--disable-validation")
    for path in (tmp_path / "run" / "checkpoint_last.pt", runs.DATA / "valid.idx"):
        before = path.read_bytes()
        message = f"^--log-file {path}: is not a text, and is not added to; choose another file"
        with user_error(message), log_file(str(path)):
            pass
        assert path.read_bytes() == before
    (tmp_path / "log").write_text("of the script\n")
    for name in ("log", "new"):
        with log_file(str(tmp_path / name)):
            logging.getLogger().error("a message")
        with log_file(str(tmp_path / f"empty {name}")):
            pass
    assert (tmp_path / "log").read_text().startswith("of the script\n")
    assert all((tmp_path / name).read_text().endswith("| ERROR | a message\n") for name in ("log", "new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "new", "run"]
