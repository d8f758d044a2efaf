"""The batch script of examples/slurm prints a command that the parser takes, and queues the job
again when stopped."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import runs

from fairseq.config import options
from fairseq_cli.common import get_training_parser

SCRIPT = runs.ROOT / "examples" / "slurm" / "train.sbatch"


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        ["bash", SCRIPT, *words], env=environment, capture_output=True, text=True, timeout=runs.TIMEOUT
    )


def test_dry_run_prints_a_command_that_is_understood() -> None:
    result = run("my data", "--lr", "0.1", "--max-tokens", "64", DRY_RUN="1", PYTHON="python")
    before, _, flags = result.stdout.partition("-m fairseq_cli.train ")
    assert before == "srun --kill-on-bad-exit=1 python "
    args = options.parse_args_and_arch(get_training_parser(), shlex.split(flags))
    assert (args.data, args.lr) == ("my data", [0.1])


def test_the_readmes_jobs_of_two_stages_are_understood() -> None:
    readme = (SCRIPT.parent / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    jobs = re.findall(r"sbatch .*train\.sbatch (data-bin/wikitext-103 [^)\n]*)", readme)
    whole, first, second = (
        options.parse_args_and_arch(get_training_parser(), shlex.split(job.replace("…", ""))) for job in jobs
    )
    assert whole.stages == "128:140100,512:286000"
    assert second.continue_once == f"{first.save_dir}/checkpoint100.pt" and second.restore_file == "checkpoint_last.pt"


@pytest.mark.parametrize(
    ("code", "requeued"), [(0, False), (1, False), (2, False), (130, False), (138, True), (143, True)]
)
def test_job_is_queued_again_only_when_a_cluster_stopped_it(tmp_path: Path, code: int, requeued: bool) -> None:
    for name, content in (("srun", f"exit {code}"), ("scontrol", f'echo "$@" > {tmp_path}/requeued')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{content}\n")
        (tmp_path / name).chmod(0o755)
    result = run("data", PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID="17")
    assert result.returncode == code
    assert (tmp_path / "requeued").exists() is requeued
    assert not requeued or (tmp_path / "requeued").read_text() == "requeue 17\n"


def test_data_is_needed() -> None:
    result = run()
    assert (result.returncode, result.stderr) == (2, "usage: sbatch train.sbatch DATA [FLAG…]\n")
