"""Processes of a job start by flags, torchrun or SLURM, and end together, whichever fails or stops."""

from __future__ import annotations

import socket

import pytest
import runs
import warm

from fairseq.distributed import rendezvous
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
from fairseq import distributed
from fairseq.config import fields, options
from fairseq.errors import UserError
from fairseq.config.settings import CommonConfig, DistributedConfig

def main(args, world):
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
        (
            "os.kill(os.getpid(), signal.SIGSTOP)",
            *(1, f"{FAILED}no heartbeat for 3.5 s: it is stopped, or its machine is unreachable\n"),
        ),
        (
            "time.sleep(1e9)",
            *(1, FAILED + "hangs at {script}:11: the others waited 5 s for it (--distributed-timeout)\n"),
        ),
        ('raise UserError("--flag: of no use")', 2, "script.py: error: --flag: of no use\n"),
        ('raise MemoryError("out of memory")', 2, "script.py: error: out of host memory: lower --max-tokens"),
        ("os.kill(os.getppid(), 9)", -9, ""),
    ],
    ids=["killed", "gone", "stopped", "hung", "mistake", "memory", "parent-killed"],
)
def test_process_that_ends_early_ends_the_others(tmp_path, action, code, message):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(action=action))
    limit = "--distributed-timeout 5" if "5 s" in message else ""
    result = warm.command(script, "--cpu", TWO, limit)  # returns when no process is left that holds its pipes
    assert result.returncode == code
    assert result.stderr.startswith(message.format(script=script)) and result.stderr.count("\n") <= 2


# ---- joining ---------------------------------------------------------------------------------------------------------

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


def start(folder, *flags, **variables):
    """A command that prints its rank, the number of processes, and how many took part in a reduction."""
    script = folder / "job.py"
    script.write_text(JOB)
    return warm.start(script, "--cpu", *flags, variables=variables)


def finish(*processes):
    """The lines that all of *processes* printed, sorted."""
    lines = []
    for process in processes:
        out, error = process.communicate(timeout=runs.TIMEOUT)
        assert process.returncode == 0, error
        lines += out.splitlines()
    return sorted(lines)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def slurm(rank, **variables):
    """The variables of one of two tasks that srun started on one node."""
    return {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        **variables,
    }


def test_tasks_that_srun_started_join_each_other(tmp_path):
    port = f"--distributed-port {free_port()}"
    lines = finish(*(start(tmp_path, port, **slurm(rank)) for rank in (0, 1)))
    assert [line.split()[:3] for line in lines] == [["0", "2", "2"], ["1", "2", "2"]]


def test_one_task_a_node_starts_the_nodes_processes(tmp_path):
    nodes = {"SLURM_STEP_NODELIST": "127.0.0.[1-2]", "SLURM_STEP_NUM_NODES": "2"}
    flags = f"--nprocs-per-node 2 --distributed-port {free_port()}"
    lines = finish(*(start(tmp_path, flags, **slurm(rank, **nodes)) for rank in (0, 1)))
    assert [line.split()[:3] for line in lines] == [[str(rank), "4", "4"] for rank in range(4)]


def test_two_launchers_started_by_hand_are_two_nodes(tmp_path):
    flags = f"--distributed-world-size 4 --nprocs-per-node 2 --distributed-init-method tcp://127.0.0.1:{free_port()}"
    lines = finish(*(start(tmp_path, flags, f"--distributed-rank {rank}") for rank in (0, 2)))
    assert [line.split()[:3] for line in lines] == [[str(rank), "4", "4"] for rank in range(4)]


TOLD = """
import sys
from fairseq.distributed import launch
from fairseq.distributed.plan import Launch
from fairseq.distributed.workers import Failure

if __name__ == "__main__":
    launch._tell_other_nodes(sys.argv[1], Launch(4, 2, 2), Failure(2, 1, "gone"))
"""


@pytest.mark.parametrize("store", ["gone", "stopped"])
def test_node_that_ends_after_the_first_one_does_not_wait_for_its_store(tmp_path, store):
    script = tmp_path / "told.py"
    script.write_text(TOLD)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if store == "stopped":
            silent.listen()
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with warm.start(script, url) as process:  # torch alone would try for ten minutes, or without end
            assert process.wait(runs.TIMEOUT / 4) == 0


def test_job_of_one_machine_listens_and_connects_on_the_loopback_only(tmp_path):
    for line in finish(start(tmp_path, TWO)):
        assert line.split()[3] in ("lo", "lo0")
    store, url = rendezvous.listen(None, timeout=10)
    port = int(url.rpartition(":")[2])
    with socket.socket() as anywhere:  # a listener on every interface would be in the way of this one
        anywhere.bind(("127.0.0.2", port))
    del store


@pytest.mark.parametrize(
    "url, message",
    [
        ("carrier-pigeon://coop", "--distributed-init-method: the rendezvous carrier-pigeon://coop cannot be opened"),
        ("tcp://host", "--distributed-init-method tcp://host: must be tcp://host:port"),
        ("tcp://127.0.0.1:99999", "--distributed-init-method tcp://127.0.0.1:99999: must be tcp://host:port"),
    ],
)
def test_rendezvous_that_cannot_be_opened_is_refused(tmp_path, url, message):
    with pytest.raises(UserError, match=message):
        runs.train(tmp_path, BASELINE, TWO, "--distributed-no-spawn --distributed-init-method", url)


def test_port_in_use_is_refused_in_one_line(tmp_path):
    with (
        socket.socket() as taken,
        pytest.raises(UserError, match="--distributed-port: the rendezvous .* cannot be opened .*in use"),
    ):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        runs.train(tmp_path, BASELINE, TWO, f"--distributed-port {taken.getsockname()[1]}")
