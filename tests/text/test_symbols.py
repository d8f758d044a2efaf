"""fairseq-corpus symbols: bytes and letters as symbols, as many tokens as characters, and bits per
character."""

from __future__ import annotations

import io
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import runs
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq.data.binarizer import Binarizer
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.errors import UserError
from fairseq.evaluation.report import is_of_characters
from fairseq.text import symbols as text_to_symbols
from fairseq.text.dictionary import Dictionary
from fairseq_cli import corpus

ROOT = Path(__file__).parents[2]
SPLITS = ("train", "valid", "test")
PROSE = b"one two  three\n\nfour\xc3\xa9 \r\n\x00 five, six.\n" * 7
WORDS = b" one two  three four five six" * 9


def read_back(path: Path, kind: str) -> bytes:
    """The text that a file of symbols stands for; its last line's end is part of it."""
    if kind == "bytes":
        return b"".join(bytes(map(int, line.split())) + b"\n" for line in path.read_text().splitlines())
    return b"".join("".join(line.split()).encode() + b" " for line in path.read_text().splitlines())


def check(text: bytes, kind: str, folder: Path) -> None:
    source = folder / "source"
    source.write_bytes(text)
    tokens = text_to_symbols.convert(source, folder / "out", kind)
    part = len(text) // 20
    cuts = [0, len(text) - 2 * part, len(text) - part, len(text)]
    end = b"\n" if kind == "bytes" else b" "
    for split, first, last in zip(SPLITS, cuts[:-1], cuts[1:], strict=True):
        expected = text[first:last]
        added = not expected.endswith(end)
        assert read_back(folder / "out" / f"{split}.txt", kind) == expected + (end if added else b"")
        assert tokens[split] == len(expected) + added


@pytest.mark.parametrize("kind, text", [("bytes", PROSE), ("bytes", bytes(range(256)) * 3), ("letters", WORDS)])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_the_symbols_are_the_text_cut_at_exact_bytes(
    kind: str, text: bytes, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_to_symbols, "CHUNK", chunk)
    check(text, kind, tmp_path)


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=20, max_size=300))
def test_any_bytes_can_be_read_back(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    check(text, "bytes", tmp_path_factory.mktemp("any"))


def test_the_splits_of_a_hundred_million_bytes_are_the_benchmarks() -> None:
    sizes = text_to_symbols.split_sizes(100_000_000)
    assert sizes == {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}


@pytest.mark.parametrize("kind, text, symbols", [("bytes", PROSE, 20), ("letters", WORDS, 13)])
def test_a_corpus_has_a_token_a_character_and_no_unknown_one(
    kind: str, text: bytes, symbols: int, tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes(text)
    tokens = text_to_symbols.convert(tmp_path / "source", tmp_path / "out", kind)
    dictionary = Dictionary.load(tmp_path / "out" / "dict.txt")
    end = b"\n" if kind == "bytes" else b" "
    counts = Counter(str(byte) if kind == "bytes" else chr(byte) for byte in text if bytes([byte]) != end)
    words = [word for word in dictionary.symbols[4:] if not word.startswith("madeupword")]
    assert len(words) == symbols
    assert words == sorted(counts, key=lambda word: (-counts[word], word))
    assert {word: dictionary.count[dictionary.index(word)] for word in words} == counts
    assert len(dictionary) % 8 == 0 and is_of_characters(dictionary)
    for split in SPLITS:
        summary = Binarizer(dictionary).binarize(str(tmp_path / "out" / f"{split}.txt"), tmp_path / split)
        assert (summary.tokens, summary.replaced) == (tokens[split], 0)
        assert len(IndexedCorpus(str(tmp_path / split)).tokens) == tokens[split]


@pytest.mark.parametrize(
    "symbols, characters",
    [
        (["a", "b", "é", "_"], True),
        (["0", "9", "10", "255"], True),
        (["a", "bb"], False),
        (["a", "10"], False),
        (["0", "256"], False),
        (["1", "01"], False),
        ([chr(500 + i) for i in range(99)] + ["the"], False),
        ([], False),
    ],
)
def test_what_counts_as_a_corpus_of_characters_or_bytes(symbols: list[str], characters: bool) -> None:
    dictionary = Dictionary()
    for symbol in [*symbols, "madeupword0000"]:
        dictionary.add_symbol(symbol)
    assert is_of_characters(dictionary) == characters


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fairseq_cli.corpus", "symbols", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=runs.TIMEOUT)


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"ab c" * 25)
    result = run(tmp_path / "source", tmp_path / "out", "--kind", "letters")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == (
        f"{tmp_path}/out/train.txt: 90 characters, plus one </s>: it ends in the middle of a line"
    )
    assert result.stdout.splitlines()[1] == f"{tmp_path}/out/valid.txt: 5 characters"


@pytest.mark.parametrize(
    "text, message",
    [
        (b"abc def ghi jkl mno pqr Stu", "byte 24 is b'S', neither a letter from a to z nor a space"),
        (b"too short", "has 9 bytes; a split of 90, 5 and 5 % needs at least 20"),
        (None, "source: file not found; check the path"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(text: bytes | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "source").write_bytes(text)
    result = run(tmp_path / "source", tmp_path / "out", "--kind", "letters")
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"corpus.py symbols: error: {tmp_path}/source: ") and message in result.stderr
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_texts_that_are_there_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(PROSE)
    (tmp_path / "train.txt").write_text("mine")
    with pytest.raises(UserError, match=f"DIR {tmp_path}: has a train.txt; give a new folder, or remove it"):
        text_to_symbols.convert(tmp_path / "source", tmp_path, "bytes")
    assert (tmp_path / "train.txt").read_text() == "mine" and not (tmp_path / "dict.txt").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(WORDS)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/out.*choose another"):
        text_to_symbols.convert(tmp_path / "source", tmp_path / "file" / "out", "letters")


def test_a_folder_whose_name_stdout_cannot_represent_is_printed_with_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").write_bytes(PROSE)
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "utf-8"))
    monkeypatch.setattr(
        sys, "argv", ["", "symbols", str(tmp_path / "source"), f"{tmp_path}/out\udcff", "--kind", "bytes"]
    )
    corpus.cli_main()
    assert rb"out\udcff/train.txt: " in printed.getvalue()
