"""A run that is killed at any instant goes on when it is started again, and ends as if nothing had
happened."""

from __future__ import annotations

import signal
import subprocess

import kills
import runs
import warm

KILLS = kills.KILLS
FLAGS = [
    runs.SHORTFORMER,
    f"--stages 16:{24 * KILLS},32:{40 * KILLS} --save-interval-updates 8 --max-tokens-valid 800",
    "--keep-interval-updates 2 --keep-last-epochs 1 --save-interval-tokens 3K",
    "--dropout 0.2 --attention-dropout 0.1 --optimizer adam --lr 0.002",
    "--lr-scheduler cosine --max-lr 0.01 --warmup-updates 20 --lr-period-updates 500",
]


def start(folder, log):
    return warm.start("train.py", runs.DATA, "--save-dir", folder, FLAGS, stdout=log, stderr=subprocess.STDOUT)


def test_run_killed_at_random_instants_ends_bit_identical_to_the_uninterrupted_one(tmp_path):
    runs.train(tmp_path / "whole", FLAGS)
    whole = runs.content(tmp_path / "whole" / "checkpoint_last.pt")
    chance = kills.chance()
    folder = tmp_path / "killed"
    with open(tmp_path / "log", "wb") as log:
        for kill in range(KILLS):
            process = start(folder, log)
            kills.let_it_run(folder / "checkpoint_last.pt", process, chance, early=kill % 4 == 3)
            assert process.poll() is None, "it was to be killed before its end: give it more updates"
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert start(folder, log).wait(runs.TIMEOUT) == 0
    assert runs.difference(whole, runs.content(folder / "checkpoint_last.pt")) is None
    milestones = sorted((tmp_path / "whole").glob("checkpoint_tokens_*.pt"))
    assert milestones
    for path in milestones:
        assert runs.difference(runs.content(path), runs.content(folder / path.name)) is None, path.name
    assert {p.name for p in folder.iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}, (
        "nothing is left over"
    )
    assert (tmp_path / "log").read_text().count("restored") >= KILLS - KILLS // 4
