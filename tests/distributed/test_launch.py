"""Processes of a job start by flags, torchrun or SLURM, and end together, whichever fails or
stops."""

from __future__ import annotations

import json
import os
import signal

import pytest
import runs
import warm
from launches import free_port, srun

from fairseq.distributed import launch

FAILED = "process 1 of 2 failed:\n"
TWO = "--distributed-world-size 2"
SCRIPT = """
import os, signal, time
from fairseq import distributed
from fairseq.config import fields, options
from fairseq.errors import UserError
from fairseq.config.settings import CommonConfig, DistributedConfig

def main(args, world):
    distributed.end_at_signals()
    world.barrier()
    if world.rank == 1:
        {action}
    world.barrier()

def start(args):
    typed = [fields.typed(part, args) for part in (CommonConfig, DistributedConfig)]
    distributed.run(distributed.Job(main, args, *typed))

if __name__ == "__main__":
    options.run_command(start, lambda: options.Parser("", [CommonConfig, DistributedConfig]))
"""


@pytest.mark.parametrize(
    "action, code, message",
    [
        ("os.kill(os.getpid(), 9)", 1, f"{FAILED}killed by signal 9 (SIGKILL)\n"),
        ('raise UserError("--flag: of no use")', 2, "script.py: error: --flag: of no use\n"),
        ("os.kill(os.getppid(), 9)", -9, ""),
    ],
    ids=["killed", "mistake", "parent-killed"],
)
def test_process_that_ends_early_ends_the_others(tmp_path, action, code, message):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(action=action))
    result = warm.command(script, "--cpu", TWO)  # returns when no process is left that holds its pipes
    assert result.returncode == code
    assert result.stderr.startswith(message) and result.stderr.count("\n") <= 2


# ---- connecting --------------------------------------------------------------------------------

JOB = """
import os
import torch
from fairseq import distributed
from fairseq.config import fields, options
from fairseq.config.settings import CommonConfig, DistributedConfig

def main(args, world):
    total = world.sum(torch.ones(1))
    line = f"{world.rank} {world.size} {int(total)} {os.environ.get('GLOO_SOCKET_IFNAME')}\\n"
    os.write(1, line.encode())  # at once: the processes share a pipe

def start(args):
    typed = [fields.typed(part, args) for part in (CommonConfig, DistributedConfig)]
    distributed.run(distributed.Job(main, args, *typed))

if __name__ == "__main__":
    options.run_command(start, lambda: options.Parser("", [CommonConfig, DistributedConfig]))
"""


def start(folder, *flags, script=JOB, **variables):
    """A command that prints its rank, the number of processes, and how many took part in a
    reduction."""
    path = folder / "job.py"
    if not path.exists():  # another command, which reads it at this moment, would find it empty
        path.write_text(script)
    return warm.start(path, "--cpu", *flags, variables=variables)


def finish(*processes):
    """The lines that all of *processes* printed, sorted."""
    lines = []
    for process in processes:
        out, error = process.communicate(timeout=runs.TIMEOUT)
        assert process.returncode == 0, error
        lines += out.splitlines()
    return sorted(lines)


def test_tasks_that_srun_started_join_each_other(tmp_path):
    port = f"--distributed-port {free_port()}"
    lines = finish(*(start(tmp_path, port, **task) for task in srun(nodes=1)))
    assert [line.split()[:3] for line in lines] == [["0", "2", "2"], ["1", "2", "2"]]


def test_one_task_a_node_starts_the_nodes_processes(tmp_path):
    flags = f"--nprocs-per-node 2 --distributed-port {free_port()}"
    lines = finish(*(start(tmp_path, flags, **task) for task in srun(nodes=2)))
    assert [line.split()[:3] for line in lines] == [[str(rank), "4", "4"] for rank in range(4)]


def test_job_of_one_machine_connects_on_the_loopback_only(tmp_path):
    for line in finish(start(tmp_path, TWO)):
        assert line.split()[3] in ("lo", "lo0")


def test_agent_that_ends_a_rank_finds_its_error_whole(tmp_path, monkeypatch):
    path, dump, received = tmp_path / "error.json", json.dump, []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    handler = signal.signal(signal.SIGTERM, lambda *_: received.append(path.read_text()))

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        dump(*args)

    monkeypatch.setattr(json, "dump", interrupted)
    try:
        launch._tell_agent(ValueError("wrong"))
        assert json.loads(path.read_text())["message"]["message"] == "ValueError: wrong"
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert len(received) == 1, "signals are ignored only while the file is written"
