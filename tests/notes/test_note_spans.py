"""The places of rare words agree with a literal reading of the text, however it is cut; damaged
files are refused."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq.data.binarizer import Binarizer, splitters
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.errors import UserError
from fairseq.notes.spans import NoteSpans, mark_texts
from fairseq.notes.words import NoteWords
from fairseq.text import counting
from fairseq.text.counting import count_words
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers.rules import SubwordMarks


def literal_lines(text: str) -> list[list[tuple[str, int, int]]]:
    """Each line's words as (word, first token, end), token by token."""
    lines = []
    for line in text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n"):
        words: list[tuple[str, int, int]] = []
        word, first, tokens = "", 0, line.split()
        for number, token in enumerate(tokens):
            last = not token.endswith("@@")
            word += token if last else token[:-2]
            if last or number == len(tokens) - 1:
                words.append((word, first, number + 1))
                word, first = "", number + 1
        lines.append(words)
    return lines


def literal_words(text: str) -> list[tuple[str, int, int]]:
    """The corpus's words, each line's end included as ``\\n``."""
    found, offset = [], 0
    for words in literal_lines(text):
        found += [(word, first + offset, end + offset) for word, first, end in words]
        offset += words[-1][2] + 1 if words else 1
        found.append(("\n", offset - 1, offset))
    return found


def write(text: str, folder: Path, low: int = 1, high: int = 3, workers: int = 1) -> NoteWords | None:
    """Preprocess *text* as ``folder/train``; None where no word is in range."""
    path = folder / "text.txt"
    path.write_bytes(text.encode())
    dictionary = Dictionary()
    dictionary.update(count_words([str(path)]))
    dictionary.finalize(nwords=10)
    dictionary.save(folder / "dict.txt")
    try:
        notes = NoteWords.choose(count_words([str(path)], workers, SubwordMarks()), low, high, dictionary)
    except UserError:
        return None
    notes.save(folder)
    mark_texts({folder / "train": str(path)}, notes, dictionary, SubwordMarks(), workers)
    with splitters(workers) as pool:
        Binarizer(dictionary, pool).binarize(str(path), folder / "train")
    return notes


def literal_spans(
    text: str, notes: NoteWords, windows: list[tuple[int, int]]
) -> tuple[list[list[int]], list[list[bool]]]:
    """Spans and word starts of windows (start, length), one word and row at a time."""
    words = literal_words(text)
    spans = [
        [row, first - start, end - start, notes.words.index(word)]
        for row, (start, length) in enumerate(windows)
        for word, first, end in words
        if word in notes.words and start <= first and end <= start + length
    ]
    firsts = {first for _, first, _ in words} | {-1}
    longest = max(length for _, length in windows)
    begins = [[start + column in firsts and column < length for column in range(longest)] for start, length in windows]
    return spans, begins


pieces = st.lists(
    st.sampled_from(["a@@ ", "b@@ ", "a ", "b ", "c ", "@@ ", "a@@@@ ", "\t", "\n", "\r\n", "<unk> ", "</s> ", "é"]),
    min_size=1,
    max_size=50,
).map("".join)


@settings(deadline=None, max_examples=60)
@given(text=pieces, block=st.integers(1, 9), chunk=st.integers(1, 30), data=st.data())
def test_spans_are_the_rare_words_that_lie_whole_in_a_window(
    text: str, block: int, chunk: int, data: st.DataObject
) -> None:
    counts = Counter(word for word, _, _ in literal_words(text) if word != "\n")
    if not any(counts):
        return
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "BLOCK_BYTES", block)
        patch.setattr(counting, "CHUNK_BYTES", chunk)
        folder = Path(name)
        notes = write(text, folder)
        rare = {word: n for word, n in counts.items() if n <= 3 and word not in ("<unk>", "</s>", "")}
        if notes is None:
            assert not rare
            return
        assert dict(zip(notes.words, notes.counts, strict=True)) == rare
        assert list(notes.words) == sorted(rare, key=lambda word: (-rare[word], word))
        reader = NoteSpans(folder / "train")
        tokens = len(IndexedCorpus(str(folder / "train")).tokens)
        windows = data.draw(
            st.lists(
                st.integers(-1, tokens - 1).flatmap(lambda s: st.tuples(st.just(s), st.integers(1, tokens - s))),
                min_size=1,
                max_size=4,
            )
        )
        starts, lengths = map(np.array, zip(*windows, strict=True))
        spans, begins = literal_spans(text, notes, windows)
        assert reader.spans(starts, lengths).tolist() == spans
        assert reader.spans(starts, lengths).dtype == np.int64
        column = np.arange(lengths.max())
        inside = column < lengths[:, None]
        assert (reader.begins_at(starts[:, None] + column) & inside).tolist() == begins


TEXT = "the fi@@ sh sw@@ im@@ s\nthe bird\nfi@@ sh fi@@ sh the end@@\nthe end the\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(TEXT, tmp_path, 2, 3)
    return tmp_path


def test_whole_words_are_counted_and_written_by_falling_count(folder: Path) -> None:
    assert (folder / "notes.txt").read_text() == "fish 3\nend 2\n"


