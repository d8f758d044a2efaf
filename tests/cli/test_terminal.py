"""Control characters from corpora, dictionaries, prompts and files reach no terminal and no HTML
page."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import sys

import pytest
import runs

from fairseq.config import options
from fairseq.errors import UserError
from fairseq.system.terminal import Formatter
from fairseq_cli import generate
from fairseq_cli.common import get_training_parser

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Terminal(io.StringIO):
    """A stdout that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def hostile_data(tmp_path_factory):
    """Data and a checkpoint's dictionary in which most words hold escape sequences."""
    data = shutil.copytree(runs.DATA, tmp_path_factory.mktemp("hostile") / "data-bin")
    lines = (data / "dict.txt").read_text().splitlines()
    changed = [line if number < 3 else f"{ESCAPE}{line}" for number, line in enumerate(lines)]
    (data / "dict.txt").write_text("\n".join(changed) + "\n")
    return data


def run(monkeypatch, command, stdout, *flags):
    monkeypatch.setattr(sys, "argv", ["command", *runs.words(*flags)])
    monkeypatch.setattr(sys, "stdout", stdout)
    command.cli_main()
    return stdout.getvalue()


MODEL = ["--path", runs.GOLDEN / "baseline.pt", "--cpu"]


def test_a_log_holds_no_control_character():
    record = logging.LogRecord("name", logging.WARNING, "file", 1, "not in the dictionary: %s", (ESCAPE,), None)
    assert Formatter().format(record).endswith("| WARNING | not in the dictionary: \\x1b]0;owned\\x07\\x1b[2J\\x9b31m")


def test_pages_hold_no_control_character(monkeypatch, hostile_data, tmp_path):
    flags = "--max-new-tokens 5 --context-tokens 8 --gen-subset test"
    run(monkeypatch, generate, io.StringIO(), hostile_data, MODEL, flags, "--results-path", tmp_path / "out")
    page = (tmp_path / "out" / "generate.html").read_text()
    assert not RAW.search(page) and "\\x1b" in page
    assert json.loads((tmp_path / "out" / "generate.json").read_text())["samples"]


def test_errors_hold_no_control_character(monkeypatch, capsys):
    def main(args):
        raise UserError(f"--name {ESCAPE}: no such\nname")

    monkeypatch.setattr(sys, "argv", ["command", "data"])
    with pytest.raises(SystemExit):
        options.run_command(main, get_training_parser)
    assert not RAW.search(capsys.readouterr().err.replace("\n", ""))
