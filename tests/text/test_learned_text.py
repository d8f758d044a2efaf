"""Subwords learned from, and applied to, text of odd kinds: no pair twice, words without an end,
growing text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

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


def changed(change: Callable[[Any], None]) -> HuggingFace:
    """A ``tokenizer.json`` with another step."""
    values = json.loads(HuggingFace.learn_lines([TEXT.splitlines()], 260))
    change(values)
    return HuggingFace(json.dumps(values).encode(), "tokenizer.json")


def replace(letters: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": letters}, "content": content}


def test_replacements_that_grow_a_text_without_bound_are_refused() -> None:
    """The library ends the process, with signal 6, where its memory does not suffice."""
    doubling = [replace("a", "aa")] * 40
    for change in (
        lambda values: values.update(normalizer={"type": "Sequence", "normalizers": doubling}),
        lambda values: values.update(decoder={"type": "Sequence", "decoders": [*doubling, values["decoder"]]}),
    ):
        with pytest.raises(UserError, match="tokenizer.json: cannot be read .its replacements make more than 4096"):
            changed(change).check()
    few = changed(lambda values: values.update(normalizer={"type": "Sequence", "normalizers": doubling[:3]}))
    few.check()
    assert few.encode(["a"])[0].count("a") == 8


def test_a_regular_expression_over_its_limit_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    costly = {"type": "Split", "pattern": {"Regex": "(a|aa)+$|(a+)+b"}, "behavior": "Isolated", "invert": False}
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = {"type": "Sequence", "pretokenizers": [costly, whole]}
    tokenizer = changed(lambda values: values.update(pre_tokenizer=steps))
    for attempt in (tokenizer.encode, lambda lines: tokenizer.spans(lines[0])):
        with pytest.raises(UserError, match="tokenizer.json: cannot be read .PanicException: Onig.* retry-limit"):
            attempt(["a" * 5000 + "c"])
    assert capfd.readouterr().err == ""
