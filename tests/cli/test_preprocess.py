"""Preprocessing: fairseq's bytes for any number of processes, awkward text, and nothing left behind
by a failure."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import user_error
from preprocessing import files, refused, run, text_file

from fairseq.config import options
from fairseq.data import binarizer
from fairseq.data.binarizer import Binarizer
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.text import counting
from fairseq.text.counting import count_words
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenization import useful_workers
from fairseq_cli import preprocess
from fairseq_cli.preprocess import get_preprocessing_parser

GOLDEN = Path(__file__).parents[1] / "golden" / "language_model"
TEXT = {f"{split}pref": str(GOLDEN / "text" / f"{split}.txt") for split in ("train", "valid", "test")}


def plain_lines(path: str) -> list[list[str]]:
    """The words of each line, as Python's text files read them."""
    with open(path, encoding="utf-8") as file:
        return [line.split() for line in file]


@pytest.mark.parametrize("workers", [1, 3])
def test_golden_files_come_out_byte_for_byte(tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "data-bin", nwordssrc=1200, workers=workers, **TEXT)
    assert files(tmp_path / "data-bin") == files(GOLDEN / "data-bin")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Dictionary: 1200 types"
    assert printed[1] == f"{TEXT['trainpref']}: 636 sents, 16664 tokens, 6.92% replaced by <unk>"


text_pieces = st.lists(
    st.sampled_from(
        [*"aé世\U0001f600 \t\n\r", "\r\n", "\x85", "\u2028", "\u00a0", "\x1c", "<unk>", "</s>", "<pad>", " long" * 9]
    ),
    min_size=1,
    max_size=60,
).map("".join)


@settings(deadline=None, max_examples=100)
@given(text=text_pieces, block=st.integers(1, 9), chunk=st.integers(1, 30))
def test_text_is_read_as_pythons_text_files_are_however_it_is_cut(text: str, block: int, chunk: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "BLOCK_BYTES", block)
        patch.setattr(counting, "CHUNK_BYTES", chunk)
        path = text_file(Path(folder), text)
        lines = plain_lines(path)
        words = Counter(word for line in lines for word in line)
        assert count_words([path]) == words
        if not words:
            return
        dictionary = Dictionary()
        dictionary.update({"a": 1, "世": 1})
        summary = Binarizer(dictionary).binarize(path, f"{folder}/out")
        corpus = IndexedCorpus(f"{folder}/out")
        expected = [dictionary.encode(" ".join(line)).tolist() for line in lines]
        assert corpus.sizes.tolist() == [len(line) for line in expected]
        assert np.asarray(corpus.tokens).tolist() == sum(expected, [])
        assert (summary.sentences, summary.tokens) == (len(expected), len(corpus.tokens))
        assert summary.replaced == sum(n for word, n in words.items() if word not in dictionary or word == "<pad>")


def test_any_number_of_processes_agrees_on_awkward_text(tmp_path: Path) -> None:
    rng = np.random.RandomState(0)
    pieces = ["a", "b", "é", " ", " ", "\t", "\n", "\n\n", "\r\n", "\r", "\u2028", "<unk>", "word" * 50]
    path = text_file(tmp_path, "".join(rng.choice(pieces, 4000)) + " end without newline")
    run(tmp_path / "one", trainpref=path, workers=1)
    run(tmp_path / "many", trainpref=path, workers=3)
    assert files(tmp_path / "one") == files(tmp_path / "many")
    assert len(IndexedCorpus(str(tmp_path / "many" / "train"))) == len(plain_lines(path))


def test_there_are_no_more_processes_than_cores_and_mebibytes_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    small, large = text_file(tmp_path, "a\n"), text_file(tmp_path, "a b c\n" * 2**19, "large.txt")
    assert [useful_workers(20, texts) for texts in ([small], [small, large], [large] * 9)] == [1, 3, 6]
    assert useful_workers(2, [large]) == 2 and useful_workers(20, None) == 6


