"""A run that is killed at any instant goes on when it is started again, and ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import runs

KILLS = int(os.environ.get("FAIRSEQ_TEST_KILLS", "3"))
FLAGS = [
    runs.SHORTFORMER,
    f"--stages 16:{40 * KILLS},32:{60 * KILLS} --save-interval-updates 5",
    "--keep-interval-updates 2 --keep-last-epochs 1",
    "--dropout 0.2 --attention-dropout 0.1 --optimizer adam --lr 0.002",
    "--lr-scheduler cosine --max-lr 0.01 --warmup-updates 20 --lr-period-updates 500",
]


def start(folder, log):
    words = [sys.executable, str(runs.ROOT / "train.py"), *runs.words(runs.DATA, "--save-dir", folder, FLAGS)]
    return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=runs.environment())


def wait_for(path, process, seconds=60):
    """Wait until the checkpoint at *path* changes, or the process ends."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.stat().st_mtime_ns != before:
            return
        time.sleep(0.005)


def test_run_killed_at_random_instants_ends_bit_identical_to_the_uninterrupted_one(tmp_path):
    assert start(tmp_path / "whole", subprocess.DEVNULL).wait() == 0
    whole = runs.content(tmp_path / "whole" / "checkpoint_last.pt")
    chance = random.Random(os.environ.get("FAIRSEQ_TEST_SEED", "1"))
    folder = tmp_path / "killed"
    killed = 0
    with open(tmp_path / "log", "wb") as log:
        while killed < KILLS:
            process = start(folder, log)
            if killed % 4 != 3:  # else at any instant since its start: importing, reading data, restoring
                wait_for(folder / "checkpoint_last.pt", process)
            time.sleep(chance.random() * (2.5 if killed % 4 == 3 else 0.6 * 3 / max(KILLS, 3)))
            assert process.poll() is None, "it was to be killed before its end: give it more updates"
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            killed += 1
        assert start(folder, log).wait() == 0
    assert runs.difference(whole, runs.content(folder / "checkpoint_last.pt")) is None
    assert not list(folder.glob(".*")), "nothing half-written is left behind"
    assert (tmp_path / "log").read_text().count("restored") >= killed - killed // 4 - 1
    assert {p.name for p in folder.iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}


def test_terminated_run_keeps_its_last_checkpoint_and_says_nothing(tmp_path):
    with open(tmp_path / "log", "wb") as log:
        process = start(tmp_path / "run", log)
        wait_for(tmp_path / "run" / "checkpoint_last.pt", process)
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert runs.content(tmp_path / "run" / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] % 5 == 0


@pytest.mark.parametrize("leftover", [".checkpoint_last.pt.0badcafe.tmp"])
def test_half_written_files_of_a_killed_run_are_removed(tmp_path, leftover):
    (tmp_path / leftover).write_bytes(b"half a checkpoint")
    runs.train(tmp_path, runs.BASELINE, "--max-update 1")
    assert not (tmp_path / leftover).exists()
