"""Recorders: each update is there once, however often a run was interrupted."""

from __future__ import annotations

import json
import logging
import sys
import time

import pytest
import runs
from mistakes import user_error

from fairseq.config.settings import CommonConfig
from fairseq.logging.recorders import log_file, read_entries, recording


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


def test_entries_that_a_resumed_run_wrote_again_are_read_once_and_no_line_is_lost(tmp_path):
    path = tmp_path / "logs" / "metrics.jsonl"
    for after, steps in ((0, (2, 4, 6, 7)), (4, (6, 8))):
        with recording(CommonConfig(metrics_file=str(path)), after=after) as record:
            for step in steps:
                record({"loss": step + 0.5 * after, "ppl": float("inf")}, "train_inner", step)
                record(None, "train_inner", step)
                record({"loss": float(after)}, "valid", step)
        with open(path, "a") as file:
            file.write('{"tag": "train_in')  # killed while writing
    with recording(CommonConfig(metrics_file=str(path)), after=8):
        pass
    assert len(path.read_text().splitlines()) == 12
    entries = read_entries(path.read_bytes() + b'{"tag": "tr')
    found = [(entry["tag"], entry["step"], entry["loss"]) for entry in entries]
    of_training = [(2, 2.0), (4, 4.0), (6, 8.0), (8, 10.0)]
    assert [each for each in found if each[0] == "train_inner"] == [("train_inner", *each) for each in of_training]
    assert [each for each in found if each[0] == "valid"] == [
        ("valid", step, 0.0 + 4 * (step > 4)) for step in (2, 4, 6, 8)
    ]
    assert entries[0]["ppl"] is None


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
    fails("--metrics-file .*: not a file of metrics", metrics_file=str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "a text\n"
    fails("--metrics-file .*cannot be written", metrics_file=str(tmp_path / "file" / "metrics"))
    pytest.importorskip("tensorboard")
    fails("--tensorboard-logdir .*cannot be written", tensorboard_logdir=str(tmp_path / "file" / "logs"))


def test_a_log_is_added_to_a_text_only(tmp_path):
    runs.train(tmp_path / "run", runs.SHORT, "--disable-validation")
    for path in (tmp_path / "run" / "checkpoint_last.pt", runs.DATA / "valid.idx"):
        before = path.read_bytes()
        message = f"^--log-file {path}: binary file, refusing to append; choose another file"
        with user_error(message), log_file(str(path)):
            pass
        assert path.read_bytes() == before
    (tmp_path / "log").write_text("of the script\n")
    for name in ("log", "new"):
        with log_file(str(tmp_path / name)):
            logging.getLogger().error("a message")
    assert (tmp_path / "log").read_text().startswith("of the script\n")
    assert all((tmp_path / name).read_text().endswith("| ERROR | a message\n") for name in ("log", "new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "new", "run"]