def test_many_parts_come_back_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "CHUNK_BYTES", 64)
    path = text_file(tmp_path, "".join(f"w{number} common\n" for number in range(500)))
    run(tmp_path / "out", trainpref=path, workers=2)
    dictionary = Dictionary.load(tmp_path / "out" / "dict.txt")
    tokens = IndexedCorpus(str(tmp_path / "out" / "train")).tokens
    assert [dictionary[token] for token in tokens[::3]] == [f"w{number}" for number in range(500)]


def test_a_line_longer_than_memory_should_hold_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "BLOCK_BYTES", 1 << 10)
    longest = 0
    blocks = binarizer.text_blocks

    def measured(path: str, start: int, end: int) -> Iterator[str]:
        nonlocal longest
        for text in blocks(path, start, end):
            longest = max(longest, len(text))
            yield text

    monkeypatch.setattr(binarizer, "text_blocks", measured)
    run(tmp_path / "out", trainpref=text_file(tmp_path, "ab cd " * 20000 + "\nlast line\n"))
    assert IndexedCorpus(str(tmp_path / "out" / "train")).sizes.tolist() == [40001, 3]
    assert 0 < longest <= 2 << 10


def test_large_dictionaries_are_stored_in_32_bits(tmp_path: Path) -> None:
    words = " ".join(f"w{number}" for number in range(65496))
    run(tmp_path / "out", trainpref=text_file(tmp_path, words + "\n"))
    corpus = IndexedCorpus(str(tmp_path / "out" / "train"))
    assert corpus.tokens.dtype == np.int32 and np.asarray(corpus.tokens).max() == 65499


def test_further_files_get_numbers_and_all_training_files_make_the_dictionary(tmp_path: Path) -> None:
    names = [text_file(tmp_path, text, f"{text[0]}.txt") for text in ("a a b\n", "c c c\n", "d a\n", "e c\n", "f b\n")]
    run(
        tmp_path / "out",
        trainpref=",".join(names[:2]),
        validpref=",".join(names[2:4]),
        testpref=names[4],
        padding_factor=1,
    )
    assert (tmp_path / "out" / "dict.txt").read_text() == "c 3\na 2\nb 1\n"
    expected = {
        "train": [5, 5, 6, 2],
        "train1": [4, 4, 4, 2],
        "valid": [3, 5, 2],
        "valid1": [3, 4, 2],
        "test": [3, 6, 2],
    }
    for split, tokens in expected.items():
        assert np.asarray(IndexedCorpus(str(tmp_path / "out" / split)).tokens).tolist() == tokens
    assert len(files(tmp_path / "out")) == 11


def test_a_given_dictionary_is_used_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given_dictionary = text_file(tmp_path, "b 7\na 7\n", "mine.txt")
    run(tmp_path / "out", validpref=text_file(tmp_path, "a b c <unk>\n"), srcdict=given_dictionary)
    assert (tmp_path / "out" / "dict.txt").read_text() == "b 7\na 7\n"
    assert np.asarray(IndexedCorpus(str(tmp_path / "out" / "valid")).tokens).tolist() == [5, 4, 3, 3, 2]
    assert "1 sents, 5 tokens, 20.0% replaced by <unk>" in capsys.readouterr().out


def test_thresholds_and_padding_reach_the_dictionary(tmp_path: Path) -> None:
    path = text_file(tmp_path, "a a a b b c\n")
    run(tmp_path / "out", trainpref=path, thresholdsrc=2, padding_factor=7, dict_only=True)
    assert files(tmp_path / "out") == {"dict.txt": b"a 3\nb 2\nmadeupword0000 0\n"}


def test_source_language_is_the_ending_of_the_texts_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text_file(tmp_path, "a\n", "text.en")
    run(tmp_path / "out", trainpref=str(tmp_path / "text"), source_lang="en")
    assert sorted(files(tmp_path / "out")) == ["dict.txt", "train.bin", "train.idx"]
    assert "[en] Dictionary: 8 types" in capsys.readouterr().out


