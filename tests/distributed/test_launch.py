"""Processes of a job start by flags, torchrun or SLURM, and end together, whichever fails or
stops."""

from __future__ import annotations

import socket

import pytest
import runs
import warm
from launches import free_port, srun

from fairseq.errors import UserError

FAILED = "process 1 of 2 failed:\n"
TWO = "--distributed-world-size 2"
BASELINE = [runs.BASELINE, runs.NO_DROPOUT, "--max-update 6 --no-epoch-checkpoints --validate-interval 9"]
HALF = "--max-tokens 32"  # on each of two processes

PLUGIN = """
import torch.distributed as dist
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import AdaptiveCriterionConfig, AdaptiveLoss

@register_criterion("failing", dataclass=AdaptiveCriterionConfig)
class Failing(AdaptiveLoss):
    calls = 0

    def compute_loss(self, model, net_output, sample):
        Failing.calls += 1
        if dist.get_rank() == 1 and Failing.calls == 3:
            raise RuntimeError("the disk is on fire")
        return super().compute_loss(model, net_output, sample)
"""

SCRIPT = """
import os, signal, time
from torch.multiprocessing.spawn import ProcessContext
from fairseq import distributed
from fairseq.config import fields, options
from fairseq.errors import UserError
from fairseq.config.settings import CommonConfig, DistributedConfig

wait = ProcessContext._join_procs_with_timeout
ProcessContext._join_procs_with_timeout = lambda self, seconds: wait(self, seconds / 30)  # torch's 30 s for SIGTERM

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


def test_training_process_that_fails_ends_the_job_with_its_message(tmp_path):
    plugin = tmp_path / "failing_plugin"
    plugin.mkdir()
    (plugin / "__init__.py").write_text(PLUGIN)
    flags = ["--user-dir", plugin, "--criterion failing --no-save --log-format none --ddp-backend no_c10d"]
    result = runs.command("train.py", runs.DATA, BASELINE, HALF, TWO, *flags)
    assert result.returncode == 1
    assert "process 1 of 2 failed:\nTraceback" in result.stderr
    assert result.stderr.rstrip().endswith("RuntimeError: the disk is on fire")


@pytest.mark.parametrize(
    "action, code, message",
    [
        ("os.kill(os.getpid(), 9)", 1, f"{FAILED}killed by signal 9 (SIGKILL)\n"),
        ("os._exit(7)", 1, f"{FAILED}exited with code 7\n"),
        ('raise UserError("--flag: of no use")', 2, "script.py: error: --flag: of no use\n"),
        ('raise MemoryError("out of memory")', 2, "script.py: error: out of host memory: lower --max-tokens"),
        ("os.kill(os.getppid(), 9)", -9, ""),
    ],
    ids=["killed", "gone", "mistake", "memory", "parent-killed"],
)
def test_process_that_ends_early_ends_the_others(tmp_path, action, code, message):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(action=action))
    result = warm.command(script, "--cpu", TWO)  # returns when no process is left that holds its pipes
    assert result.returncode == code
    assert result.stderr.startswith(message) and result.stderr.count("\n") <= 2


@pytest.mark.parametrize("action", ["os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(1e9)"], ids=["stopped", "hung"])
def test_process_that_does_not_respond_ends_the_others_after_the_timeout(tmp_path, action):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(action=action))
    result = warm.command(script, "--cpu", TWO, "--distributed-timeout 3")
    assert result.returncode == 1
    assert result.stderr.startswith("process 0 of 2 failed:\nTraceback")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: a collective did not end in 3 s (--distributed-timeout): another rank hangs")
    assert "py-spy dump -p PID" in last and "NCCL's flight recorder" in last


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


RESTARTED = """
import os
from pathlib import Path
from fairseq import distributed
from fairseq.config import fields, options
from fairseq.config.settings import CommonConfig, DistributedConfig

def main(args, world):
    distributed.end_at_signals()
    killed = Path(__file__).with_name("killed")
    again = world.share(killed.exists())
    if world.rank == 3 and not again:
        killed.touch()
        os.kill(os.getpid(), 9)
    world.barrier()
    os.write(1, f"{world.rank} {world.size} again\\n".encode())

def start(args):
    typed = [fields.typed(part, args) for part in (CommonConfig, DistributedConfig)]
    distributed.run(distributed.Job(main, args, *typed))

if __name__ == "__main__":
    options.run_command(start, lambda: options.Parser("", [CommonConfig, DistributedConfig]))
"""


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


def test_a_process_that_is_killed_lets_those_of_all_nodes_start_again(tmp_path):
    flags = f"--nprocs-per-node 2 --max-restarts 1 --distributed-port {free_port()}"
    lines = finish(*(start(tmp_path, flags, script=RESTARTED, **task) for task in srun(nodes=2)))
    assert lines == [f"{rank} 4 again" for rank in range(4)]


def test_job_of_one_machine_connects_on_the_loopback_only(tmp_path):
    for line in finish(start(tmp_path, TWO)):
        assert line.split()[3] in ("lo", "lo0")


def test_port_in_use_is_refused_in_one_line(tmp_path):
    with (
        socket.socket() as taken,
        pytest.raises(UserError, match=r"--distributed-port \d+: cannot be opened \(Address already in use\)"),
    ):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        runs.train(tmp_path, BASELINE, TWO, f"--distributed-port {taken.getsockname()[1]}")
