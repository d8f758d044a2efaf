"""Subword encodings: the libraries' symbols, text that comes back, words from symbols, and damaged
files."""

from __future__ import annotations

import io
import itertools
import json
import random
import re
import sys
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mistakes import user_error
from subword_encodings import COUNTS, MERGES, TEXT, encodings

from fairseq.errors import UserError
from fairseq.text.tokenizers import BPES, Subwords
from fairseq.text.tokenizers.base import Vocabulary, spelled
from fairseq.text.tokenizers.hf import GPT2, HuggingFace
from fairseq.text.tokenizers.rules import BYTES
from fairseq.text.tokenizers.sentencepiece import SentencePiece
from fairseq.text.tokenizers.subword_nmt import SubwordNMT


@pytest.fixture(scope="module")
def made() -> dict[str, Subwords]:
    return encodings()


NAMES = ["subword_nmt", "sentencepiece", "gpt2", "wordpiece", "byte", "metaspace"]


@pytest.mark.parametrize("name", NAMES)
def test_words_come_back_from_symbols(name: str, made: dict[str, Subwords]) -> None:
    line = "the lowest river , the newest low riverbed"
    [symbols] = made[name].encode([line])
    assert "".join(made[name].decode(symbols.split()).split()) == "".join(line.split())
    words, sizes = made[name].words.group(symbols.split())
    assert words == line.split() and sum(sizes) == len(symbols.split()) and min(sizes) > 0
    assert len(symbols.split()) > len(line.split())


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_encoded_one_by_one(name: str, made: dict[str, Subwords]) -> None:
    lines = ["the river", "", "low low lowest", "  the  wide "]
    assert made[name].encode(lines) == [made[name].encode([line])[0] for line in lines]
    assert made[name].encode(lines)[1] == "" and made[name].decode([]) == ""


def test_subword_nmt_gives_its_commands_codes_and_symbols() -> None:
    from subword_nmt.apply_bpe import BPE
    from subword_nmt.learn_bpe import learn_bpe

    codes = io.StringIO()
    learn_bpe(io.StringIO(TEXT), codes, 15)
    learned = SubwordNMT.learn(COUNTS, 15)
    assert learned == codes.getvalue().encode()
    reference = BPE(io.StringIO(codes.getvalue()))
    assert SubwordNMT(learned).encode(TEXT.split("\n")) == [reference.process_line(line) for line in TEXT.split("\n")]


def test_sentencepiece_gives_the_librarys_pieces(made: dict[str, Subwords]) -> None:
    library = pytest.importorskip("sentencepiece")
    model = library.SentencePieceProcessor(model_proto=made["sentencepiece"].content)
    assert made["sentencepiece"].encode([TEXT]) == [" ".join(model.encode(TEXT, out_type=str))]


def test_sentencepiece_learns_every_letter_of_long_paragraphs_without_spaces() -> None:
    """Such a paragraph is one word; the library skips it if it is long or has its own mark, and
    fails if it is a book."""
    pytest.importorskip("sentencepiece")
    draw = random.Random(1)
    letters = [chr(0x4E00 + number) for number in range(300)]
    short = ["".join(draw.choices(letters[:150], k=200)) for _ in range(60)]
    long = ["".join(draw.choices(letters[:250], k=2000)) for _ in range(20)]
    marked = ["".join(letters[250:275]) + "▅" + "".join(letters[275:])]
    assert len(long[0].encode()) > 4192, "the library's bound"
    book = ["".join(draw.choices(letters[:250], k=150_000))]
    for paragraphs in (long, short + long + marked, book):
        learned = SentencePiece(SentencePiece.learn(Counter(paragraphs), 320 if marked[0] in paragraphs else 260))
        symbols = " ".join(learned.encode(paragraphs)).split()
        # Its own mark alone is no piece.
        assert symbols.count("<unk>") == sum(paragraph.count("▅") for paragraph in paragraphs)


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=30))
def test_byte_level_text_comes_back_exactly(text: str) -> None:
    pytest.importorskip("tokenizers")
    encoding = GPT2(MERGES)
    [symbols] = encoding.encode([text])
    assert encoding.decode(symbols.split()) == text.encode("utf-8", "replace").decode()


def test_gpt2_merges_in_their_order() -> None:
    pytest.importorskip("tokenizers")
    assert GPT2(MERGES).encode(["the the low lot"]) == ["th e Ġthe Ġlow Ġ lo t"]


def test_the_unknown_symbol_of_a_tokenizer_json_is_the_dictionarys(made: dict[str, Subwords]) -> None:
    assert made["wordpiece"].encode(["the 世 the"]) == ["the <unk> the"]
    assert "[UNK]" not in made["wordpiece"].encode(["世"])[0]


def test_symbols_with_white_space_are_written_without_and_come_back() -> None:
    symbols = ["a", "b c", " ", "\xa0x", "[UNK]"]
    vocabulary = Vocabulary(dict(enumerate(symbols)), 4, "file")
    line = vocabulary.line([0, 2, 1, 3, 4])
    assert line == "a <0x20> b<0x20>c <0xA0>x <unk>"
    assert vocabulary.plain(line.split()) == ["a", " ", "b c", "\xa0x", "<unk>"]
    with pytest.raises(UserError, match="file: has another symbol <unk> than the unknown one"):
        Vocabulary({0: "[UNK]", 1: "<unk>"}, 0, "file")


