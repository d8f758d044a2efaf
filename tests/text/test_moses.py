"""The Moses tokenizer gives sacremoses' words, whatever its cache holds, and text that can be read
again."""

from __future__ import annotations

import pickle
import random

import pytest
from sacremoses import MosesTokenizer

from fairseq.text.tokenizers import moses
from fairseq.text.tokenizers.moses import Moses

ATOMS = [*"aBs1é,.-'\"`;:?! \t$%<&>世\x01\xa0", *("...", "..", "Mr.", "No.", "e.g.", "'s", "n't", "''", "@-@", "S.A.")]
ATOMS += [*"()[]", *("word", "DOTMULTI"), *[" "] * 6]


def lines(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(ATOMS, k=draw.randint(0, 12))) for _ in range(count)]


@pytest.mark.parametrize("language", ["en", "fr", "de"])
def test_words_are_those_of_sacremoses(language: str) -> None:
    reference = MosesTokenizer(language)
    lower, letters = frozenset(reference.IsLower), frozenset(reference.IsAlpha)
    reference.islower = lower.issuperset  # the same sets, made once: a thousand times faster
    reference.isanyalpha = lambda text: not letters.isdisjoint(text)
    tokenizer = Moses(language)
    for line in lines(1500, seed=1):
        expected = reference.tokenize(line, aggressive_dash_splits=True, escape=False)
        assert tokenizer.split(line) == expected, line


def test_a_few_lines_agree_with_untouched_sacremoses() -> None:
    reference = MosesTokenizer("en")
    for line in ["It's Mr. Smith's well-known U.S. book, No. 5.", "'Tis 'so.' 'No.' a. b", 'Don\'t (ever) say "I."']:
        assert Moses().split(line) == reference.tokenize(line, aggressive_dash_splits=True, escape=False)


def test_words_do_not_depend_on_what_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moses, "CACHED_CHUNKS", 3)
    small, text = Moses(), lines(300, seed=2)
    found = [small.split(line) for line in text]
    assert len(small._chunks._words) <= 3 and len(small._chunks._in_context) <= 3
    monkeypatch.setattr(moses, "CACHED_CHUNKS", 1 << 18)
    whole = Moses()
    assert [whole.split(line) for line in reversed(text)] == found[::-1]


def test_a_tokenizer_is_pickled_without_its_cache() -> None:
    tokenizer = Moses("de")
    tokenizer.split("Das ist z.B. so.")
    other = pickle.loads(pickle.dumps(tokenizer))
    assert other == tokenizer and "_chunks" not in vars(other) and len(pickle.dumps(tokenizer)) < 300


def test_text_comes_back_and_gives_the_same_words() -> None:
    text = 'He said, "It\'s a well-known book (of 1839)."'
    words = Moses().split(text)
    assert Moses().join(words) == text and Moses().split(Moses().join(words)) == words
