"""Several training runs, one after another, in one job of several processes: starting a job costs
seconds.

``python jobs.py CASES.json FLAGS…`` reads {name: words of a command line}; FLAGS say how processes
start. The log of run NAME goes to ``NAME.jsonl`` beside the file, and to ``NAME.error`` the error
that ended it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import runs
import warm

from fairseq import distributed
from fairseq.config import fields, options
from fairseq.config.settings import CommonConfig, DistributedConfig, training_settings
from fairseq.distributed import Job, World
from fairseq.errors import UserError
from fairseq.modules import precision
from fairseq.training import train

HANGS = 240  # seconds after which a process that has not ended writes where it is, and ends

Logs = dict[str, list[dict[str, Any]]]


def run_all(folder: Path, processes: int, cases: dict[str, Any], refused: Iterable[str] = ()) -> Logs:
    """Run *cases* in one job; returns the log of each. Checkpoints go to ``folder / name``.

    Args:
        folder: where everything is written.
        processes: of the job.
        cases: flags, as :func:`runs.words` takes them, by name; they may end in ``DATA`` and a
            folder.
        refused: those of *cases* that end with an error.
    """
    flags = ["--cpu", f"--distributed-world-size={processes}", f"--distributed-timeout={HANGS // 2}"]
    return finish(folder, cases, [start(write(folder, cases), *flags)], refused)


def write(folder: Path, cases: dict[str, Any]) -> Path:
    """Write *cases* to a file in *folder*, which the command of this module takes."""
    file = folder / "cases.json"
    file.write_text(json.dumps({name: runs.words("--save-dir", folder / name, flags) for name, flags in cases.items()}))
    return file


def start(*words: Any, variables: Mapping[str, str] = {}) -> subprocess.Popen[str]:
    """Start this module with the words of its command line and *variables* of the environment, in a
    fork."""
    return warm.start(__file__, *words, variables=variables, stdout=subprocess.DEVNULL)


def finish(
    folder: Path, cases: dict[str, Any], started: Iterable[subprocess.Popen[str]], refused: Iterable[str] = ()
) -> Logs:
    """Wait for what :func:`start` started; return the logs of *cases*."""
    for process in started:
        error = process.communicate(timeout=runs.TIMEOUT)[1]
        assert process.returncode == 0, error
    unexpected = [file.read_text() for file in folder.glob("*.error") if file.stem not in refused]
    assert not unexpected, unexpected
    return {name: runs.records((folder / f"{name}.jsonl").read_text()) for name in cases}


def _run_here(cases: tuple[str, dict[str, list[str]]], world: World) -> None:
    faulthandler.dump_traceback_later(HANGS, exit=True)
    folder = Path(cases[0])
    for name, flags in cases[1].items():
        log, told = io.StringIO(), io.StringIO()
        handler = logging.StreamHandler(told)
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.INFO)
        data = Path(flags[flags.index("DATA") + 1]) if "DATA" in flags else runs.DATA
        words = flags[: flags.index("DATA")] if "DATA" in flags else flags
        # As in the tests' own process.
        with contextlib.redirect_stdout(log), mock.patch.object(precision, "bfloat16_is_slower", lambda: False):
            try:
                train(training_settings(runs.arguments(*words, data=data)), world)
            except UserError as error:
                (folder / f"{name}.error").write_text(error.with_flags)
        logging.getLogger().removeHandler(handler)
        if world.is_first:
            (folder / f"{name}.jsonl").write_text(log.getvalue())
            (folder / f"{name}.log").write_text(told.getvalue())
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    import jobs

    file = Path(sys.argv.pop(1))
    given = str(file.parent), json.loads(file.read_text())
    args = options.Parser("", [CommonConfig, DistributedConfig]).parse_args()
    typed = fields.typed(CommonConfig, args), fields.typed(DistributedConfig, args)
    distributed.run(Job(jobs._run_here, given, *typed))
