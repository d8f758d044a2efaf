"""A tokenizer as a value: its file holds all of it, fits one dictionary, and is checked when it is
read."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path

import pytest
from subword_encodings import encodings

from fairseq.errors import UserError
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import TOKENIZATION, Tokenizer, find_tokenizer
from fairseq.text.tokenizers.base import Space
from fairseq.text.tokenizers.moses import Moses
from fairseq.text.tokenizers.rules import readable
from fairseq.text.tokenizers.sentencepiece import SentencePiece
from fairseq.text.tokenizers.subword_nmt import SubwordNMT
from fairseq.text.tokenizers.tokenizer import readable_symbols

TEXT = "the lower the wider the newest lowest river , the low new river"
COUNTS = Counter(TEXT.split())
CODES = SubwordNMT.learn(COUNTS, 12)
SYMBOLS = ["<s>", "a", "b"]


def stored(folder: Path) -> dict[str, object]:
    values: dict[str, object] = json.loads((folder / TOKENIZATION).read_text())
    return values


def test_the_file_holds_the_whole_tokenizer(tmp_path: Path) -> None:
    codes = tmp_path / "codes"
    codes.write_bytes(CODES)
    tokenizer = Tokenizer(Moses("de"), SubwordNMT(codes.read_bytes(), str(codes)))
    tokenizer.save(tmp_path, SYMBOLS)
    codes.unlink()
    loaded = find_tokenizer(tmp_path, SYMBOLS)
    assert loaded == tokenizer and str(loaded) == "moses, subword_nmt"
    assert loaded.encode("the lowest-river") == tokenizer.encode("the lowest-river")
    assert find_tokenizer(tmp_path / "dict.txt", SYMBOLS) == tokenizer
    assert pickle.loads(pickle.dumps(loaded)) == tokenizer


def test_binary_models_are_held_too(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    tokenizer = Tokenizer(None, SentencePiece(SentencePiece.learn(COUNTS, 20)))
    tokenizer.save(tmp_path, SYMBOLS)
    assert find_tokenizer(tmp_path, SYMBOLS) == tokenizer


def test_a_folder_without_the_file_has_no_tokenizer(tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path, SYMBOLS) is None


@pytest.mark.parametrize("words", [None, Moses(), Space()])
def test_unknown_words_in_text_stay_one_symbol(words: Moses | Space | None) -> None:
    tokenizer = Tokenizer(words, SubwordNMT(CODES) if words is None else None)
    assert tokenizer.encode("the <unk> low").split().count("<unk>") == 1
    symbols = tokenizer.encode_lines(["the <unk> low", "low"])[0].split()
    assert tokenizer.decode(symbols) == "the <unk> low"
    assert tokenizer.encode("<unk>") == "<unk>" and tokenizer.decode(["<unk>"]) == "<unk>"


@pytest.mark.parametrize("text", ["a <unk> the", "a<unk>the", " <unk>", "<unk> <unk>  ", " = the river = ", "\tlow "])
@pytest.mark.parametrize("kind", ["byte", "gpt2"])
def test_byte_level_text_comes_back_with_its_spaces_also_around_unknown_words(kind: str, text: str) -> None:
    tokenizer = Tokenizer(None, encodings()[kind])
    assert tokenizer.decode(tokenizer.encode(text).split()) == text


@pytest.mark.parametrize("kind", ["byte", "gpt2"])
def test_unknown_words_stay_apart_in_text_cut_into_words_before_byte_level_symbols(kind: str) -> None:
    tokenizer = Tokenizer(Space(), encodings()[kind])
    assert tokenizer.decode(tokenizer.encode("a <unk> the").split()) == "a <unk> the"


def test_a_file_of_another_dictionary_is_refused(tmp_path: Path) -> None:
    Tokenizer(Moses()).save(tmp_path, SYMBOLS)
    with pytest.raises(UserError, match="tokenization.json: made for another dict.txt"):
        find_tokenizer(tmp_path, [*SYMBOLS, "c"])


def test_the_mask_that_a_task_adds_makes_no_other_dictionary(tmp_path: Path) -> None:
    Tokenizer(Moses()).save(tmp_path, SYMBOLS)
    assert find_tokenizer(tmp_path, [*SYMBOLS, "<mask>"]) == Tokenizer(Moses())
    for symbols in (["<mask>", *SYMBOLS], [*SYMBOLS[:-1], "<mask>"], [*SYMBOLS, "<mask>", "<mask>"]):
        with pytest.raises(UserError, match="tokenization.json: made for another dict.txt"):
            find_tokenizer(tmp_path, symbols)


BROKEN = {
    "nothing": b"",
    "binary": b"\xff\xfe",
    "cut": b'{"version": 1, "tok',
    "list": b"[1]",
    "version": b'{"version": 2}',
    "neither": b'{"version": 1, "tokenizer": null, "bpe": null}',
    "name": b'{"version": 1, "tokenizer": {"name": "os.system"}}',
    "no name": b'{"version": 1, "tokenizer": ["moses"]}',
    "setting": b'{"version": 1, "tokenizer": {"name": "moses", "run": "x"}}',
    "type": b'{"version": 1, "tokenizer": {"name": "moses", "language": 3}}',
    "no content": b'{"version": 1, "bpe": {"name": "subword_nmt"}}',
    "base64": b'{"version": 1, "bpe": {"name": "subword_nmt", "base64": "?"}}',
    "surrogate": b'{"version": 1, "bpe": {"name": "subword_nmt", "text": "\\ud800"}}',
    "codes": b'{"version": 1, "bpe": {"name": "subword_nmt", "text": "a b c"}}',
}


@pytest.mark.parametrize("kind", BROKEN)
def test_damaged_files_are_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    (tmp_path / TOKENIZATION).write_bytes(BROKEN[kind])
    with pytest.raises(UserError, match="tokenization.json: ") as caught:
        Tokenizer.load(tmp_path / TOKENIZATION)
    assert "\n" not in str(caught.value)


def test_a_changed_content_is_another_tokenizer(tmp_path: Path) -> None:
    Tokenizer(None, SubwordNMT(CODES)).save(tmp_path, SYMBOLS)
    values = stored(tmp_path)
    assert values["bpe"] == {"name": "subword_nmt", "text": CODES.decode()}
    assert Tokenizer(None, SubwordNMT(CODES)) != Tokenizer(None, SubwordNMT(CODES + b"x y\n"))


SHOWN = {
    "Ġthe": "␣the",
    "Ċ": "\\n",
    "cafÃ©": "café",
    "Ă": "\\x02",
    "Ãĥ": "Ã",
    "Ã": "\\xc3",
    "</s>": "</s>",
    "<unk>": "<unk>",
}


def test_byte_level_symbols_are_readable(tmp_path: Path) -> None:
    for symbol, text in SHOWN.items():
        assert readable(symbol) == text
    dictionary = Dictionary()
    for symbol in SHOWN:
        dictionary.add_symbol(symbol)
    dictionary.save(tmp_path / "dict.txt")
    assert readable_symbols(Dictionary.load(tmp_path / "dict.txt")) == dictionary.symbols, "without a tokenizer"
    Tokenizer(None, encodings()["gpt2"]).save(tmp_path, dictionary.symbols)
    loaded = Dictionary.load(tmp_path / "dict.txt")
    assert [readable_symbols(loaded)[loaded.index(symbol)] for symbol in SHOWN] == list(SHOWN.values())