def test_a_word_that_the_windows_edge_cuts_has_no_span(folder: Path) -> None:
    reader = NoteSpans(folder / "train")
    # 0 the 1 fi@@ 2 sh 3 sw@@ 4 im@@ 5 s 6 </s> 7 the 8 bird 9 </s> 10 fi@@ 11 sh 12 fi@@ 13 sh 14
    # the 15 end@@
    assert reader.spans(np.array([10]), np.array([4])).tolist() == [[0, 0, 2, 0], [0, 2, 4, 0]]
    assert reader.spans(np.array([11, 10]), np.array([4, 3])).tolist() == [[0, 1, 3, 0], [1, 0, 2, 0]]
    assert reader.spans(np.array([-1]), np.array([4])).tolist() == [[0, 2, 4, 0]]
    assert reader.spans(np.array([2]), np.array([6])).tolist() == []


def test_rows_may_read_the_corpus_in_another_order_of_lines(folder: Path) -> None:
    reader = NoteSpans(folder / "train")
    places = np.array([[9, 10, 11, 0, 1, 2, 3]])
    assert reader.spans_at(places, np.array([6])).tolist() == [[0, 1, 3, 0], [0, 4, 6, 0]]


def test_corpora_read_one_after_the_other_are_one(folder: Path) -> None:
    for kind in ("bin", "idx", "notes.bin", "notes.idx"):
        (folder / f"train1.{kind}").write_bytes((folder / f"train.{kind}").read_bytes())
    one, two = NoteSpans(folder / "train"), NoteSpans([folder / "train", folder / "train1"])
    n = len(one)
    assert len(two) == 2 * n
    whole = one.spans(np.array([0]), np.array([n]))
    assert two.spans(np.array([0]), np.array([2 * n])).tolist() == [*whole.tolist(), *(whole + [0, n, n, 0]).tolist()]


def test_words_of_other_tokenizers_follow_their_rule(tmp_path: Path) -> None:
    class Underscores:
        def group(self, tokens: list[str]) -> tuple[list[str], list[int]]:
            words: list[str] = []
            lengths: list[int] = []
            for token in tokens:
                if token.startswith("▁") or not words:
                    words.append(token.removeprefix("▁"))
                    lengths.append(1)
                else:
                    words[-1] += token
                    lengths[-1] += 1
            return words, lengths

    path = tmp_path / "text.txt"
    path.write_text("▁the ▁fi sh\n▁fi sh ▁the ▁the\n")
    counter = count_words([str(path)], rule=Underscores())
    assert counter == {"the": 3, "fish": 2}
    dictionary = Dictionary()
    dictionary.update(count_words([str(path)]))
    dictionary.save(tmp_path / "dict.txt")
    notes = NoteWords.choose(counter, 2, 2, dictionary)
    notes.save(tmp_path)
    mark_texts({tmp_path / "train": str(path)}, notes, dictionary, Underscores())
    Binarizer(dictionary).binarize(str(path), tmp_path / "train")
    assert NoteSpans(tmp_path / "train").spans(np.array([0]), np.array([9])).tolist() == [[0, 1, 3, 0], [0, 4, 6, 0]]


@given(st.lists(st.sampled_from(["a", "b@@", "@@", "c@@@@", "d@@@"]), min_size=1, max_size=9))
def test_marks_join_subwords_as_subword_nmt_undoes_them(tokens: list[str]) -> None:
    words, lengths = SubwordMarks().group(tokens)
    assert sum(lengths) == len(tokens) and len(words) == len(lengths) and all(lengths)
    assert "".join(words) == "".join(token[:-2] if token.endswith("@@") else token for token in tokens)


def test_numbers_are_stored_in_the_fewest_bytes(tmp_path: Path) -> None:
    write("".join(f"w{n} " for n in range(300)) + "\n", tmp_path)
    assert (tmp_path / "train.notes.bin").stat().st_size == 2 * 301
    assert NoteSpans(tmp_path / "train").spans(np.array([250]), np.array([9])).shape == (9, 4)


@pytest.mark.parametrize("kind", ["notes.txt", "train.notes.bin", "train.notes.idx", "dict.txt"])
def test_truncated_or_changed_files_are_refused_in_one_line(folder: Path, kind: str) -> None:
    path = folder / kind
    for content in (path.read_bytes()[:-3], path.read_bytes() + b"x 9\n", b""):
        path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            NoteSpans(folder / "train")
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_notes_of_another_dictionary_or_corpus_are_refused(folder: Path) -> None:
    other = Dictionary()
    other.update({"the": 1})
    with pytest.raises(UserError, match=r"train\.notes\.idx: made for another dict\.txt or notes\.txt"):
        NoteSpans(folder / "train", other)
    (folder / "text.txt").write_text("the end\n")
    Binarizer(Dictionary.load(folder / "dict.txt")).binarize(str(folder / "text.txt"), folder / "train")
    with pytest.raises(UserError, match="made for 21 tokens, but .* has 3"):
        NoteSpans(folder / "train")


def test_without_notes_the_command_that_makes_them_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"notes\.txt: file not found; run fairseq-preprocess --notes"):
        NoteSpans(tmp_path / "train")
