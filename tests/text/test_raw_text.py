"""Raw text: every format gives the same lines, whatever the size of the blocks; damaged files are
named."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mistakes import user_error

from fairseq.errors import UserError
from fairseq.text import raw_text
from fairseq.text.raw_text import TextFormat, check_raw, format_of, lines_of, read_blocks

TEXT = "A first line.\n\n  Möbius' line \nlast without end"


def read(path: Path | str, form: TextFormat | None = None) -> list[str]:
    """The lines of a file, those of a line in several blocks joined."""
    form = form or format_of(str(path), "text", False)
    lines: list[str] = []
    goes_on = False
    for block in read_blocks(str(path), form):
        found = lines_of(block, form)
        lines[len(lines) :] = [lines.pop() + found[0], *found[1:]] if goes_on and found else found
        goes_on = block.unfinished
    return lines


def zstd(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data))


COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    ".txt": bytes,
    ".txt.gz": gzip.compress,
    ".txt.xz": lzma.compress,
    ".txt.zst": zstd,
    ".txt.bz2": bz2.compress,
}


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_compressed_files_are_read_by_their_suffix(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(COMPRESSED[suffix](TEXT.encode()))
    assert read(path) == TEXT.split("\n")


@pytest.mark.parametrize("suffix", list(COMPRESSED)[1:])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_damaged_archives_are_named(suffix: str, damage: str, tmp_path: Path) -> None:
    path = tmp_path / f"text{suffix}"
    data = COMPRESSED[suffix](TEXT.encode() * 99)
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"not an archive at all")
    with pytest.raises(UserError, match=rf"text{suffix}: not a whole .* file") as caught:
        read(path)
    assert "\n" not in str(caught.value)


text = st.lists(st.sampled_from([*"abé世 \n\r", "\r\n", "long" * 6, "\n\n"]), min_size=1, max_size=50).map("".join)


@settings(deadline=None, max_examples=150)
@given(text=text, block=st.integers(4, 40), longest=st.integers(4, 20))
@example(text="aaa\r\r世", block=4, longest=4)
def test_lines_do_not_depend_on_blocks(text: str, block: int, longest: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_text, "BLOCK_BYTES", block)
        patch.setattr(raw_text, "LONGEST_LINE", longest)
        path = Path(folder) / "text.txt"
        path.write_bytes(text.encode())
        expected = text.replace("\r\n", "\n").replace("\r", "\n")
        assert read(path) == expected.removesuffix("\n").split("\n")
        assert max(len(found.data) for found in read_blocks(str(path), TextFormat())) <= block + 2 * longest


def test_a_line_without_end_is_cut_at_a_space_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_text, "LONGEST_LINE", 10)
    (tmp_path / "t.txt").write_text("some words of a line\nnext")
    blocks = list(read_blocks(str(tmp_path / "t.txt"), TextFormat()))
    assert [(block.data, block.unfinished) for block in blocks] == [
        (b"some ", True), (b"words of a ", True), (b"line\nnext", False),
    ]  # fmt: skip


@pytest.mark.parametrize("block", [8, 1 << 20])
def test_hard_wrapped_paragraphs_become_lines(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_text, "BLOCK_BYTES", block)
    (tmp_path / "book.txt").write_bytes(b"\n\nA first\r\n  paragraph.\r\n \t\r\n\r\nThe next\none.\n\n")
    assert read(tmp_path / "book.txt", TextFormat(join_lines=True)) == ["A first paragraph.", "The next one."]


def test_json_lines_give_the_lines_of_a_field(tmp_path: Path) -> None:
    rows = [{"body": "one\ntwo\n", "id": 1}, {"body": "", "id": 2}, {"body": "drei \ud83d"}]
    path = tmp_path / "text.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n\n" for row in rows).encode()))
    assert read(path, format_of(str(path), "body", False)) == ["one", "two", "", "drei ?"]
    with user_error(r"line 1: no text in field 'text', found fields body, id; see --text-field"):
        read(path)


@pytest.mark.parametrize(
    "row, found",
    [
        ("3", "no JSON object"),
        *(('{"text": 3}', "int"), ('{"text": ["a"]}', "list"), ('{"text": null}', "null"), ('{"a": 1}', "fields a")),
    ],
)
def test_rows_without_text_are_named(row: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + row + "\n")
    with pytest.raises(UserError, match=f"a.jsonl: line 2: no text in field 'text', found {found};"):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": "broken', "line 2: not valid JSON .*; write one object per line"),
        ("[1]", "is a JSON array; write one object per line"),
    ],
)
def test_broken_rows_and_arrays_are_called_so(row: str, message: str, tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json", "a.ndjson"):
        (tmp_path / name).write_text('{"text": "good"}\n' + row + "\n")
        with pytest.raises(UserError, match=f"{name}: {message}"):
            read(tmp_path / name)


def test_columns_of_csv_and_tsv_are_read_by_the_names_in_their_first_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfid,text\r\n1,"two\nlines, ""quoted"""\r\n\r\n2,plain\r\n')
    assert read(tmp_path / "a.csv") == ["two", 'lines, "quoted"', "plain"]
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b'body\tid\nan "open quote\t1\n'))
    assert read(tmp_path / "b.tsv.gz", format_of(str(tmp_path / "b.tsv.gz"), "body", False)) == ['an "open quote']
    for content, message in (
        ("id,body\n1,x\n", "a.csv: no column 'text' in the first line, found id, body; see --text-field"),
        ("id,text\n1,x\n2\n", "a.csv: line 3: 1 columns where the first line has 2"),
        ('id,text\n1,"x\n', "a.csv: line 2: not a row of a table .unexpected end of data"),
    ):
        (tmp_path / "a.csv").write_text(content)
        with user_error(message):
            read(tmp_path / "a.csv")


def archive(kind: str) -> bytes:
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as packed:
            packed.writestr("a.txt", TEXT)
    else:
        with tarfile.open(fileobj=file, mode="w:gz" if kind == "tgz" else "w") as tape:
            tape.addfile(tarfile.TarInfo("a.txt"))
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.zip", archive("zip"), "a ZIP archive or an office document"),
        ("a.docx", archive("zip"), "a ZIP archive or an office document"),
        ("a.tar.gz", archive("tgz"), "an archive; unpack it"),
        ("a.txt", archive("tar"), "an archive; unpack it"),
        ("a.pdf", b"%PDF-1.7\n", "a PDF; extract its text"),
        ("a.txt", gzip.compress(b"text"), "compressed; let its name end in .gz"),
        ("a.txt", bz2.compress(b"text"), "compressed; let its name end in .bz2"),
        ("a.txt", "text".encode("utf-16"), "UTF-16; convert the text to UTF-8"),
    ],
    # Archives hold the time: names of tests would differ between processes.
    ids=lambda value: "content" if isinstance(value, bytes) else None,
)
def test_files_that_are_no_text_are_refused_by_their_kind(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: is {message}"):
        check_raw(str(tmp_path / name))


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_text, "BLOCK_BYTES", 4)
    (tmp_path / "a.txt").write_bytes(b"good\nfine\nMot\xf6r\nrest\n")
    with pytest.raises(UserError, match="a.txt: line 3: 0xf6 is not UTF-8"):
        read(tmp_path / "a.txt")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfword\n")
    assert read(tmp_path / "a.txt") == ["word"]


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "a.zst").write_bytes(b"x")
    with pytest.raises(UserError, match=r"a.zst: needs the package zstandard; pip install sentencepiece zstandard"):
        read(tmp_path / "a.zst")
