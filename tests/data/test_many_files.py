"""A corpus in many files: few descriptors, few reads, little memory, and each file checked once."""

from __future__ import annotations

import gc
import logging
import os
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fairseq.data.folders import corpus_prefixes, load_dictionary, open_corpus, reopen_corpus
from fairseq.data.indexed_dataset import IndexedWriter
from fairseq.data.masking import MaskedBlocks, Masking, special_symbols
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError
from fairseq.notes.blocks import NotedBlocks
from fairseq.notes.spans import NoteSpans, reopen_spans, write_spans
from fairseq.notes.words import NoteWords
from fairseq.system import checksums, stored_array
from fairseq.text.dictionary import Dictionary

WORDS = NoteWords(tuple(f"w{n}" for n in range(20)), (3,) * 20)
LINE = 10  # tokens


def data_folder(path: Path, shards: int, lines: int) -> Path:
    """A data folder with notes: *lines* lines of *LINE* tokens in *shards* files; the text is the
    same for any."""
    path.mkdir()
    dictionary = Dictionary()
    dictionary.update(dict.fromkeys(WORDS.words, 3))
    dictionary.save(path / "dict.txt")
    WORDS.save(path)
    tokens = np.random.default_rng(1).integers(4, 24, (lines, LINE)).astype("<u2")
    tokens[:, -1] = dictionary.eos()
    for number, part in enumerate(np.array_split(tokens, shards)):
        prefix = path / f"train{number or ''}"
        flat = part.ravel()
        with IndexedWriter(prefix, part.dtype) as writer:
            writer.add(flat, np.full(len(part), LINE))
        numbers = np.where(flat % 3 == 0, np.maximum(flat, 4) - 3, 0)
        write_spans(prefix, WORDS, dictionary, [(numbers, np.ones(len(flat), bool))])
    checksums.record(path, path)
    return path


@pytest.fixture(autouse=True, scope="module")
def no_flushing() -> Iterator[None]:
    """Hundreds of small files are written faster without waiting for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same text in 1 and in 100 files."""
    root = tmp_path_factory.mktemp("data")
    return {shards: data_folder(root / str(shards), shards, 2000) for shards in (1, 100)}


