"""Raw text decoded token by token: the pieces are the text of the whole line, and no piece is taken
back."""

from __future__ import annotations

from collections import Counter

import pytest

from fairseq.inference.text import Detokenizer, detokenizer_of
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import Tokenizer
from fairseq.text.tokenizers.base import Space
from fairseq.text.tokenizers.hf import GPT2, HuggingFace
from fairseq.text.tokenizers.moses import Moses
from fairseq.text.tokenizers.sentencepiece import SentencePiece
from fairseq.text.tokenizers.subword_nmt import SubwordNMT

LINES = ['"Don\'t go," said Mr. Smith, "it\'s a well-known river (of 1839)."', "", "The naïve 世界 isn't wide."]
COUNTS = Counter(" ".join(LINES).split())


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
