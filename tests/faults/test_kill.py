"""A run that is killed at any instant goes on when it is started again, and ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import runs

KILLS = int(os.environ.get("FAIRSEQ_TEST_KILLS", "3"))
FLAGS = [
    runs.SHORTFORMER,
    f"--stages 16:{50 * KILLS},32:{80 * KILLS} --save-interval-updates 8 --max-tokens-valid 800",
    "--keep-interval-updates 2 --keep-last-epochs 1",
    "--dropout 0.2 --attention-dropout 0.1 --optimizer adam --lr 0.002",
    "--lr-scheduler cosine --max-lr 0.01 --warmup-updates 20 --lr-period-updates 500",
]


def start(folder, log):
    words = [sys.executable, str(runs.ROOT / "train.py"), *runs.words(runs.DATA, "--save-dir", folder, FLAGS)]
    return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=runs.environment())


def wait_for(path, process, seconds=runs.TIMEOUT):
    """Wait until the checkpoint at *path* changes, or the process ends; returns how long it took."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    begin = time.monotonic()
    while process.poll() is None and time.monotonic() < begin + seconds:
        if path.exists() and path.stat().st_mtime_ns != before:
            break
        time.sleep(0.002)
    return time.monotonic() - begin


def let_it_run(path, process, chance, early):
    """Return at a random instant: between two checkpoints, or *early*, wherever the process is after its start."""
    if early:
        time.sleep(1.5 * chance.random())
        return
    interval = [wait_for(path, process) for _ in range(chance.randint(2, 4))][-1]
    time.sleep(interval * chance.random())


def test_run_killed_at_random_instants_ends_bit_identical_to_the_uninterrupted_one(tmp_path):
    runs.train(tmp_path / "whole", FLAGS)
    whole = runs.content(tmp_path / "whole" / "checkpoint_last.pt")
    chance = random.Random(os.environ.get("FAIRSEQ_TEST_SEED", "1"))
    folder = tmp_path / "killed"
    with open(tmp_path / "log", "wb") as log:
        for kill in range(KILLS):
            process = start(folder, log)
            let_it_run(folder / "checkpoint_last.pt", process, chance, early=kill % 4 == 3)
            assert process.poll() is None, "it was to be killed before its end: give it more updates"
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert start(folder, log).wait(runs.TIMEOUT) == 0
    assert runs.difference(whole, runs.content(folder / "checkpoint_last.pt")) is None
    assert {p.name for p in folder.iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}, (
        "nothing is left over"
    )
    assert (tmp_path / "log").read_text().count("restored") >= KILLS - KILLS // 4
