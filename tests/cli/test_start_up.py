"""Help, versions and mistakes of a command line are answered before torch is imported, which takes
seconds."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest
import runs

from fairseq import __version__
from fairseq_cli import FORMER, former

SCRIPTS = dict(
    re.findall(r'^(fairseq-[\w-]+) = "([\w.:]+)"$', (runs.ROOT / "pyproject.toml").read_text(), re.MULTILINE)
)
LINES = (["--version"], ["--help"], ["--no-such-flag"], ["data", "--no-such-flag"])
PROBE = """
import contextlib, importlib, io, json, os, sys
for module, script, lines in json.loads(sys.argv[1]):
    module, name = module.split(":")
    importlib.import_module(module)
    found = []
    for line in lines:
        read, write = os.pipe()
        if not (child := os.fork()):
            sys.argv, output = [script, *line], io.StringIO()
            try:
                with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                    getattr(importlib.import_module(module), name)()
                code = 0
            except SystemExit as end:
                code = end.code or 0
            os.write(write, json.dumps([code, "torch" in sys.modules, bool(output.getvalue().strip())]).encode())
            os._exit(0)
        os.waitpid(child, 0)
        found.append(json.loads(os.read(read, 1 << 16)))
    print(json.dumps(found))
"""


def answers(lines: dict[str, tuple[list[str], ...]]) -> dict[str, list[tuple[int, bool, bool]]]:
    """For each script, and each of its *lines*: exit code, whether torch was imported, and whether
    it printed something."""
    words = [sys.executable, "-c", PROBE, json.dumps([(SCRIPTS[script], script, lines[script]) for script in lines])]
    # A working copy, whichever was installed.
    environment = {**os.environ, "PYTHONPATH": str(runs.ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=runs.TIMEOUT, check=True)
    found = [[tuple(answer) for answer in json.loads(line)] for line in done.stdout.splitlines()]
    return dict(zip(lines, found, strict=True))


OF_TRAINING = (  # exit code, and a command line
    (0, ["--help-all"]),
    (0, ["--list-archs"]),
    (0, ["--arch", "tnf_bert_base", "--task", "sentence_prediction", "--help"]),
    (2, []),
    (2, ["data", "--arch", "no_such_arch"]),
    (2, ["data", "--arch", "shortformer_tiny", "--notes", "--untie-r"]),
    (2, ["data", "--optimizer", "muon", "--lr-scheduler", "wsd", "--criterion", "electra", "--decay-ratio", "2"]),
)


def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    # A name of 1.0 is the command of today, or the harness's own command line, which imports torch.
    lines = {script: LINES[:1] if script in FORMER else LINES for script in SCRIPTS}
    expected = [(0, False, True)] * 2 + [(2, False, True)] * 2
    assert answers(lines) == {script: expected[: len(lines[script])] for script in SCRIPTS}


@pytest.mark.parametrize("script", FORMER)
def test_a_command_of_1_0_runs_and_says_its_new_name(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_harness = script == "fairseq-lm-eval"
    monkeypatch.setattr("sys.argv", [f"/bin/{script}", "--version" if is_harness else "--help"])
    with contextlib.suppress(SystemExit):
        former()
    out, err = capsys.readouterr()
    assert err == f"note: {script} is now {FORMER[script]}\n"
    assert out.startswith(f"fairseq-short {__version__}" if is_harness else f"usage: {FORMER[script]} ")


def test_every_command_of_1_0_is_installed() -> None:
    names = """attention average-checkpoints classify demo-corpus eval-lm export finetune generate harness
        hydra-train import interactive lm-eval merge-checkpoint notes plot preprocess recl symbols tokenize train
        validate"""
    assert {f"fairseq-{name}" for name in names.split()} <= SCRIPTS.keys()
    assert {script for script, entry in SCRIPTS.items() if entry == "fairseq_cli:former"} == FORMER.keys()


def test_the_flags_of_all_parts_are_known_without_torch() -> None:
    found = answers({"fairseq-train": tuple(line for _, line in OF_TRAINING)})
    assert found["fairseq-train"] == [(code, False, True) for code, _ in OF_TRAINING]
