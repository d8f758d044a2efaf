"""A command whose output nobody reads any more, as behind ``| head``, ends quietly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import runs
import warm

CODE = 128 + signal.SIGPIPE
MODEL = ["--path", runs.GOLDEN / "baseline.pt", "--cpu"]
TWO = "--distributed-world-size 2 --max-tokens 32"


@pytest.mark.parametrize(
    "script, flags",
    [
        ("train.py", [runs.DATA, runs.BASELINE, "--max-update 40 --no-save --disable-validation"]),
        ("eval_lm.py", [runs.DATA, MODEL, "--output-word-probs --tokens-per-sample 64"]),
        ("eval_lm.py", [runs.DATA, MODEL, "--output-word-probs --tokens-per-sample 64", TWO.split(" --max")[0]]),
        ("preprocess.py", "--only-source --trainpref TEXT --tokenizer space --destdir OUT"),
        ("-m", ["fairseq_cli.tokenize", "TEXT", "--tokenizer space"]),
    ],
    ids=["train", "eval_lm", "two", "preprocess", "tokenize"],
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


def test_training_behind_tee_on_a_terminal_writes_each_line_of_its_log_at_once(tmp_path: Path) -> None:
    controller, terminal = os.openpty()
    baseline = runs.BASELINE.replace("--log-format json", "")
    flags = [runs.DATA, baseline, "--max-update 40 --no-save --disable-validation --log-interval 1"]
    words = [sys.executable, runs.ROOT / "train.py", *runs.words(*flags)]
    threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(controller, 1000), b"")], daemon=True).start()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=terminal, env=runs.environment()) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        # A buffer of stdout would be written at the end alone.
        assert b"train_inner" in line and process.poll() is None
        process.kill()
