"""Losses of words by their counts: against words grouped line by line and counted one by one."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import user_error

from fairseq.evaluation import by_frequency
from fairseq.evaluation.by_frequency import WordGroups, WordLosses, read_counts, table
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers.rules import SubwordMarks

KINDS = {
    "subword-nmt": ["un@@", "able", "cat"],
    "sentencepiece": ["▁", "▁un", "able", "cat"],
    "byte-level": ["Ġun", "able", "Ġcat", "Ġ"],
    "end marks": ["un", "able</w>", "cat</w>"],
}


def dictionary_of(*symbols: str) -> Dictionary:
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    return dictionary


@settings(deadline=None, max_examples=40)
@given(st.data(), st.sampled_from(sorted(KINDS)), st.integers(2, 9))
def test_words_are_counted_as_the_rule_groups_each_line(data: Any, kind: str, piece: int) -> None:
    dictionary = dictionary_of(*KINDS[kind])
    lines = data.draw(st.lists(st.lists(st.sampled_from(KINDS[kind]), max_size=5), min_size=1, max_size=6))
    groups = WordGroups(dictionary)
    rule = groups.rule or SubwordMarks()
    literal = Counter(word for line in lines if line for word in rule.group(line)[0])
    tokens = np.concatenate([dictionary.encode(" ".join(line)) for line in lines])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_frequency, "PIECE", piece)
        assert groups.counts(tokens) == literal


def test_both_kinds_of_marks_group_words_where_there_is_no_tokenizer() -> None:
    dictionary = dictionary_of(*["un@@", "able", "cat", "##s"], *map(str, range(100)))
    groups = WordGroups(dictionary)
    tokens = dictionary.encode("un@@ able cat ##s cat un@@")
    assert groups.rule is None
    assert groups.counts(tokens) == {"unable": 1, "cats": 1, "cat": 1, "un": 1}


def losses_of(dictionary: Dictionary, line: str, lprobs: list[float], **more: Any) -> WordLosses:
    tokens = dictionary.encode(line).astype(np.int64)
    return WordLosses.of(WordGroups(dictionary), tokens, np.log(np.exp2(lprobs)), **more)


def test_loss_of_a_word_is_the_sum_of_its_tokens_without_the_end_of_the_line() -> None:
    found = losses_of(dictionary_of("un@@", "able", "cat"), "cat un@@ able what", [-1, -2, -3, -4, -50])
    assert found.words == ["cat", "unable", "<unk>"] and found.is_unknown.tolist() == [False, False, True]
    assert found.tokens.tolist() == [1, 2, 1]
    np.testing.assert_allclose(found.losses, [1, 5, 4])


def test_word_of_which_a_part_is_predicted_has_the_loss_of_that_part() -> None:
    words = dictionary_of("un@@", "able", "cat")
    found = losses_of(words, "cat un@@ able cat", [-3, -4], positions=np.array([2, 3]))
    assert found.words == ["unable", "cat"] and found.tokens.tolist() == [1, 1]
    np.testing.assert_allclose(found.losses, [3, 4])


def test_line_begins_a_word_without_a_symbol_before_it() -> None:
    words = dictionary_of(*KINDS["byte-level"])
    tokens = words.encode("Ġun able able", append_eos=False)
    found = WordLosses.of(WordGroups(words), tokens, -np.ones(3), lines=np.array([0, 2, 3]))
    assert found.words == ["unable", "able"]


def test_bands_have_mean_and_error_and_paired_difference() -> None:
    words, unknown = ["a", "b", "c", "b"], np.zeros(4, bool)
    one = WordLosses(words, unknown, np.array([1, 2, 1, 2]), np.array([1.0, 2, 3, 6]))
    two = WordLosses(words, unknown, np.array([1, 1, 1, 1]), np.array([1.0, 3, 5, 9]))
    report = by_frequency.by_frequency({"one": one, "two": two}, {"b": 7, "c": 10}, [1, 10])
    unseen, rare, frequent, everything = report["bands"]
    assert [band["band"] for band in report["bands"]] == ["0", "1-9", "10+", "all"]
    assert (rare["low"], rare["high"], frequent["high"]) == (1, 9, None)
    assert unseen["bits_per_word"] == [1, 1] and unseen["standard_error"] == [None, None]
    assert rare["words"] == 2 and rare["tokens"] == [4, 2] and rare["bits_per_word"] == [4, 6]
    assert rare["standard_error"] == pytest.approx([math.sqrt(8 / 2), math.sqrt(18 / 2)])
    assert rare["difference"] == [2] and rare["difference_standard_error"] == pytest.approx([math.sqrt(2 / 2)])
    assert everything["words"] == 4 and everything["difference"] == pytest.approx([1.5])
    assert table(report)[3] == "| 1-9 | 2 | 4.000 ± 2.000 | 6.000 ± 3.000 | +2.000 ± 1.000 |"


def test_words_of_other_tokenizers_do_not_compare() -> None:
    one, two = (WordLosses([word], np.zeros(1, bool), np.ones(1), np.ones(1)) for word in ("don't", "don"))
    with user_error(r"--by-frequency: the models predict other words \(1: \"don't\", 'don'\)"):
        by_frequency.by_frequency({"one": one, "two": two}, {}, [1])


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "file not found"),
        (b"\xff 3\n", "line 1, byte offset 0: not UTF-8"),
        (b"", "line 1: expected word and count, found ''"),
        (b"the 3\nof\n", "line 2: expected word and count, found 'of'"),
        (b"the -3\n", "line 1: expected word and count"),
    ],
)
def test_bad_count_files_are_one_line(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "counts"
    if content is not None:
        path.write_bytes(content)
    with user_error(f"--word-counts {path}: {message}"):
        read_counts(path)


def test_counts_of_a_file_are_its_lines(tmp_path: Path) -> None:
    (tmp_path / "counts").write_text("the 3\nof\t2\nthe 1\n")
    assert read_counts(tmp_path / "counts") == {"the": 4, "of": 2}