def test_running_again_replaces_what_was_there(tmp_path: Path) -> None:
    run(tmp_path / "out", trainpref=text_file(tmp_path, "a\n"))
    run(tmp_path / "out", trainpref=text_file(tmp_path, "b b\n"), padding_factor=1)
    assert (tmp_path / "out" / "dict.txt").read_text() == "b 2\n"
    assert sorted(files(tmp_path / "out")) == ["dict.txt", "train.bin", "train.idx"]


def test_another_text_does_not_replace_a_split_that_a_model_may_have_been_trained_on(tmp_path: Path) -> None:
    out, text, other = tmp_path / "out", text_file(tmp_path, "a\nb\n" * 9), text_file(tmp_path, "b\n", "other.txt")
    run(out, trainpref=text, valid_fraction=0.3)
    message = f"--destdir {out}: its train split is of {text}, not of {other}; give another --destdir, or --overwrite"
    assert message in refused(out, trainpref=other)
    assert f"its valid split is of {text}, not of {other}" in refused(out, trainpref=text, validpref=other)
    # The same text with other settings, and a new split, are no question.
    run(out, trainpref=text, valid_fraction=0.4, padding_factor=1)
    run(out, testpref=other, srcdict=str(out / "dict.txt"))
    (out / "preprocess.log").unlink()  # as beside the files of other programs
    assert "its train split is of an unknown text" in refused(out, trainpref=text)
    run(out, trainpref=other, validpref=other, testpref=other, overwrite=True)
    assert (out / "dict.txt").read_text().splitlines()[0] == "b 1"


def test_whole_words_do_not_replace_subwords_because_a_flag_was_forgotten(tmp_path: Path) -> None:
    out, text = tmp_path / "out", text_file(tmp_path, "a b\nb a\n" * 9)
    run(out, trainpref=text, learn_bpe=270)
    before = files(out)
    assert f"--destdir {out}: was made with a tokenizer; give its flags again" in refused(out, trainpref=text)
    assert files(out) == before
    run(out, trainpref=text, learn_bpe=270)
    run(out, trainpref=text, overwrite=True)
    assert not (out / "tokenization.json").exists()


def test_a_text_of_the_same_name_in_another_folder_is_another_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        text_file(tmp_path / name, f"{name}\n")
    monkeypatch.chdir(tmp_path / "one")
    run(tmp_path / "out", trainpref=text_file(Path(), "one\n"))
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "out", trainpref=text_file(Path("one"), "one\n"))
    monkeypatch.chdir(tmp_path / "two")
    assert f"not of {tmp_path}/two/" in refused(tmp_path / "out", trainpref=text_file(Path(), "two\n"))


def test_splits_of_another_dictionary_are_not_left_beside_a_new_one(tmp_path: Path) -> None:
    first, other = text_file(tmp_path, "a\n"), text_file(tmp_path, "b b\n", "other.txt")
    run(tmp_path / "out", trainpref=first, validpref=first)
    assert "out: valid in it use another dictionary; " in refused(tmp_path / "out", trainpref=other, overwrite=True)
    assert "out: train, valid in it use" in refused(tmp_path / "out", trainpref=other, dict_only=True)
    run(tmp_path / "out", testpref=other, srcdict=str(tmp_path / "out" / "dict.txt"))
    run(tmp_path / "out", trainpref=other, validpref=other, testpref=other, overwrite=True)


SUBWORDS = "the fi@@ sh sw@@ im@@ s\nfi@@ sh fi@@ sh the end\n" * 40 + "a bird fl@@ ies\n" * 3
NOTES = {"notes": True, "note_min_count": 3, "note_max_count": 45}


def test_notes_are_the_same_bytes_for_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(counting, "CHUNK_BYTES", 97)
    text = text_file(tmp_path, SUBWORDS)
    for workers in (1, 2):
        run(tmp_path / str(workers), trainpref=text, validpref=text, workers=workers, **NOTES)
        assert files(tmp_path / str(workers)) == files(tmp_path / "1")
    assert (tmp_path / "1" / "notes.txt").read_text() == "end 40\nswims 40\na 3\nbird 3\nflies 3\n"
    assert {name for name in files(tmp_path / "1") if "notes" in name} == {
        "notes.txt", "train.notes.bin", "train.notes.idx", "valid.notes.bin", "valid.notes.idx",
    }  # fmt: skip
    assert "Notes: 5 words, 89 occurrences in the training text" in capsys.readouterr().out


