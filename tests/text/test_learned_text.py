"""Subwords learned from, and applied to, text of odd kinds: no pair twice, words without an end,
growing text."""

from __future__ import annotations

import pytest
from subword_encodings import TEXT

from fairseq.errors import UserError
from fairseq.text.tokenizers import hf
from fairseq.text.tokenizers.hf import LONGEST_WORD, HuggingFace
from fairseq.text.tokenizers.subword_nmt import SubwordNMT

tokenizers = pytest.importorskip("tokenizers")


def test_a_text_in_which_no_pair_repeats_is_named_as_such() -> None:
    with pytest.raises(UserError, match="learn_bpe: no two letters of the training text occur together twice"):
        SubwordNMT.learn({"ab": 1, "cd": 1}, 5)


def test_long_words_are_learned_in_parts_and_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning costs the square of the length of a word, so that none is longer than a bound."""
    lines = [*TEXT.splitlines(), "the low, " * 400 + "river"]
    learned = HuggingFace.learn_lines([lines], 300)
    word = "".join(chr(ord("a") + number * number % 26) for number in range(2 * LONGEST_WORD + 7))
    cut = HuggingFace.learn_lines([[f"so {word}, it"]], 300)
    monkeypatch.setattr(hf, "_cut_words", lambda words, line: [line])
    assert HuggingFace.learn_lines([lines], 300) == learned, "no word is long"
    first = 0 + LONGEST_WORD - 1  # the space before a word belongs to it
    parts = [f"so {word[:first]}", word[first : first + LONGEST_WORD], f"{word[first + LONGEST_WORD :]}, it"]
    assert HuggingFace.learn_lines([parts], 300) == cut
