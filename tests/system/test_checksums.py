"""Data folders carry sizes, checksums, and the range and dictionary of their tokens."""

from __future__ import annotations

import random
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

from fairseq.config import options
from fairseq.data import indexed_dataset
from fairseq.data.folders import check_data, load_dictionary, open_corpus
from fairseq.errors import UserError
from fairseq.notes.spans import NoteSpans
from fairseq.system import checksums
from fairseq.text.dictionary import Dictionary
from fairseq_cli import preprocess, validate
from fairseq_cli.preprocess import get_preprocessing_parser
from fairseq_cli.validate import get_validation_parser

TEXT = "the cat sat on the mat\nthe dog sat\nrare words word\n" * 30


def preprocessed(folder: Path) -> Path:
    text = folder / "text"
    text.write_text(TEXT)
    words = ["--only-source", "--trainpref", text, "--validpref", text, "--destdir", folder / "bin"]
    words += ["--notes", "--note-min-count", 20, "--note-max-count", 40]
    preprocess.main(options.parse_args_and_arch(get_preprocessing_parser(), list(map(str, words))))
    return folder / "bin"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preprocessed(tmp_path_factory.mktemp("data"))


def read_all(folder: Path) -> None:
    """Open what training reads of a folder before its first update."""
    dictionary = load_dictionary(folder)
    for split in ("train", "valid"):
        open_corpus(folder, split, dictionary)
        NoteSpans(folder / split, dictionary)


def test_the_side_file_lists_size_and_crc_of_every_file_and_what_tokens_need(folder):
    lines = (folder / "checksums.txt").read_text().splitlines()
    names = [line.split()[2] for line in lines]
    assert names == sorted({p.name for p in folder.iterdir()} - {"checksums.txt", "preprocess.log"})
    dictionary = load_dictionary(folder)
    for line in lines:
        crc, size, name, *tokens = line.split()
        content = (folder / name).read_bytes()
        assert (int(crc, 16), int(size)) == (zlib.crc32(content), len(content))
        is_corpus = name in ("train.bin", "valid.bin")
        assert tokens == ([str(np.frombuffer(content, "<u2").max()), dictionary.digest()] if is_corpus else [])
    read_all(folder)


def test_nothing_of_a_corpus_is_read_when_it_is_opened(folder, monkeypatch):
    """The range of tokens that preprocessing wrote is compared with the dictionary."""
    monkeypatch.setattr(indexed_dataset.IndexedCorpus, "check_tokens", None)
    open_corpus(folder, "train", load_dictionary(folder))


def test_every_flipped_bit_is_found_when_asked_and_every_truncation_before_training(folder, tmp_path):
    chance = random.Random(1)
    names = sorted(path.name for path in folder.iterdir() if path.name not in ("checksums.txt", "preprocess.log"))
    for number in range(60):
        name = names[number % len(names)]
        content = bytearray((folder / name).read_bytes())
        if is_cut := number % 4 == 0:
            del content[chance.randrange(len(content)) :]
        else:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "bad")
        (tmp_path / "bad" / name).write_bytes(content)
        with pytest.raises(UserError, match=str(tmp_path / "bad")):
            check_data(tmp_path / "bad")
        if is_cut:
            with pytest.raises(UserError, match=str(tmp_path / "bad")):
                read_all(tmp_path / "bad")


@pytest.mark.parametrize("words", [["the"], ["the", "a", "cat", "sat", "on", "mat", "dog", "rare", "words", "word"]])
def test_another_dictionary_beside_the_data_is_refused(folder, tmp_path, words):
    """A smaller one, and one of other words that has all ids."""
    data = tmp_path / "bin"
    shutil.copytree(folder, data)
    other = Dictionary()
    other.update(dict.fromkeys(words, 1))
    other.save(data / "dict.txt")
    with pytest.raises(UserError, match="dict.txt: .*differs from checksums.txt"):
        load_dictionary(data)
    message = "the dictionary has" if len(words) == 1 else "train.bin: has the ids of another dictionary"
    with pytest.raises(UserError, match=message):
        open_corpus(data, "train", other)


def test_the_command_that_validates_checks_data(folder, tmp_path, capsys):
    def check(data: Path) -> None:
        validate.main(options.parse_args_and_arch(get_validation_parser(), [str(data), "--check-data"]))

    check(folder)
    assert "train.bin" in capsys.readouterr().out
    shutil.copytree(folder, tmp_path / "bad")
    content = bytearray((folder / "train.bin").read_bytes())
    content[-1] ^= 1
    (tmp_path / "bad" / "train.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"train\.bin: its content differs from checksums\.txt"):
        check(tmp_path / "bad")


def test_a_folder_without_the_side_file_is_read(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "old")
    (tmp_path / "old" / "checksums.txt").unlink()
    read_all(tmp_path / "old")


def test_files_of_another_run_keep_their_lines(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "bin")
    before = (tmp_path / "bin" / "checksums.txt").read_text().splitlines()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "test.bin").write_bytes(b"12345")
    (tmp_path / "new" / "valid.idx").write_bytes(b"1")
    checksums.record(tmp_path / "new", tmp_path / "bin")
    after = (tmp_path / "new" / "checksums.txt").read_text().splitlines()
    assert {line.split()[2] for line in after} == {line.split()[2] for line in before} | {"test.bin"}
    assert len(set(before) - set(after)) == 1, "only valid.idx is new"


@pytest.mark.parametrize("content", [b"x\n", b"\xff\n", b"00 name\n", b"12345678 ten train.bin\n"])
def test_a_damaged_side_file_is_reported(folder, tmp_path, content):
    shutil.copytree(folder, tmp_path / "bad")
    (tmp_path / "bad" / "checksums.txt").write_bytes(content)
    with pytest.raises(UserError, match="checksums.txt: "):
        read_all(tmp_path / "bad")
