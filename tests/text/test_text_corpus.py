"""Text as a corpus in memory: lines are whole, however long they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from subword_encodings import encodings

from fairseq.text import raw_text
from fairseq.text.dictionary import Dictionary
from fairseq.text.raw_text import RawCounts, TextFormat, read_blocks
from fairseq.text.text_corpus import TextReader
from fairseq.text.tokenization import TokenizeBlock
from fairseq.text.tokenizers import Tokenizer

TEXT = "the low river the low river\nthe\n\nlow river low"


def reader(tokenizer: Tokenizer | None = None) -> TextReader:
    dictionary = Dictionary()
    lines = TEXT.split("\n")
    for line in lines if tokenizer is None else tokenizer.encode_lines([*lines, *TEXT.split(), " "]):
        for symbol in line.split():
            dictionary.add_symbol(symbol)
    return TextReader(dictionary, tokenizer)


def test_a_line_that_is_read_in_parts_has_one_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_text, "LONGEST_LINE", 10)
    monkeypatch.setattr(raw_text, "BLOCK_BYTES", 10)
    path, words = tmp_path / "text.txt", reader()
    path.write_text(TEXT)
    assert any(block.unfinished for block in read_blocks(str(path), TextFormat()))
    assert words.texts(str(path), TextFormat()) == TEXT.split("\n")
    found = words.read(str(path), TextFormat())
    expected = words.corpus(TEXT)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.sizes, expected.sizes)
    assert found.sizes.dtype == np.int32 and found.sizes.tolist() == [7, 2, 1, 4]


def test_documents_of_rows_are_sums_of_their_lines(tmp_path: Path) -> None:
    path, words = tmp_path / "text.jsonl", reader()
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("the\nlow river\n\n", "", "low")))
    found = words.documents(words.texts(str(path), TextFormat("text")))
    assert found.sizes.tolist() == [6, 1, 2] and found.offsets.tolist() == [0, 6, 7, 9]


def test_bytes_are_those_of_the_text_where_a_line_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_text, "LONGEST_LINE", 10)
    monkeypatch.setattr(raw_text, "BLOCK_BYTES", 10)
    path, tokenizer = tmp_path / "text.txt", Tokenizer(None, encodings()["byte"])
    path.write_text(TEXT)
    read = reader(tokenizer)
    corpus = read.read(str(path), TextFormat())
    assert corpus.counts == RawCounts.of(TEXT.split("\n"))
    assert read.text(corpus.tokens[:-1].tolist()) == TEXT
    # Symbols in lines back to text, which are read in parts too.
    path.write_text("".join(f"{line}\n" for line in tokenizer.encode_lines(TEXT.split("\n"))))
    blocks = list(read_blocks(str(path), TextFormat()))
    back = b"".join(TokenizeBlock(tokenizer, undo=True)(block, TextFormat())[0] for block in blocks)
    assert any(block.unfinished for block in blocks) and back.decode() == TEXT + "\n"
