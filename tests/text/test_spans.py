"""Spans of symbols: the text that each symbol of a line stands for, for every tokenizer."""

from __future__ import annotations

import unicodedata

import pytest
from subword_encodings import COUNTS, encodings

from fairseq.text.tokenizers import Tokenizer
from fairseq.text.tokenizers.base import Space, Span
from fairseq.text.tokenizers.moses import Moses
from fairseq.text.tokenizers.rules import BYTES
from fairseq.text.tokenizers.sentencepiece import SentencePiece
from fairseq.text.tokenizers.subword_nmt import SubwordNMT

TEXTS = [
    "the  lower\tthe river , isn't low",
    " The café: naïve — “the” low-lying (riverbed)... 3.5% ",
    "the 世界 的 river 🙂🙃 e\u0301a\u0308 the",
    "<unk> the<unk>lower <unk>",
    "\t\x01low\x02er  \u00a0the ﬁne ②",
    "",
    "  ",
]


def plain(text: str) -> str:
    """*text* without the control characters that Moses drops."""
    return text.replace("\x01", "").replace("\x02", "")


def letters(text: str) -> str:
    return "".join(letter for letter in text if not letter.isspace())


@pytest.mark.parametrize("line", TEXTS)
def test_words_and_their_subwords_span_their_own_letters(line: str) -> None:
    merges = SubwordNMT(SubwordNMT.learn(COUNTS, 20))
    for words, subwords in ((Space(), None), (Moses(), None), (None, merges), (Moses(), merges), (Space(), merges)):
        tokenizer = Tokenizer(words, subwords)
        spans = tokenizer.spans(line)
        assert [span.symbol for span in spans] == tokenizer.encode(line).split()
        assert all(a.end <= b.start for a, b in zip(spans, spans[1:], strict=False))
        for symbol, start, end in spans:
            if set(symbol) <= set("@-"):  # a hyphen inside a word, and its parts
                assert line[start:end] in ("-", "")
            else:
                found, want = line[start:end], symbol.removesuffix("@@")
                assert found == want if words is None else plain(found) == plain(want)


@pytest.mark.parametrize("line", TEXTS)
@pytest.mark.parametrize("words", [None, Moses()])
def test_byte_level_symbols_span_the_characters_of_their_bytes(line: str, words: Moses | None) -> None:
    for name in ("gpt2", "byte"):
        tokenizer = Tokenizer(words, encodings()[name])
        spans = tokenizer.spans(line)
        assert [span.symbol for span in spans] == tokenizer.encode(line).split()
        for symbol, start, end in spans:
            if symbol != "<unk>":
                data = bytes(BYTES[letter] for letter in symbol).strip()
                assert data in line[start:end].encode() or (words is not None and symbol in "@-")
                assert len(line[start:end].lstrip()) <= max(1, len(data))


@pytest.mark.parametrize("line", TEXTS)
def test_pieces_span_the_letters_that_they_were_normalised_from(line: str) -> None:
    tokenizer = Tokenizer(None, encodings()["sentencepiece"])
    spans = tokenizer.spans(line)
    assert [span.symbol for span in spans] == tokenizer.encode(line).split()
    for symbol, start, end in spans:
        if symbol != "<unk>":
            assert symbol.replace("▁", "") in letters(unicodedata.normalize("NFKC", line[start:end]))
    joined = "".join(line[start:end] for _, start, end in spans)
    assert letters(joined.replace("ﬁﬁ", "ﬁ")) == letters(line)


def test_pieces_of_bytes_span_the_character_of_the_bytes() -> None:
    library = pytest.importorskip("sentencepiece")
    import io

    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(["the lower the river"] * 9), model_writer=model, vocab_size=277, byte_fallback=True,
        minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    tokenizer = Tokenizer(None, SentencePiece(model.getvalue()))
    spans = tokenizer.spans("the 世 the")
    assert [span.symbol for span in spans] == tokenizer.encode("the 世 the").split()
    assert [span for span in spans if span.symbol.startswith("<0x")] == [
        Span("<0xE4>", 4, 5), Span("<0xB8>", 4, 5), Span("<0x96>", 4, 5),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["wordpiece", "metaspace"])
def test_symbols_of_a_tokenizer_file_span_what_its_library_says(name: str) -> None:
    tokenizer = Tokenizer(None, encodings()[name])
    for line in TEXTS:
        spans = tokenizer.spans(line)
        assert [span.symbol for span in spans] == tokenizer.encode(line).split()
        for symbol, start, end in spans:
            if symbol != "<unk>":
                assert symbol.removeprefix("##").replace("▁", " ").strip() == line[start:end].strip()


@pytest.mark.parametrize("name", ["subword_nmt", "sentencepiece", "gpt2", "byte", "metaspace"])
@pytest.mark.parametrize("text", [".", " low.", ", the  low", "ing", "'s (low", ""])
def test_text_behind_a_symbol_has_the_symbols_that_it_has_behind_a_word(name: str, text: str) -> None:
    tokenizer = Tokenizer(None, encodings()[name])
    behind = [(span.symbol, span.end + 4) for span in tokenizer.spans_after(text)]
    whole = [(span.symbol, span.end) for span in tokenizer.spans("wide" + text)]
    assert behind == whole[len(whole) - len(behind) :]
    assert all(end <= 4 for _, end in whole[: len(whole) - len(behind)])
