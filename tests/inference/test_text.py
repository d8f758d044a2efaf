"""Tokens become text, one by one: the pieces are the text of the whole line, and no piece is taken
back."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from sacremoses import MosesDetokenizer

from fairseq.inference.text import SPACES, Detokenizer, detokenizer_of, never_written
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import Tokenizer
from fairseq.text.tokenizers.base import Space
from fairseq.text.tokenizers.hf import GPT2, HuggingFace
from fairseq.text.tokenizers.moses import Moses
from fairseq.text.tokenizers.sentencepiece import SentencePiece
from fairseq.text.tokenizers.subword_nmt import SubwordNMT

LINES = ['"Don\'t go," said Mr. Smith, "it\'s a well-known river (of 1839)."', "", "The naïve 世界 isn't wide."]
COUNTS = Counter(" ".join(LINES).split())
MARKS = ['"', "'", "''", "``", "`", "„", "“", "”", "'s", "(", ")", ",", ".", "$", "¿", "%", "&", "&quot;"]


def detokenizer(kind: str) -> Detokenizer:
    if kind == "gpt2":
        pytest.importorskip("tokenizers")
        tokenizer = Tokenizer(None, GPT2("#version: 0.2\nt h\nĠ w\nÃ ¯\n".encode()))
    elif kind == "hf":
        pytest.importorskip("tokenizers")
        tokenizer = Tokenizer(None, HuggingFace(HuggingFace.learn_lines([LINES * 3], 280)))
    elif kind == "sentencepiece":
        pytest.importorskip("sentencepiece")
        tokenizer = Tokenizer(None, SentencePiece(SentencePiece.learn(COUNTS, 42)))
    elif kind == "subword_nmt":
        tokenizer = Tokenizer(Moses(), SubwordNMT(SubwordNMT.learn(COUNTS, 30)))
    else:
        tokenizer = Tokenizer(Moses() if kind == "moses" else Space())
    dictionary = Dictionary()
    for line in tokenizer.encode_lines(LINES):
        for symbol in line.split():
            dictionary.add_symbol(symbol)
    return detokenizer_of(dictionary, tokenizer=tokenizer)


@pytest.mark.parametrize("kind", ["moses", "space", "subword_nmt", "sentencepiece", "gpt2", "hf"])
def test_pieces_are_the_text_of_the_lines(kind: str) -> None:
    text = detokenizer(kind)
    tokens = [token for line in LINES for token in [*text.encode(line)[0], text.dictionary.eos()]]
    stream = text.stream()
    pieces = [stream.add([token]) for token in tokens]
    assert "".join(pieces) + stream.end() == "\n".join(LINES) + "\n" == text.decode(tokens)
    assert sum(map(bool, pieces)) > 15, "each word as soon as it is complete"


@pytest.mark.parametrize("kind", ["moses", "subword_nmt", "sentencepiece", "gpt2", "hf"])
def test_a_prompt_is_shown_whole_before_its_continuation(kind: str) -> None:
    text = detokenizer(kind)
    tokens, unknown = text.encode(LINES[0])
    assert not unknown
    whole = [cut for cut in range(len(tokens)) if not text.dictionary[tokens[cut - 1]].endswith("@@")]
    for cut in whole:
        stream = text.stream()
        prompt = stream.add(tokens[:cut]) + stream.pause()
        assert prompt == text.tokenizer.decode(text.dictionary[token] for token in tokens[:cut])
        if "\ufffd" not in prompt and not prompt.endswith("-"):
            assert prompt + stream.add(tokens[cut:]) + stream.end() == LINES[0]


@pytest.mark.parametrize("kind, longest", [("subword_nmt", 20), ("gpt2", 40), ("hf", 40)])
def test_an_endless_line_is_decoded_in_bounded_time(kind: str, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairseq.inference.text.LONGEST_LINE", 7)
    text = detokenizer(kind)
    line = " ".join(["said Mr. Smith, it's a river"] * 9)
    tokens, _ = text.encode(line)
    stream = text.stream()
    found = ""
    for token in tokens:
        found += stream.add([token])
        assert len(stream.symbols) < longest  # type: ignore[attr-defined]
    assert found + stream.end() == line


def dictionary_of(*symbols):
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    return dictionary


@pytest.mark.parametrize(
    "words, text",
    [
        ('He said : " it is 5 % " ( so ) , Mr Dun \'s .', 'He said: "it is 5% "(so), Mr Dun\'s.'),
        ("a well @-@ known 20 @,@ 000 , 3 @.@ 5 @-@ fold one", "a well-known 20,000, 3.5-fold one"),
        ("= = Life cycle = =", "Life cycle"),
        ("= Dun @-@ Laoghaire ( town ) =", "Dun-Laoghaire (town)"),
        ("= not a heading", "= not a heading"),
        ("= x = y", "= x = y"),
        ("= =", "= ="),
        ("<unk> & <unk> &lt;", "<unk> & <unk> &lt;"),
    ],
)
def test_words_become_running_text(words, text):
    dictionary = dictionary_of(*dict.fromkeys(words.split()), "word")
    assert detokenizer_of(dictionary).decode([dictionary.index(word) for word in words.split()]) == text.replace(
        '% "(', '%" ('
    )


def test_subwords_are_joined():
    subwords = ["un@@", "know@@", "n", "thing@@", "s", ",", "a@@"]
    dictionary = dictionary_of(*subwords)
    assert detokenizer_of(dictionary, "@@ ").decode(map(dictionary.index, subwords)) == "unknown things, a"
    pieces = ["▁un", "known", "▁things", ",", "</s>", "▁", "un"]
    dictionary = dictionary_of("▁un", "known", "▁things", ",", "▁", "un")
    text = detokenizer_of(dictionary, "sentencepiece").decode(map(dictionary.index, pieces))
    assert text == "unknown things,\nun"


@pytest.mark.parametrize("seed", range(8))
def test_text_that_comes_in_pieces_is_that_of_the_whole(seed: int) -> None:
    choice = random.Random(seed)
    words = ["=", "@-@", "@,@", "dun", "gre@@", "plom", "Vas", "5", ":", "–", *MARKS]
    dictionary = dictionary_of(*words)
    detokenizer = detokenizer_of(dictionary, "@@ " if seed % 2 else None)
    tokens = [choice.choice([2, 4, *range(4, len(dictionary))]) for _ in range(300)]
    stream, shown, place = detokenizer.stream(), "", 0
    while place < len(tokens):
        size = choice.choice([1, 1, 1, 2, 20])
        shown += stream.add(tokens[place : place + size])
        place += size
    assert shown + stream.end() == detokenizer.decode(tokens)


@pytest.mark.parametrize(
    "words", [["dun", "gres", "'", "漢", "漢字", "x-y", *MARKS], ["dun", "gres", "'", '"'], ["(", '"', "'", "s"]]
)
def test_a_long_line_of_words_is_decoded_in_parts_as_if_at_once(words: list[str]) -> None:
    dictionary = dictionary_of(*words, "word")
    line = random.Random(5).choices(words, k=1000)
    stream, shown = detokenizer_of(dictionary).stream(), ""
    for word in line:
        shown += stream.add([dictionary.index(word)])
        assert len(stream.symbols) < 800  # type: ignore[attr-defined]
    assert shown + stream.end() == MosesDetokenizer(lang="en").detokenize(line, unescape=False)


def test_what_follows_a_prompt_is_shown_apart_and_joins_it():
    dictionary = dictionary_of("=", "Dun", "well", "@-@", "known", "town")
    for prompt, after, parts in (
        ("= Dun", "town =", ("= Dun", " town =")),
        ("= Dun =", "</s> town", ("Dun", "\n" + "town")),
        ("well @-@", "known town", ("well-", "known town")),
        ("Dun", "town", ("Dun", " town")),
        ("", "Dun", ("", "Dun")),
        ("", "= Dun =", ("", "Dun")),
    ):
        stream = detokenizer_of(dictionary).stream()
        before = stream.add(map(dictionary.index, prompt.split())) + stream.pause()
        assert (before, stream.add(map(dictionary.index, after.split())) + stream.end()) == parts


def test_bytes_are_text_and_back():
    dictionary = dictionary_of(*map(str, range(256)))
    detokenizer = detokenizer_of(dictionary)
    tokens, unknown = detokenizer.encode("Köln – “5”")
    assert not unknown and len(tokens) == len("Köln – “5”".encode())
    assert detokenizer.decode([*tokens, 2, *detokenizer.encode("ä")[0]]) == "Köln – “5”\nä"
    stream = detokenizer.stream()
    first, second = detokenizer.encode("ä")[0]
    assert (stream.add([first]), stream.add([second]), stream.add([second, first]), stream.end()) == ("", "ä", "�", "�")
    assert dictionary_of("65").symbols and detokenizer_of(dictionary_of("65")).encode("AB") == ([4, 3], ["66"])


@pytest.mark.parametrize("space", [*SPACES, None])
def test_characters_are_text_and_back(space):
    dictionary = dictionary_of("a", "b", "'", ".", *([space] if space else []))
    detokenizer = detokenizer_of(dictionary)
    tokens, unknown = detokenizer.encode("ab a. cab")
    assert unknown == ["c"] and len(tokens) == 9
    assert detokenizer.decode(tokens) == "ab a. <unk>ab"
    assert detokenizer.decode([4, 2, 5]) == ("a\nb" if space else "a b")  # text8 has no lines: its spaces end them


def test_what_is_never_written():
    dictionary = dictionary_of("a", "madeupword")
    dictionary.pad_to_multiple_(8)
    assert [dictionary[i] for i in never_written(dictionary)] == [
        "<s>",
        "<pad>",
        "<unk>",
        "madeupword0000",
        "madeupword0001",
    ]
    listed = Dictionary.of_listed(["<eos>", "a", "<unk>", "b"], {"eos": "<eos>", "unk": "<unk>"})
    assert never_written(listed) == [2]
