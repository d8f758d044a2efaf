"""Any rank of a job may be killed at any instant: torchrun starts all again, and the result is
bit-identical."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import kills
import pytest
import runs
import warm

KILLS = kills.KILLS
FLAGS = [
    runs.BASELINE,
    runs.DROPOUT,
    f"--max-update {50 * KILLS} --save-interval-updates 4 --keep-interval-updates 2 --keep-last-epochs 1",
    "--optimizer adam --lr 0.002 --disable-validation --log-interval 1000",
]


def test_ranks_killed_at_random_instants_under_torchrun_end_bit_identical(tmp_path):
    if not Path("/proc/self/task").exists():
        pytest.skip("the ranks are found in /proc")
    whole = warm.command("train.py", runs.DATA, "--save-dir", tmp_path / "whole", FLAGS, "--distributed-world-size 2")
    assert whole.returncode == 0, whole.stderr[-2000:]
    folder, chance = tmp_path / "killed", kills.chance()
    words = [f"--max-restarts={KILLS}", runs.ROOT / "train.py", runs.DATA, "--save-dir", folder, FLAGS]
    with (
        open(tmp_path / "log", "wb") as log,
        warm.torchrun(tmp_path, *words, stdout=log, stderr=subprocess.STDOUT) as job,
    ):
        ranks: list[int] = []
        for _ in range(KILLS):
            ranks = kills.wait_for_children(job, "train.py", 2, besides=ranks)
            kills.let_it_run(folder / "checkpoint_last.pt", job, chance, early=False)
            assert job.poll() is None, (tmp_path / "log").read_text()[-3000:]
            os.kill(chance.choice(ranks), warm.KILL)
        assert job.wait(runs.TIMEOUT) == 0, (tmp_path / "log").read_text()[-3000:]
    states = [runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "killed")]
    assert runs.difference(*states) is None
    assert (tmp_path / "log").read_text().count("restored") == KILLS, "each start goes on from the last checkpoint"
