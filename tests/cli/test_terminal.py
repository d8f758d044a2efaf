"""Control characters from corpora, dictionaries, prompts and files reach no terminal and no HTML
page."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import runs

from fairseq.config import options
from fairseq.errors import UserError
from fairseq.system.terminal import ByteLines, Formatter, PrintableStream, page_text, printable
from fairseq_cli import eval_lm, generate, interactive
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


@pytest.mark.parametrize(
    "command, flags",
    [
        (interactive, "--max-new-tokens 5 --input PROMPTS"),
        (interactive, "--max-new-tokens 5 --input PROMPTS --json"),
        (generate, "--max-new-tokens 5 --context-tokens 8 --gen-subset test"),
        (eval_lm, "--output-word-probs --output-word-stats --max-tokens 200 --tokens-per-sample 64"),
    ],
    ids=["interactive", "json", "generate", "words"],
)
def test_a_terminal_gets_no_control_character_and_a_pipe_every_byte(
    monkeypatch, hostile_data, tmp_path, command, flags, capfd
):
    (tmp_path / "prompts").write_text(f"{ESCAPE}shouth unknown{ESCAPE}\n")
    words = [hostile_data, MODEL, flags.replace("PROMPTS", str(tmp_path / "prompts"))]
    shown = run(monkeypatch, command, Terminal(), *words)
    assert not RAW.search(shown) and "\\x9b31m" in shown
    piped = run(monkeypatch, command, io.StringIO(), *words)
    assert "\x9b31m" in piped
    assert not RAW.search(capfd.readouterr().err.replace("\r", "")), "progress"


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


def test_a_printable_stream_writes_escapes_and_passes_on_the_rest():
    stream = SimpleNamespace(written=[], encoding="utf-8", flush=lambda: None)
    stream.write = stream.written.append
    shown = PrintableStream(stream)
    assert shown.write("a\tb\x1b[0m\u202e\n") == 9 and shown.encoding == "utf-8"
    assert stream.written == ["a\tb\\x1b[0m\\u202e\n"]
    assert printable("жüñ 世界\t\n") == "жüñ 世界\t\n"
    assert page_text("<b>\x1b") == "&lt;b&gt;\\x1b"


def test_progress_without_a_terminal_is_a_line_every_ten_seconds():
    stream, seconds = io.StringIO(), iter([0, 4, 10, 15, 40, 60])
    lines = ByteLines(800, "reading \x1b[2J", stream, lambda: next(seconds))
    for count in (100, 100, 100, 300, 200):
        lines.update(count)
    assert stream.getvalue().splitlines() == [
        r"reading \x1b[2J: 25%, eta 00:30",
        r"reading \x1b[2J: 75%, eta 00:13",
        r"reading \x1b[2J: 100%, eta 00:00",
    ]


@pytest.mark.parametrize("total", [0, 5])
def test_a_file_that_grows_while_it_is_read_ends_no_command(total):
    stream, seconds = io.StringIO(), iter([0, 20, 40])
    lines = ByteLines(total, "reading", stream, lambda: next(seconds))
    for _ in range(2):
        lines.update(10)
    assert stream.getvalue() == ""
