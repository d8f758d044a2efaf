"""The dictionary keeps fairseq's ids, order and file format, and refuses what is no dictionary."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq.errors import UserError
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.text.dictionary import Dictionary

GOLDEN = Path(__file__).parents[1] / "golden" / "language_model" / "data-bin" / "dict.txt"


def make(words: str, **how: int) -> Dictionary:
    dictionary = Dictionary()
    dictionary.update(Counter(words.split()))
    dictionary.finalize(**how)
    return dictionary


def test_special_symbols_have_fairseqs_ids() -> None:
    dictionary = Dictionary()
    assert dictionary.symbols == ["<s>", "<pad>", "</s>", "<unk>"]
    assert (dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk()) == (0, 1, 2, 3)
    assert dictionary.nspecial == len(dictionary) == 4


def test_words_go_by_falling_count_and_ties_by_code_point() -> None:
    dictionary = make("b b b é é a a Z Z \U0001f600 \U0001f600 ﬀ ﬀ", padding_factor=1)
    assert dictionary.symbols[4:] == ["b", "Z", "a", "é", "ﬀ", "\U0001f600"]
    assert dictionary.count[4:] == [3, 2, 2, 2, 2, 2]


def test_order_does_not_depend_on_which_word_came_first() -> None:
    dictionary = Dictionary()
    for word in ("b", "é", "a", "Z", "b"):
        dictionary.add_symbol(word)
    dictionary.finalize(padding_factor=1)
    assert dictionary.symbols[4:] == ["b", "Z", "a", "é"]
    assert dictionary.index("Z") == 5


def test_special_symbols_in_the_text_are_no_words() -> None:
    dictionary = make("a <unk> </s> <pad> <s> <unk>", padding_factor=1)
    assert dictionary.symbols[4:] == ["a"]
    assert dictionary.index("<unk>") == 3 and dictionary.index("</s>") == 2 and dictionary.index("<pad>") == 1


def test_threshold_keeps_words_that_occur_that_often() -> None:
    assert make("a a a b b c", threshold=2, padding_factor=1).symbols[4:] == ["a", "b"]


def test_nwords_counts_the_special_symbols() -> None:
    assert make("a a a b b c", nwords=6, padding_factor=1).symbols[4:] == ["a", "b"]
    assert make("a a a b b c", nwords=2, padding_factor=1).symbols[4:] == []


def test_size_is_padded_to_a_multiple_with_names_that_are_free() -> None:
    dictionary = make("a madeupword0001 madeupword0001", padding_factor=8)
    assert dictionary.symbols[4:] == ["madeupword0001", "a", "madeupword0000", "madeupword0002"]
    assert dictionary.count[4:] == [2, 1, 0, 0]
    assert len(set(dictionary.symbols)) == 8


def test_golden_file_survives_loading_and_saving(tmp_path: Path) -> None:
    dictionary = Dictionary.load(GOLDEN)
    assert len(dictionary) == 1200
    dictionary.save(tmp_path / "dict.txt")
    assert (tmp_path / "dict.txt").read_bytes() == GOLDEN.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["dict.txt"]


words = st.text(st.characters(codec="utf-8"), min_size=1).filter(
    lambda word: len(word.split()) == 1 and word.strip() == word
)


@given(st.dictionaries(words, st.integers(1, 50), min_size=1, max_size=20))
def test_any_words_survive_saving_and_loading(counts: dict[str, int]) -> None:
    dictionary = Dictionary()
    dictionary.update(counts)
    dictionary.finalize()
    with tempfile.TemporaryDirectory() as folder:
        dictionary.save(f"{folder}/dict.txt")
        loaded = Dictionary.load(f"{folder}/dict.txt")
    assert loaded == dictionary and loaded.count[4:] == dictionary.count[4:]


def test_equality_is_of_symbols_not_of_counts() -> None:
    assert make("a a b") == make("a a a a b")
    assert make("a a b") != make("a b b")
    assert make("a") != ["a"]


def test_a_line_splits_at_any_white_space_and_ends_with_eos() -> None:
    dictionary = make("a b")
    encoded = dictionary.encode(" a\u00a0b\tnew\x85\u2028b \n")
    assert encoded.tolist() == [4, 5, 3, 5, 2] and encoded.dtype == np.int32
    assert dictionary.encode("", append_eos=True).tolist() == [2]
    assert dictionary.encode("a", append_eos=False).tolist() == [4]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_string_leaves_out_bos_pad_and_eos(kind: type) -> None:
    dictionary = make("un@@ known word")
    ids = [0, dictionary.index("un@@"), dictionary.index("known"), 3, dictionary.index("word"), 2, 1]
    assert dictionary.string(kind(ids)) == "un@@ known <unk> word"


@pytest.mark.parametrize("mark", ["@@ ", "@@"])
def test_string_joins_subwords(mark: str) -> None:
    dictionary = make("un@@ kno@@ wn word cut@@")
    ids = dictionary.encode("un@@ kno@@ wn word cut@@")
    assert dictionary.string(ids, mark) == "unknown word cut"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "the dictionary is empty"),
        (b"a 1\nb\n", "line 2: expected `word count`"),
        (b"a 1\n\nb 2\n", "line 2: expected `word count`"),
        (b"a 1\nb two\n", "line 2: expected `word count`"),
        (b"\na 1\n", "line 1: expected `word count`"),
        (b" \t\na 1\n", "line 1: expected `word count`"),
        (b"#specials\teos=a\na 1\n", "line 1: expected `word count`"),
        (b"a " + b"9" * 5000 + b"\n", "line 1: expected `word count`"),
        (b"a 9223372036854775808\n", "line 1: expected `word count`"),
        (b"#specials eos=" + b"b" * 10_000 + b"\na 1\n", "line 1: eos=bbb"),
        (b"a -1\n", "line 1: expected `word count`"),
        (b"a 1\nb 1\na 3\n", "line 3: 'a' is in the dictionary already"),
        (b"<unk> 3\n", "line 1: '<unk>' is in the dictionary already"),
        (b"a 1\nb\xff 1\n", "line 2, byte offset 5: not UTF-8"),
    ],
)
def test_a_file_that_is_no_dictionary_is_refused_with_its_line(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "dict.txt"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        Dictionary.load(path)
    assert str(caught.value).startswith(str(path)) and complaint in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_missing_dictionary_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dict.txt: file not found"):
        Dictionary.load(tmp_path / "dict.txt")


def test_failing_to_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dict.txt"
    make("old").save(path)
    before = path.read_bytes()

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(UserError, match="No space"):
        make("new").save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["dict.txt"]


def test_transformer_numbers_positions_from_0_where_the_dictionary_has_no_padding(tmp_path: Path) -> None:
    (tmp_path / "dict.txt").write_text("#specials eos=a\na 1\nb 1\n")
    small = {"decoder_embed_dim": 8, "decoder_ffn_embed_dim": 8, "decoder_layers": 1, "decoder_attention_heads": 1}
    args = argparse.Namespace(**small, arch="transformer_lm", tokens_per_sample=8)
    task = SimpleNamespace(source_dictionary=Dictionary.load(tmp_path / "dict.txt"))
    decoder = TransformerLanguageModel.build_model(args, task).decoder
    assert decoder.embed_tokens.padding_idx is None and decoder.embed_tokens.weight.all() and not decoder.first_position
    (tmp_path / "dict.txt").write_text("#specials eos=a pad=b\na 1\nb 1\n")
    task = SimpleNamespace(source_dictionary=Dictionary.load(tmp_path / "dict.txt"))
    assert TransformerLanguageModel.build_model(args, task).decoder.embed_tokens.padding_idx == 1


class Word(str):
    """A word that counts how often words are compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Word.compared += 1
        return str.__eq__(self, other)


def test_saving_compares_each_word_a_few_times_where_one_line_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "dict.txt"
    path.write_text("".join(f"word{number} 1\n" for number in range(1000)) + "<pad> 3 #fairseq:overwrite\n")
    dictionary = Dictionary.load(path)
    dictionary.symbols = [Word(symbol) for symbol in dictionary.symbols]
    Word.compared = 0
    dictionary.save(tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_text() == path.read_text()
    assert Word.compared < 10 * len(dictionary)