@given(
    st.lists(st.lists(st.sampled_from(["<0x20>", " ", "_", "\r", "<0x0D>", "a"]), max_size=3).map("".join), unique=True)
)
def test_different_symbols_are_written_differently_and_without_white_space(symbols: list[str]) -> None:
    written = spelled(dict(enumerate(symbols)))
    assert len(set(written.values())) == len(symbols)
    for index, symbol in enumerate(symbols):
        assert written[index].split() == [written[index]]
        assert written[index] == symbol or symbol.split() != [symbol]


DAMAGED = {
    "subword_nmt": [b"a b c\n", b"\xff\xfe", b"#version: 0.2\n"],
    "sentencepiece": [b"nothing of a model", b"a b\n"],
    "gpt2": [b"a b c\n", b"#version: 0.2\n", b"\xff", "世 界\n".encode(), b"ab c\n"],
    "hf": [b"{}", b"[1", b"\xff", b"a b\n", json.dumps({"version": "1.0", "model": {}}).encode()],
}


@pytest.mark.parametrize("kind, content", [(kind, content) for kind, all in DAMAGED.items() for content in all])
def test_files_that_are_damaged_or_of_another_kind_are_refused_in_one_line(kind: str, content: bytes) -> None:
    if kind != "subword_nmt":
        pytest.importorskip("sentencepiece" if kind == "sentencepiece" else "tokenizers")
    with user_error("--bpe-codes x: ") as caught:
        BPES[kind](content, "--bpe-codes x").check()
    assert "\n" not in caught.value.with_flags


@pytest.mark.parametrize(
    "kind, package, install",
    [
        ("sentencepiece", "sentencepiece", "pip install sentencepiece zstandard"),
        *((k, "tokenizers", "pip install tokenizers") for k in ("gpt2", "hf")),
    ],
)
def test_a_missing_package_is_named_with_its_installation(
    kind: str, package: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with user_error(rf"--bpe {kind}: .*{install}$"):
        BPES[kind](MERGES).check()


@pytest.fixture(scope="module")
def learned() -> HuggingFace:
    return HuggingFace(HuggingFace.learn_lines([TEXT.splitlines()], 280))


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=30))
@example(text="</s> <unk> <pad>\ta  b\r\n\u00a0\u2028\x85\0 ")
def test_learned_bytes_have_no_unknown_and_give_every_text_back(learned: HuggingFace, text: str) -> None:
    [symbols] = learned.encode([text])
    assert set(symbols.split()) <= set(learned.symbols) and not set(learned.symbols) & {"<unk>", "</s>", "<pad>"}
    assert learned.decode(symbols.split()) == text


def test_the_first_merges_are_of_the_most_frequent_pairs_and_learning_is_deterministic(
    learned: HuggingFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(learned.symbols) == 280 and set(learned.symbols) > set(BYTES)
    words = Counter(word for line in TEXT.splitlines() for word in re.findall(r" ?[a-z]+|'t", line))
    pairs: Counter[str] = Counter()
    for word, count in words.items():
        for pair in itertools.pairwise(word.replace(" ", "Ġ")):
            pairs["".join(pair)] += count
    merge = json.loads(learned.content)["model"]["merges"][0]
    assert pairs["".join(merge)] == max(pairs.values())
    for batches in ([TEXT.splitlines()], [[line] for line in TEXT.splitlines()]):
        assert HuggingFace.learn_lines(iter(batches), 280) == learned.content
    assert HuggingFace.learn_lines([[line] for line in TEXT.splitlines()], 280) == learned.content
    with user_error("--learn-bpe 255: byte-level symbols include 256 bytes"):
        HuggingFace.learn_lines([], 255)


def test_a_kind_that_is_not_learned_is_an_error() -> None:
    with user_error("--learn-bpe: only hf, subword_nmt and sentencepiece"):
        BPES["gpt2"].learn(COUNTS, 10)
    with pytest.raises(UserError, match="one character"):
        SubwordNMT.learn({"a": 3, "b": 2}, 10)
    pytest.importorskip("sentencepiece")
    with user_error("--learn-bpe 100000: sentencepiece: "):
        SentencePiece.learn(COUNTS, 100000)


def test_codes_say_how_much_of_a_text_they_know(made: dict[str, Subwords]) -> None:
    words = {"".join(word): 2 for word in itertools.product("abcde", "fghij", "klmno")}
    many, few = (SubwordNMT(SubwordNMT.learn(words, merges)) for merges in (120, 9))
    assert many.knows("big ñ") == 1 and many.knows("big 世") == 0.75 and many.knows("世界") == 0
    assert few.knows("世界") == 1
    assert made["sentencepiece"].knows("the low river") == 1 and made["sentencepiece"].knows("世界 ñ") == 0
    assert made["wordpiece"].knows("the low river") == 1 and made["wordpiece"].knows("世界 ñ") == 0