def noted_blocks(folder: Path) -> NotedBlocks:
    dictionary = load_dictionary(folder)
    corpus = open_corpus(folder, "train", dictionary, combine=True)
    blocks = TokenBlocks(corpus, 64, "none", pad=dictionary.pad(), eos=dictionary.eos())
    masking = Masking(1, 0.15, 0.1, 0.1, dictionary.unk(), special_symbols(dictionary))
    spans = NoteSpans(corpus_prefixes(folder, "train", combine=True))
    return NotedBlocks(MaskedBlocks(blocks, masking, dictionary.bos()), spans)


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """A limit of descriptors well below the number of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 80
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_files_than_descriptors_are_read(tmp_path: Path, few_descriptors: int) -> None:
    shards = few_descriptors + 20
    folder = data_folder(tmp_path / "data", shards, 7 * shards)
    rows = noted_blocks(folder)
    whole = np.asarray(rows.blocks.blocks.corpus.tokens)
    for indices in np.array_split(np.random.default_rng(2).permutation(len(rows)), 4):
        assert rows.batch(indices)["nsentences"] == len(indices)
        target = rows.blocks.blocks.batch(indices)["target"].numpy()
        for row, index in zip(target, indices.tolist(), strict=True):
            here = whole[64 * index : 64 * index + 64]
            assert row[: len(here)].tolist() == here.tolist()


def test_a_batch_with_notes_takes_few_reads_however_many_files(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    preadv = os.preadv

    def counted(*args: object) -> int:
        reads.append(1)
        return preadv(*args)  # type: ignore[arg-type]

    indices = np.random.default_rng(3).permutation(300)[:32]
    found = {}
    for shards, folder in folders.items():
        rows = noted_blocks(folder)
        with monkeypatch.context() as patch:
            reads.clear()
            patch.setattr(os, "preadv", counted)
            sample = rows.batch(indices)
        found[shards] = len(reads), sample["net_input"]["spans"].tolist(), sample["subsets"]["rare"].tolist()
    assert found[1][1:] == found[100][1:] and found[1][1]
    # Tokens, word numbers (twice) and beginnings of a row are one read each, two where it lies in
    # two files.
    assert found[1][0] <= 4 * 32
    assert found[100][0] <= 2 * 4 * 32


def test_checksums_and_the_fingerprint_of_notes_are_computed_once_a_folder(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"checksums.txt": 0, "fingerprint": 0}
    read, fingerprint = checksums.read_named, NoteWords.fingerprint

    def count_read(path: str | Path, advice: str) -> bytes:
        calls["checksums.txt"] += Path(path).name == "checksums.txt"
        return read(path, advice)

    def count_fingerprint(self: NoteWords, dictionary: Dictionary) -> bytes:
        calls["fingerprint"] += 1
        return fingerprint(self, dictionary)

    monkeypatch.setattr(checksums, "read_named", count_read)
    monkeypatch.setattr(NoteWords, "fingerprint", count_fingerprint)
    noted_blocks(folders[100])
    assert calls["fingerprint"] == 1
    assert calls["checksums.txt"] <= 6, "dictionary (twice), notes.txt, corpus, spans"


def test_spans_that_were_checked_are_reopened_without_reading_their_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = data_folder(tmp_path / "data", 2, 40)
    prefixes = corpus_prefixes(folder, "train", combine=True)
    spans = reopen_spans(prefixes, WORDS)
    with monkeypatch.context() as patch:
        for kind, method in ((NoteWords, "fingerprint"), (NoteWords, "load"), (Dictionary, "load")):
            patch.setattr(kind, method, None)
        assert reopen_spans(prefixes, WORDS) is reopen_spans(prefixes) is spans
    monkeypatch.setattr("fairseq.notes.spans.SPANS", {})
    assert reopen_spans(prefixes) is not spans


def test_spans_are_checked_again_for_other_words_than_they_were_checked_for(tmp_path: Path) -> None:
    folder = data_folder(tmp_path / "data", 1, 40)
    (folder / "checksums.txt").unlink()
    prefixes = corpus_prefixes(folder, "train", combine=True)
    spans = reopen_spans(prefixes)
    fewer = NoteWords(WORDS.words[1:], WORDS.counts[1:])
    with pytest.raises(UserError, match=r"train\.notes\.idx: made for another dict\.txt or notes\.txt"):
        reopen_spans(prefixes, fewer)
    for name in ("dict.txt", "notes.txt"):
        content = (folder / name).read_text()
        (folder / name).write_text("".join(content.splitlines(keepends=True)[1:]))
        with pytest.raises(UserError, match=r"train\.notes\.idx: made for another dict\.txt or notes\.txt"):
            reopen_spans(prefixes)
        (folder / name).write_text(content)
    assert reopen_spans(prefixes).fingerprint == spans.fingerprint


@pytest.mark.parametrize("kind", ["bin", "idx", "notes.bin", "notes.idx"])
def test_a_new_time_stamp_of_a_file_ends_nothing_and_a_new_content_does(tmp_path: Path, kind: str) -> None:
    folder = data_folder(tmp_path / "data", 2, 40)
    rows = noted_blocks(folder)
    sizes = rows.blocks.blocks.corpus.sizes
    before = rows.batch(np.array([0, 3]))["rare_words"].tolist(), sizes[3:9].tolist()
    path = folder / f"train.{kind}"
    os.utime(path, ns=(5, 5))
    assert (rows.batch(np.array([0, 3]))["rare_words"].tolist(), sizes[3:9].tolist()) == before
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(UserError, match=f"{path}: changed while it was read"):
        rows.batch(np.array([0, 3])), sizes[3:9]


def test_a_file_takes_at_most_a_kilobyte(tmp_path: Path) -> None:
    folder = data_folder(tmp_path / "data", 300, 300)
    dictionary, opened = load_dictionary(folder), {}
    used = {}
    open_corpus(folder, "train", dictionary, combine=True)  # the files that are kept open, and what is imported late
    for shards in (100, 300):
        (folder / "train100.idx").rename(folder / "hidden") if shards == 100 else (folder / "hidden").rename(
            folder / "train100.idx"
        )
        gc.collect()
        tracemalloc.start()
        opened[shards] = open_corpus(folder, "train", dictionary, combine=True)
        gc.collect()
        used[shards] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert used[300] - used[100] <= 200 * 1024


def test_files_are_read_once_by_all_epochs_and_stages_and_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = data_folder(tmp_path / "data", 3, 30)
    dictionary, read = load_dictionary(folder), stored_array.StoredArray._read
    files: list[str] = []

    def note(self: stored_array.StoredArray, first: int, last: int) -> np.ndarray:
        files.append(Path(self.path).name)
        return read(self, first, last)

    monkeypatch.setattr(stored_array.StoredArray, "_read", note)
    prefixes = corpus_prefixes(folder, "train", combine=True)
    for _ in range(3):
        reopen_corpus(folder, "train", dictionary, combine=True)
        reopen_spans(prefixes)
    assert sorted(name for name in files if name.endswith("bin")) == sorted(
        f"train{number}.{kind}" for number in ("", 1, 2) for kind in ("bin", "notes.bin")
    )
    content = bytearray((folder / "train1.bin").read_bytes())
    content[8] ^= 1
    (folder / "train1.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"train1\.bin: its content differs from checksums\.txt"):
        reopen_corpus(folder, "train", dictionary, combine=True)


def test_a_check_that_takes_long_is_logged(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dictionary = load_dictionary(folders[100])
    with caplog.at_level(logging.INFO):
        open_corpus(folders[100], "train", dictionary, combine=True)
        assert "checked" not in caplog.text
        monkeypatch.setattr(checksums, "INTERVAL", 0.0)
        open_corpus(folders[100], "train", dictionary, combine=True)
    assert f"{folders[100]}: checked 0.0 of 0.0 GB" in caplog.text
