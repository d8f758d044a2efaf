"""Preprocessing that cannot work: one line that names the text or flag, and nothing left behind or
changed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from mistakes import user_error
from preprocessing import refused, run, text_file

from fairseq.errors import UserError
from fairseq.system.workers import Workers
from fairseq.text import counting
from fairseq.text.counting import count_words


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_text_that_is_not_utf8_is_named_with_line_and_byte_and_the_old_data_stays(
    tmp_path: Path, workers: int, split: str
) -> None:
    run(tmp_path / "out", trainpref=text_file(tmp_path, "old\n"))
    bad = text_file(tmp_path, b"one\r\ntwo\rthree\n\nfi\xc3\xa9ve \xff\n" + b"six\n" * 50, "bad.txt")
    good = text_file(tmp_path, "new\n", "good.txt")
    flags = {"trainpref": bad} if split == "train" else {"trainpref": good, "validpref": bad}
    message = refused(tmp_path / "out", workers=workers, overwrite=True, **flags)
    assert message.startswith(f"{bad}: line 5, byte offset 23: 0xff is not UTF-8")


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5, 7, 11])
def test_the_line_of_a_bad_byte_is_counted_across_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    content = bytearray(b"a\r\n\rb\n\r\n\nc\r\nd")
    content[at:at] = b"\xff"
    line = len((bytes(content[:at]).decode() + "x").replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    monkeypatch.setattr(counting, "BLOCK_BYTES", 1)
    with pytest.raises(UserError, match=f"line {line}, byte offset {at}:"):
        count_words([text_file(tmp_path, bytes(content))])


def test_a_character_cut_off_at_the_end_is_not_utf8(tmp_path: Path) -> None:
    message = refused(tmp_path / "out", trainpref=text_file(tmp_path, "né".encode()[:-1]))
    assert "line 1, byte offset 1: 0xc3 is not UTF-8" in message


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("content", [b"", b" \n\n\t\n"])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_an_empty_text_is_refused(tmp_path: Path, workers: int, content: bytes, split: str) -> None:
    flags = {"trainpref": text_file(tmp_path, "good\n", "good.txt")}
    flags[f"{split}pref"] = text_file(tmp_path, content, "empty.txt")
    message = refused(tmp_path / "out", workers=workers, overwrite=True, **flags)
    assert "empty.txt: the text is empty" in message


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({}, "--trainpref or --srcdict: give one of them"),
        ({"validpref": "GOOD"}, "--trainpref or --srcdict: give one of them"),
        ({"trainpref": "MISSING"}, "missing.txt: file not found; give a text file"),
        ({"trainpref": "GOOD", "testpref": "MISSING"}, "missing.txt: file not found"),
        ({"trainpref": "FOLDER/*.none"}, "no files there; give a text file, a folder of them, or a pattern"),
        ({"trainpref": "GOOD,"}, "--trainpref"),
        ({"trainpref": "GOOD", "source_lang": "en"}, "good.txt.en: file not found"),
        ({"trainpref": "GOOD", "srcdict": "MISSING"}, "missing.txt: file not found; give a dict.txt"),
        ({"trainpref": "GOOD", "srcdict": "GOOD"}, "good.txt: line 1: expected `word count`"),
        ({"trainpref": "GOOD", "padding_factor": 65537}, "--padding-factor 65537: must be at most 65536"),
        ({"trainpref": "GOOD", "srcdict": "GOOD", "nwordssrc": 10}, "--srcdict: the dictionary is not changed"),
        ({"trainpref": "GOOD", "srcdict": "GOOD", "thresholdsrc": 2}, "--srcdict: the dictionary is not changed"),
        ({"srcdict": "DICT"}, "--trainpref, --validpref, --testpref: give at least one text"),
        ({"trainpref": "GOOD", "workers": 0}, "--workers 0: must be at least 1"),
        ({"trainpref": "GOOD", "dataset_impl": "raw"}, "--dataset-impl raw: choose from mmap"),
        ({"trainpref": "GOOD", "padding_factor": -1}, "--padding-factor -1: must be at least 0"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path, flags: dict[str, Any], complaint: str) -> None:
    known = {
        "GOOD": text_file(tmp_path, "hello world\n", "good.txt"),
        "DICT": text_file(tmp_path, "hello 1\n", "dict.txt"),
        "MISSING": str(tmp_path / "missing.txt"),
        "FOLDER": str(tmp_path),
    }
    for name, value in known.items():
        flags = {flag: given.replace(name, value) if isinstance(given, str) else given for flag, given in flags.items()}
    assert complaint in refused(tmp_path / "out", **flags)


def test_a_text_that_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    try:
        assert "not a regular file" in refused(tmp_path / "out", trainpref=str(pipe))
    finally:
        os.close(writer)


def test_a_destination_that_is_a_file_is_refused(tmp_path: Path) -> None:
    good = text_file(tmp_path, "hello\n")
    with user_error("--destdir .*: cannot be written"):
        run(Path(good), trainpref=good)
    assert Path(good).read_text() == "hello\n"


def test_no_space_left_keeps_the_old_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "out", trainpref=text_file(tmp_path, "old\n"))

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    message = refused(tmp_path / "out", trainpref=text_file(tmp_path, "new\n", "new.txt"), overwrite=True)
    assert "out/dict.txt: cannot be written (No space left on device)" in message


def die(path: str, start: int, end: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_ends_the_work_with_a_message(tmp_path: Path) -> None:
    path = text_file(tmp_path, "a\nb\n")
    with user_error("--workers 2: a process died"), Workers(die, 2) as pool:
        list(pool.map([(path, 0, 1)]))


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"thresholdsrc": 999999999}, "--thresholdsrc 999999999: leaves no words; the most frequent occurs 2 times"),
        ({"nwordssrc": 4, "thresholdsrc": 2}, "--nwordssrc 4: leaves no words; 4 symbols are special"),
    ],
)
def test_a_dictionary_without_words_is_refused(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    assert refused(tmp_path / "out", trainpref=text_file(tmp_path, "b b a\n"), **flags) == message
