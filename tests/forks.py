"""Jobs whose ranks are forked from one process that has imported everything: a start costs no
imports.

``python forks.py CASES.json`` runs the :class:`Case` of each name into a folder of that name beside
the file. Logs go to ``NAME.log``, exit codes of the ranks of every start to ``NAME.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import kills
import runs
import torch
import warm

from fairseq_cli import train
from fairseq_cli.common import get_training_parser


@dataclass(frozen=True)
class Case:
    """A job that is killed and started again until it ends.

    Attributes:
        words: the command line for each number of processes, without ``--save-dir``.
        sizes: processes of the starts, in turn.
        kills: starts of which one rank is killed; the next one runs to its end.
    """

    words: dict[int, list[str]]
    sizes: list[int]
    kills: int = 0


class Ranks:
    """The processes of a job, each started with *words* and torch's variables; output goes to the
    file *log*."""

    def __init__(self, words: list[str], size: int, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self.pids = [_fork(rank, words, log) for rank in range(size)]
        self.codes: dict[int, int] = {}

    def poll(self) -> int | None:
        """The exit code of the first process found that has ended; None while all run."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return next(iter(self.codes.values()), None)

    def end(self, seconds: float = runs.TIMEOUT) -> list[int]:
        """Wait until every process has ended of its own accord; return their exit codes.

        Raises:
            TimeoutError: some have not after *seconds*; they are killed.
        """
        limit = time.monotonic() + seconds
        while len(self.codes) < len(self.pids):
            self.poll()
            if time.monotonic() > limit:
                left = [rank for rank in range(len(self.pids)) if rank not in self.codes]
                self.kill(left)
                raise TimeoutError(f"ranks {left} of {len(self.pids)} still run; the others: {self.codes}")
            time.sleep(0.005)
        return [self.codes[rank] for rank in range(len(self.pids))]

    def kill(self, ranks: list[int]) -> None:
        """Send SIGKILL to *ranks*."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGKILL)


def run_all(folder: Path, cases: dict[str, Case]) -> dict[str, list[list[int]]]:
    """Run *cases* in *folder*; return the exit codes of the ranks of every start."""
    file = folder / "cases.json"
    file.write_text(json.dumps({name: asdict(case) for name, case in cases.items()}))
    with warm.start(__file__, file) as process:
        _, stderr = process.communicate()
    logs = "".join(log.read_text()[-2000:] for log in folder.glob("*.log"))
    assert process.returncode == 0, stderr[-2000:] + logs
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in cases}


def _fork(rank: int, words: list[str], log: Path) -> int:
    pid = os.fork()
    return pid or _run(rank, words, log)


def _run(rank: int, words: list[str], log: Path) -> NoReturn:
    """Train as *rank* in this process, which ends with it, as if it had been started with
    *words*."""
    code = 1
    os.environ["RANK"] = str(rank)
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        sys.argv = ["train.py", *words]
        train.cli_main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _run_case(folder: Path, name: str, case: Case) -> None:
    log, last, chance = folder / f"{name}.log", folder / name / "checkpoint_last.pt", kills.chance()
    codes = []
    for start in range(case.kills + 1):
        size = case.sizes[start % len(case.sizes)]
        ranks = Ranks([*case.words[size], "--save-dir", str(folder / name)], size, log)
        if start < case.kills:
            early = start % 5 == 4
            if early:
                time.sleep(0.5 * chance.random())  # anywhere after its start
            else:
                kills.let_it_run(last, ranks, chance, early=False)
            assert ranks.poll() is None, f"{ranks.codes}: it was to be killed before its end: give it more updates"
            # Those that wait for a process to join do so for minutes; agents end them.
            ranks.kill(list(range(size)) if early else [chance.randrange(size)])
        codes.append(ranks.end())
    (folder / f"{name}.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    get_training_parser()  # imports every part
    given = Path(sys.argv[1])
    for name, fields in json.loads(given.read_text()).items():
        words = {int(size): flags for size, flags in fields["words"].items()}
        _run_case(given.parent, name, Case(words, fields["sizes"], fields["kills"]))
