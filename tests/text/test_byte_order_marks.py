"""A byte-order mark before a text that a command reads: the content is the same as without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from subword_encodings import COUNTS, MERGES

from fairseq.config.command_settings import TextConfig
from fairseq.data.encoders import Numbered
from fairseq.evaluation.by_frequency import word_counts
from fairseq.interop.hugging_face.model_folder import vocabulary
from fairseq.notes.words import NoteWords
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers.rules import BYTES
from fairseq.text.tokenizers.subword_nmt import SubwordNMT
from fairseq.text.tokenizers.tokenizer import chosen_subwords

DICTIONARY = b"the 3\nlow 2\n"


def dictionary() -> Dictionary:
    return Dictionary.parse(DICTIONARY, "dict.txt")


def encoded(kind: str) -> Callable[[Path], Any]:
    def read(path: Path) -> Any:
        subwords = chosen_subwords(TextConfig(bpe=kind, bpe_codes=str(path)))
        return subwords.encode(["the newest lower river"]), subwords.content  # type: ignore[union-attr]

    return read


def numbered(path: Path) -> Any:
    symbols = [*BYTES, "th", "Ġth", "Ġthe", "lo", "low", "Ġlow"]
    (path.parent / "encoder.json").write_text(json.dumps({symbol: index for index, symbol in enumerate(symbols)}))
    return Numbered.load(path.parent / "encoder.json", path).encode(["the low"])


FILES: dict[str, tuple[str, bytes, Callable[[Path], Any]]] = {
    "dictionary": ("dict.txt", DICTIONARY, lambda path: Dictionary.load(path).symbols),
    "codes of subword-nmt": ("codes", SubwordNMT.learn(COUNTS, 20), encoded("subword_nmt")),
    "merges of GPT-2": ("vocab.bpe", MERGES, encoded("gpt2")),
    "GPT-2's merges with numbers": ("vocab.bpe", MERGES, numbered),
    "counts of words": ("counts", b"the 3\nlow 2\n", lambda path: word_counts(str(path), "", dictionary())),
    "words with notes": ("notes.txt", b"the 3\nlow 2\n", lambda path: NoteWords.load(path.parent).words),
    "words of an encoder": ("vocab.txt", b"[PAD]\nthe\n", lambda path: vocabulary(path.parent)),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_byte_order_mark_is_no_part_of_a_file(kind: str, tmp_path: Path) -> None:
    name, content, read = FILES[kind]
    (tmp_path / name).write_bytes(content)
    want = read(tmp_path / name)
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert read(tmp_path / name) == want