def test_notes_change_nothing_else(tmp_path: Path) -> None:
    text = text_file(tmp_path, SUBWORDS)
    run(tmp_path / "with", trainpref=text, **NOTES)
    run(tmp_path / "without", trainpref=text)
    written = files(tmp_path / "with")
    assert {name: written[name] for name in written if "notes" not in name} == files(tmp_path / "without")


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"note_min_count": 9, "note_max_count": 8}, "--note-min-count 9: is above --note-max-count 8"),
        ({"note_min_count": 200, "note_max_count": 300}, "no word of the training text occurs that often"),
        ({"notes": False}, "--note-min-count: only --notes counts rare words; add it"),
        ({"notes": False, "note_min_count": 100}, "--note-max-count: only --notes counts rare words; add it"),
        ({"dict_only": True}, "--notes: rare words are counted in the training text; give --trainpref"),
    ],
)
def test_notes_that_cannot_be_made_are_refused(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    assert message in refused(tmp_path / "out", trainpref=text_file(tmp_path, SUBWORDS), **{**NOTES, **flags})


def test_the_log_of_the_folder_has_the_settings_and_output_of_every_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "out", text_file(tmp_path, "b b a\n")
    run(out, trainpref=text)
    run(out, testpref=text, srcdict=str(out / "dict.txt"))
    log = (out / "preprocess.log").read_text()
    settings, output = [line for line in log.splitlines() if line.startswith("settings: ")], capsys.readouterr().out
    lines = [line for line in log.splitlines() if not line.startswith(("settings: ", "texts: "))]
    assert lines == output.splitlines()
    assert output.endswith(f"Wrote preprocessed data to {out}\n")
    assert f"trainpref={text}" in settings[0] and f"testpref={text}" in settings[1]
    with user_error("--thresholdsrc 9: "):
        run(out, trainpref=text, thresholdsrc=9)
    assert (out / "preprocess.log").read_text() == log


def test_fairseqs_values_for_no_threshold_and_no_padding_are_taken(tmp_path: Path) -> None:
    text = text_file(tmp_path, "b b a\n")
    run(tmp_path / "out", trainpref=text, thresholdsrc=-1, padding_factor=0)
    assert (tmp_path / "out" / "dict.txt").read_text() == "b 2\na 1\n"


def test_flags_of_fairseq_that_nothing_reads_are_taken_with_one_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--only-source", "--trainpref", text_file(tmp_path, "b b a\n"), "--destdir", str(tmp_path / "out")]
    words += ["--fp16", "--seed", "7", "-t", "en", "--log-format", "json"]
    preprocess.main(options.parse_args_and_arch(get_preprocessing_parser(), words))
    assert capsys.readouterr().err == "note: --fp16, --seed, -t, --log-format: no effect here\n"


def test_a_word_that_overwrites_a_special_symbol_has_its_own_id_and_line_ends_keep_theirs(tmp_path: Path) -> None:
    source = text_file(tmp_path, "a 3\n</s> 2 #fairseq:overwrite\n<unk> 1 #fairseq:overwrite\n", "dict.txt")
    text = text_file(tmp_path, "a </s> <unk> other\n")
    run(tmp_path / "out", trainpref=text, srcdict=source)
    assert np.asarray(IndexedCorpus(str(tmp_path / "out" / "train")).tokens).tolist() == [4, 5, 6, 3, 2]
    assert Path(source).read_bytes() == (tmp_path / "out" / "dict.txt").read_bytes()
    dictionary = Dictionary.load(tmp_path / "out" / "dict.txt")
    assert (dictionary.eos(), dictionary.unk(), dictionary.index("</s>"), len(dictionary)) == (2, 3, 5, 7)
