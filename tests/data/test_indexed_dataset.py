"""The mmap format: golden files are read right, what is written reads back, damaged files are
refused."""

from __future__ import annotations

import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from fairseq.data import indexed_dataset
from fairseq.data.indexed_dataset import IndexedCorpus, IndexedWriter, token_dtype
from fairseq.errors import UserError
from fairseq.text.dictionary import Dictionary

GOLDEN = Path(__file__).parents[1] / "golden" / "language_model"


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A copy of the golden validation set, to be damaged."""
    for ending in ("bin", "idx"):
        shutil.copyfile(GOLDEN / "data-bin" / f"valid.{ending}", tmp_path / f"valid.{ending}")
    return str(tmp_path / "valid")


def write(prefix: Path | str, lines: list[list[int]], dtype: str = "<u2") -> None:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for line in lines:
            writer.add(np.array(line), np.array([len(line)]))


def test_golden_corpus_is_the_text_word_by_word() -> None:
    dictionary = Dictionary.load(GOLDEN / "data-bin" / "dict.txt")
    corpus = IndexedCorpus(str(GOLDEN / "data-bin" / "valid"))
    lines = (GOLDEN / "text" / "valid.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(corpus) == len(lines)
    for number, line in enumerate(lines):
        ids = corpus.tokens[corpus.offsets[number] : corpus.offsets[number + 1]]
        assert ids.tolist() == dictionary.encode(line).tolist()
        assert corpus.sizes[number] == len(ids)
    assert corpus.offsets[-1] == len(corpus.tokens) == 2670
    corpus.check(dictionary, {})
    corpus.check_lines()


@pytest.mark.parametrize(("symbols", "dtype"), [(1200, "<u2"), (65499, "<u2"), (65500, "<i4"), (300000, "<i4")])
def test_type_of_the_tokens_follows_the_dictionarys_size(symbols: int, dtype: str) -> None:
    assert token_dtype(symbols) == np.dtype(dtype)


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4)])
def test_written_bytes_are_the_formats(tmp_path: Path, dtype: str, code: int) -> None:
    write(tmp_path / "x", [[5, 6, 2], [2], [7, 2]], dtype)
    width = np.dtype(dtype).itemsize
    assert (tmp_path / "x.bin").read_bytes() == np.array([5, 6, 2, 2, 7, 2], dtype).tobytes()
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, code, 3)
    expected += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 3 * width, 4 * width)
    assert (tmp_path / "x.idx").read_bytes() == expected
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_working_in_small_pieces_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [[4] * size for size in (3, 1, 1, 7, 2, 5, 1)]
    write(tmp_path / "whole", lines)
    monkeypatch.setattr(indexed_dataset, "_STEP", 2)
    write(tmp_path / "pieces", lines)
    for ending in ("bin", "idx"):
        assert (tmp_path / f"whole.{ending}").read_bytes() == (tmp_path / f"pieces.{ending}").read_bytes()
    assert IndexedCorpus(str(tmp_path / "pieces")).offsets.tolist() == [0, 3, 4, 5, 12, 14, 19, 20]


def test_a_failure_while_writing_leaves_what_was_there(prefix: str) -> None:
    before = {path.name: path.read_bytes() for path in Path(prefix).parent.iterdir()}
    with pytest.raises(RuntimeError, match="stop"), IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add(np.array([4, 2]), np.array([2]))
        raise RuntimeError("stop")
    assert {path.name: path.read_bytes() for path in Path(prefix).parent.iterdir()} == before


def test_a_failure_at_the_very_end_leaves_what_was_there(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in Path(prefix).parent.iterdir()}

    def no_space(self: IndexedWriter) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(IndexedWriter, "_finish_index", no_space)
    with pytest.raises(UserError, match="No space"):
        write(prefix, [[4, 2]])
    assert {path.name: path.read_bytes() for path in Path(prefix).parent.iterdir()} == before


def test_sizes_that_do_not_add_up_are_a_bug(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 tokens"), IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        writer.add(np.array([4, 5, 2]), np.array([2]))


def test_a_corpus_travels_to_another_process_by_its_name(prefix: str) -> None:
    corpus = IndexedCorpus(prefix)
    travelling = pickle.dumps(corpus)
    assert len(travelling) < 1000
    assert np.array_equal(pickle.loads(travelling).tokens, corpus.tokens)


def edit(path: str, start: int, new: bytes) -> None:
    content = bytearray(Path(path).read_bytes())
    content[start : start + len(new)] = new
    Path(path).write_bytes(bytes(content))


def refused(prefix: str) -> str:
    with pytest.raises(UserError) as caught:
        IndexedCorpus(prefix)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_missing_file_is_named(prefix: str, ending: str) -> None:
    Path(f"{prefix}.{ending}").unlink()
    assert refused(prefix).startswith(f"{prefix}.{ending}: file not found; ")


@pytest.mark.parametrize("ending", ["bin", "idx"])
@pytest.mark.parametrize("change", ["shorter", "longer", "empty"])
def test_a_file_of_the_wrong_length_is_named(prefix: str, ending: str, change: str) -> None:
    path = Path(f"{prefix}.{ending}")
    content = path.read_bytes()
    path.write_bytes({"shorter": content[:-1], "longer": content + b"\0", "empty": b""}[change])
    assert refused(prefix).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("start", "new", "complaint"),
    [
        (0, b"PK", "not a corpus index"),
        (9, b"\x02", "version 2 of the format"),
        (17, b"\x06", "type code 6 is not a token type"),
        (17, b"\x63", "type code 99 is not a token type"),
        (18, b"\xff" * 8, "truncated or corrupt"),
        (18, b"\x00", "truncated or corrupt"),
    ],
)
def test_a_corrupt_index_is_named(prefix: str, start: int, new: bytes, complaint: str) -> None:
    size = Path(f"{prefix}.idx").stat().st_size
    edit(f"{prefix}.idx", start % size, new)
    message = refused(prefix)
    assert message.startswith(f"{prefix}.idx: ") and complaint in message


@pytest.mark.parametrize(("start", "new"), [(26, b"\x02"), (26, struct.pack("<i", -1)), (-16, b"\x00" * 8)])
def test_lines_that_do_not_follow_one_another_are_found_when_asked(prefix: str, start: int, new: bytes) -> None:
    edit(f"{prefix}.idx", start % Path(f"{prefix}.idx").stat().st_size, new)
    with pytest.raises(UserError, match=r"valid\.idx: the lines do not follow one another"):
        IndexedCorpus(prefix).check_lines()


def test_a_corpus_without_lines_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x", [])
    assert "no lines in it" in refused(str(tmp_path / "x"))


@pytest.mark.parametrize(("dtype", "token"), [("<u2", 1200), ("<i4", 70000), ("<i4", -1)])
def test_a_token_outside_the_dictionary_is_found(tmp_path: Path, dtype: str, token: int) -> None:
    dictionary = Dictionary.load(GOLDEN / "data-bin" / "dict.txt")
    write(tmp_path / "x", [[1199] * 5 + [token, 2]], dtype)
    with pytest.raises(UserError, match=f"x.bin: token 5 is number {token}, but the dictionary has 1200 symbols"):
        IndexedCorpus(str(tmp_path / "x")).check(dictionary, {})
