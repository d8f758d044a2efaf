"""A command whose output nobody reads any more, as behind ``| head``, ends quietly; training saves
first."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import warm

from fairseq.distributed import Interruption
from fairseq.system.terminal import PipeStream, closed_pipes

CODE = 128 + signal.SIGPIPE
MODEL = ["--path", runs.GOLDEN / "baseline.pt", "--cpu"]
TRAINING = [runs.BASELINE, "--max-update 40 --no-epoch-checkpoints --disable-validation"]
TWO = "--distributed-world-size 2 --max-tokens 32"


@pytest.fixture(autouse=True)
def without_nohup() -> Iterator[None]:
    """Under nohup, as this suite may be, training goes on without its pipe."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def headed(script: str, *flags: Any, lines: int = 1, **settings: Any) -> tuple[int, str]:
    """The exit code and stderr of a script of whose output *lines* lines are read, before its pipe
    is closed."""
    with warm.start(script, *flags, **settings) as process:
        assert process.stdout is not None and process.stderr is not None
        for _ in range(lines):
            process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    return process.returncode, errors


@pytest.mark.parametrize("processes", ["", TWO], ids=["one", "two"])
def test_training_behind_a_closed_pipe_saves_and_goes_on_exactly(tmp_path: Path, processes: str) -> None:
    code, errors = headed("train.py", runs.DATA, "--save-dir", tmp_path / "run", TRAINING, processes, lines=3)
    last = tmp_path / "run" / "checkpoint_last.pt"
    assert code == CODE and "Traceback" not in errors
    assert "stopped by SIGPIPE after update " in errors and f"; saved {last}; to go on: " in errors
    updates = runs.content(last)["optimizer_history"][-1]["num_updates"]
    assert 3 <= updates < 40
    for folder in ("run", "whole"):
        done = warm.command("train.py", runs.DATA, "--save-dir", tmp_path / folder, TRAINING, processes)
        assert done.returncode == 0, done.stderr
    contents = (runs.content(tmp_path / folder / "checkpoint_last.pt") for folder in ("run", "whole"))
    assert runs.difference(*contents) is None


def test_training_that_ignores_hangups_goes_on_without_a_reader(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        code, errors = headed("train.py", runs.DATA, "--save-dir", tmp_path, TRAINING)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 0 and "is reached after 40 updates" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    "script, flags",
    [
        ("eval_lm.py", [runs.DATA, MODEL, "--output-word-probs --tokens-per-sample 64"]),
        ("eval_lm.py", [runs.DATA, MODEL, "--output-word-probs --tokens-per-sample 64", TWO.split(" --max")[0]]),
        ("preprocess.py", "--only-source --trainpref TEXT --tokenizer space --destdir OUT"),
        ("-m", ["fairseq_cli.tokenize", "TEXT", "--tokenizer space"]),
        ("-m", ["fairseq_cli.recl", runs.DATA, MODEL, "--step 2 --max-context 4 --positions 4 --results-path OUT"]),
    ],
    ids=["eval_lm", "two", "preprocess", "tokenize", "recl"],
)
def test_a_command_behind_a_closed_pipe_ends_quietly(tmp_path: Path, script: str, flags: Any) -> None:
    (tmp_path / "text").write_text("one two three four five six\n" * 20_000)
    words = [
        word.replace("TEXT", str(tmp_path / "text")).replace("OUT", str(tmp_path / "out")) for word in runs.words(flags)
    ]
    reading, writing = os.pipe()
    os.close(reading)
    with warm.start(script, *words, stdout=writing) as process:
        os.close(writing)
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == CODE, errors
    assert "rror" not in errors and "Broken pipe" not in errors
    assert not (tmp_path / "out").exists()


def test_help_that_nobody_reads_ends_quietly_in_a_process_of_its_own() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, runs.ROOT / "train.py", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=runs.environment(),
        timeout=runs.TIMEOUT,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (CODE, b"")


def test_what_is_written_to_a_closed_pipe_is_dropped_and_other_streams_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    memory = io.StringIO()
    monkeypatch.setattr(sys, "stderr", memory)
    ends: list[str] = []
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with closed_pipes(lambda: ends.append("outer")), closed_pipes(lambda: ends.append("inner")):
            assert isinstance(sys.stdout, PipeStream) and sys.stderr is memory
            print("read", flush=True)
            sys.stdout.buffer.writelines([b"as ", b"bytes\n"])
            sys.stdout.buffer.flush()
            assert os.read(reading, 100) == b"read\nas bytes\n" and not ends
            os.close(reading)
            print("dropped", flush=True)
            assert ends == ["inner"]
            print("dropped as well", flush=True)
            assert ends == ["inner"]
        assert sys.stdout is pipe


def test_a_signal_after_a_closed_pipe_is_the_first_one() -> None:
    with Interruption() as interruption:
        interruption.record_closed_pipe()
        os.kill(os.getpid(), signal.SIGINT)
    assert interruption.signal == signal.SIGPIPE
