"""Help, versions and mistakes of a command line are answered before torch is imported, which takes
seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import runs

SCRIPTS = dict(
    re.findall(r'^(fairseq-[\w-]+) = "([\w.:]+)"$', (runs.ROOT / "pyproject.toml").read_text(), re.MULTILINE)
)
LINES = (["--version"], ["--help"], ["--no-such-flag"], ["data", "--no-such-flag"])
PROBE = """
import contextlib, importlib, io, json, os, sys
module, name = sys.argv[1].split(":")
found = []
for line in json.loads(sys.argv[3]):
    read, write = os.pipe()
    if not (child := os.fork()):
        sys.argv, output = [sys.argv[2], *line], io.StringIO()
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


def answers(script: str, *lines: list[str]) -> list[tuple[int, bool, bool]]:
    """The exit code of *script* with each of *lines*, whether torch was imported, and whether it
    said something."""
    words = [sys.executable, "-c", PROBE, SCRIPTS[script], script, json.dumps(lines)]
    # A working copy, whichever was installed.
    environment = {**os.environ, "PYTHONPATH": str(runs.ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=runs.TIMEOUT, check=True)
    return [tuple(answer) for answer in json.loads(done.stdout)]


OF_TRAINING = (  # exit code, and a command line
    (0, ["--help-all"]),
    (0, ["--list-archs"]),
    (0, ["--arch", "tnf_bert_base", "--task", "sentence_prediction", "--help"]),
    (2, []),
    (2, ["data", "--arch", "no_such_arch"]),
    (2, ["data", "--arch", "shortformer_tiny", "--notes", "--untie-r"]),
    (2, ["data", "--optimizer", "muon", "--lr-scheduler", "wsd", "--criterion", "electra", "--decay-ratio", "2"]),
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_mistakes_do_not_wait_for_torch(script: str) -> None:
    version, help, *mistakes = answers(script, *LINES)
    assert version == (0, False, True)
    if script == "fairseq-lm-eval":  # the harness's own command line, which imports torch
        return
    assert help == (0, False, True)
    assert mistakes == [(2, False, True)] * 2


def test_the_flags_of_all_parts_are_known_without_torch() -> None:
    found = answers("fairseq-train", *(line for _, line in OF_TRAINING))
    assert found == [(code, False, True) for code, _ in OF_TRAINING]
