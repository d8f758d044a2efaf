"""Data folders carry sizes and checksums: no damaged byte reaches training."""

from __future__ import annotations

import os
import random
import shutil
import zlib
from pathlib import Path

import pytest
import runs

from fairseq.config import options
from fairseq.data import indexed_dataset
from fairseq.data.folders import load_dictionary, open_corpus
from fairseq.errors import UserError
from fairseq.notes.spans import NoteSpans
from fairseq.system import checksums
from fairseq.training import loop
from fairseq_cli import preprocess
from fairseq_cli.preprocess import get_preprocessing_parser

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
    """Read what training reads of a folder before its first update."""
    dictionary = load_dictionary(folder)
    for split in ("train", "valid"):
        open_corpus(folder, split, dictionary)
        NoteSpans(folder / split, dictionary)


def test_the_side_file_lists_size_and_crc_of_every_file(folder):
    lines = (folder / "checksums.txt").read_text().splitlines()
    assert [line.split()[2] for line in lines] == sorted(
        {p.name for p in folder.iterdir()} - {"checksums.txt", "preprocess.log"}
    )
    for line in lines:
        crc, size, name = line.split()
        content = (folder / name).read_bytes()
        assert (int(crc, 16), int(size)) == (zlib.crc32(content), len(content))
    read_all(folder)


def test_every_flipped_bit_and_truncation_is_found_before_training(folder, tmp_path):
    chance = random.Random(1)
    names = sorted(path.name for path in folder.iterdir() if path.name not in ("checksums.txt", "preprocess.log"))
    for number in range(120):
        name = names[number % len(names)]
        content = bytearray((folder / name).read_bytes())
        if number % 4:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        else:
            del content[chance.randrange(len(content)) :]
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "bad")
        (tmp_path / "bad" / name).write_bytes(content)
        with pytest.raises(UserError, match=str(tmp_path / "bad")):
            read_all(tmp_path / "bad")


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


def test_the_tokens_are_read_once_for_ids_and_checksum(folder, monkeypatch):
    read: list[int] = []
    run = indexed_dataset.StoredArray._read

    def count(self, first, last):
        if self.path.endswith("train.bin"):
            read.append(last - first)
        return run(self, first, last)

    monkeypatch.setattr(indexed_dataset.StoredArray, "_read", count)
    corpus = open_corpus(folder, "train", load_dictionary(folder))
    assert sum(read) == len(corpus.tokens)


@pytest.mark.parametrize("split, change", [("valid", "truncate"), ("test", "truncate"), ("valid", "overwrite")])
def test_data_that_change_during_a_run_end_it_in_one_line(tmp_path, monkeypatch, split, change):
    data = shutil.copytree(runs.DATA, tmp_path / "data")
    step = loop.update

    def spoil(state, samples, ask):
        path = data / f"{split}.bin"
        if state.num_updates == 2 and change == "truncate":
            os.truncate(path, 8)
        elif state.num_updates == 2:
            path.write_bytes(b"\xff" * path.stat().st_size)
        return step(state, samples)

    monkeypatch.setattr(loop, "update", spoil)
    with pytest.raises(UserError, match=f"{data}/{split}.bin: changed while it was read"):
        runs.train(tmp_path / "run", runs.BASELINE, "--max-epoch 1", data=data)
