"""Control characters from corpora, dictionaries, prompts and files reach no terminal."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest

from fairseq.config import options
from fairseq.errors import UserError
from fairseq.system.terminal import Formatter, write_line_by_line
from fairseq_cli.common import get_training_parser

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def test_a_log_holds_no_control_character():
    record = logging.LogRecord("name", logging.WARNING, "file", 1, "not in the dictionary: %s", (ESCAPE,), None)
    assert Formatter().format(record).endswith("| WARNING | not in the dictionary: \\x1b]0;owned\\x07\\x1b[2J\\x9b31m")


def test_characters_that_an_encoding_lacks_are_escaped(monkeypatch):
    written = [io.BytesIO(), io.BytesIO()]
    for name, file in zip(("stdout", "stderr"), written, strict=True):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(file, encoding="ascii"))
    write_line_by_line()
    print("é – gres")
    assert [file.getvalue() for file in written] == [b"\\xe9 \\u2013 gres\n", b""]


def test_errors_hold_no_control_character(monkeypatch, capsys):
    def main(args):
        raise UserError(f"--name {ESCAPE}: no such\nname")

    monkeypatch.setattr(sys, "argv", ["command", "data"])
    with pytest.raises(SystemExit):
        options.run_command(main, get_training_parser)
    assert not RAW.search(capsys.readouterr().err.replace("\n", ""))
