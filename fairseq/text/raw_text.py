"""Raw text of files: compressed or not, lines, hard-wrapped paragraphs, JSON lines, columns of
``.csv`` and ``.tsv`` or of other tables, in bounded blocks."""

from __future__ import annotations

import bz2
import csv
import io
import itertools
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from fairseq.errors import UserError
from fairseq.system.opening import BOM, read_errors
from fairseq.text.text_tables import ROWS, SUFFIX, table_rows
from fairseq.text.tokenizers.base import EXTRA, import_package

BLOCK_BYTES = 1 << 20  # read at once
COMPRESSED_BYTES = 1 << 10  # decompressed at once
GZIP = 16 + zlib.MAX_WBITS  # zlib's code for its format with a header of gzip
LONGEST_LINE = 1 << 20  # bytes; a longer line is read in parts
LONGEST_ROW = 1 << 26  # bytes of a row of JSON lines, which is read as a whole
STDIN = "-"  # as the name of a file
BLANKS = b" \t\r\n"
JSON_LINES = (".jsonl", ".ndjson", ".json")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
MAGIC = {  # how files begin that are no text, with what they are and what to do
    b"PK\x03\x04": "a ZIP archive or an office document; give the text in it",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it",
    b"Rar!\x1a\x07": "a RAR archive; unpack it",
    b"%PDF-": "a PDF; extract its text",
    **dict.fromkeys((b"ARROW1", b"\xff\xff\xff\xff"), "an Arrow file; write Parquet, as to_parquet of datasets does"),
    b"\x1f\x8b": "compressed; let its name end in .gz",
    b"BZh91AY&SY": "compressed; let its name end in .bz2",
    b"\xfd7zXZ\x00": "compressed; let its name end in .xz",
    b"\x28\xb5\x2f\xfd": "compressed; let its name end in .zst",
    b"\xff\xfe": "UTF-16; convert the text to UTF-8, as with iconv",
    b"\xfe\xff": "UTF-16; convert the text to UTF-8, as with iconv",
}


@dataclass(frozen=True)
class TextFormat:
    """What the lines of a file are."""

    field: str | None = None  # of JSON lines or a table, whose text has lines of its own; None: a line is a paragraph
    join_lines: bool = False  # whether lines up to a blank one make a paragraph, as in hard-wrapped books


@dataclass(frozen=True)
class Block:
    """Consecutive bytes of a file."""

    path: str  # the file
    first: int  # number of its first line, from 1
    data: bytes  # whole lines but for the ends of a line that is too long; of a table, its rows as JSON lines
    unfinished: bool  # whether the last line goes on in the next block


@dataclass(frozen=True)
class RawCounts:
    """Size of raw text: UTF-8 bytes with one line feed a line,
    words between white space, and lines."""

    bytes: int = 0
    words: int = 0
    lines: int = 0

    @classmethod
    def of(cls, lines: Sequence[str], unfinished: bool = False) -> RawCounts:
        """Return the size of *lines*, of which the last may be unfinished."""
        # The line feed of an unfinished line is counted with the block that ends it.
        complete = len(lines) - (unfinished and bool(lines))
        return cls(len("".join(lines).encode()) + complete, sum(len(line.split()) for line in lines), complete)

    def __add__(self, other: RawCounts) -> RawCounts:
        return RawCounts(self.bytes + other.bytes, self.words + other.words, self.lines + other.lines)


def format_of(path: str, field: str, join_lines: bool) -> TextFormat:
    """Return the format of a file by its name, which may end in a suffix of compression."""
    return TextFormat(field if _has_rows(path) else None, join_lines)


def _has_rows(path: str) -> bool:
    return path.removesuffix(_suffix(path)).endswith((*JSON_LINES, *DELIMITERS, SUFFIX))


def is_plain(path: str) -> bool:
    """Return whether a file is neither compressed nor JSON lines nor a table, by its name."""
    return not _suffix(path) and not _has_rows(path)


def read_blocks(path: str, form: TextFormat, report: Callable[[int], object] = lambda count: None) -> Iterator[Block]:
    """Yield the blocks of a file; memory is bounded but for long JSON lines.

    Args:
        report: called with the bytes of the file,
            as it is on disk, that were read since the last call.

    Raises:
        UserError: the file cannot be read, or is not what its suffix says.
    """
    if path.removesuffix(_suffix(path)).endswith((*DELIMITERS, SUFFIX)):
        yield from _table_blocks(path, form.field or "text", report)
        return
    with read_errors(path, "give a text file"), open(path, "rb") as raw:
        before = 0
        for block in blocks_of(path, _decompressed(raw, path), form):
            yield block
            # By the compressed bytes: the size of the text is not known before its end.
            report(raw.tell() - before)
            before = raw.tell()


def _table_blocks(path: str, field: str, report: Callable[[int], object]) -> Iterator[Block]:
    first, data = 1, bytearray()
    for texts, size in table_rows(path, field) if path.endswith(SUFFIX) else _delimited_rows(path, field):
        number = first + data.count(b"\n")
        for text in texts:
            # As JSON lines: everything behind this point knows one format with a field of text.
            data += json.dumps({field: text}, ensure_ascii=False).encode() + b"\n"
        if len(data) > LONGEST_ROW:
            raise _too_long(path, f"rows from {number}")
        report(size)
        if len(data) >= BLOCK_BYTES:
            yield Block(path, first, bytes(data), False)
            first, data = number + len(texts), bytearray()
    if data:
        yield Block(path, first, bytes(data), False)


def _delimited_rows(path: str, field: str) -> Iterator[tuple[list[str], int]]:
    """The texts in the column *field* of a ``.csv`` or ``.tsv`` file, some rows at once, and the
    bytes of the file that they took."""
    delimiter = DELIMITERS[path.removesuffix(_suffix(path))[-4:]]
    csv.field_size_limit(LONGEST_ROW)
    texts, before = list[str](), 0
    with read_errors(path, "give a text file"), open(path, "rb") as raw:
        lines = lines_as_they_arrive(path, _decompressed(raw, path))
        # Quotes of tab-separated text are those of the text: only .csv has a rule for them.
        rows = csv.reader(
            (text_line(line, number, path) for number, line in enumerate(lines, 1)),
            delimiter=delimiter,
            quoting=csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL,
            strict=True,
        )
        try:
            names = next(rows, [])
            if field not in names:
                known = ", ".join(names)[:200]
                raise UserError(f"{path}: no column {field!r} in the first line, found {known}; see `text_field`")
            column = names.index(field)
            for row in rows:
                if row and len(row) != len(names):
                    raise UserError(
                        f"{path}: line {rows.line_num}: {len(row)} columns where the first line has {len(names)}"
                    )
                if row:
                    texts.append(row[column])
                if len(texts) == ROWS:
                    yield texts, raw.tell() - before
                    texts, before = [], raw.tell()
            yield texts, raw.tell() - before
        except csv.Error as error:
            raise UserError(f"{path}: line {rows.line_num}: not a row of a table ({error}); correct it") from None


def lines_of(block: Block, form: TextFormat) -> list[str]:
    """Return the lines of text of a block, without line ends.

    Raises:
        UserError: the block is not UTF-8 or, of JSON lines, not JSON, or lacks the field.
    """
    text = _decoded(block)
    if form.field is not None:
        return [line for document in _documents(text, block, form.field) for line in document]
    lines = text.removesuffix("\n").split("\n") if text else []
    return _paragraphs(lines) if form.join_lines else lines


def documents_of(block: Block, form: TextFormat) -> list[list[str]]:
    """Return the lines of each document of a block:
    a row of JSON lines, or else a line; see :func:`lines_of`."""
    if form.field is None:
        return [[line] for line in lines_of(block, form)]
    return list(_documents(_decoded(block), block, form.field))


def _decoded(block: Block) -> str:
    try:
        text = block.data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = block.first + block.data.count(b"\n", 0, error.start)
        byte = block.data[error.start : error.start + 1].hex()
        raise UserError(f"{block.path}: line {line}: 0x{byte} is not UTF-8; convert the text, as with iconv") from None
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _suffix(path: str) -> str:
    return next((suffix for suffix in (".gz", ".xz", ".zst", ".bz2") if path.endswith(suffix)), "")


def _decompressed(raw: BinaryIO, path: str) -> BinaryIO:
    suffix = _suffix(path)
    if suffix == ".gz":
        frames = _Frames(raw, path, lambda: zlib.decompressobj(GZIP), b"\0")
    elif suffix == ".xz":
        frames = _Frames(raw, path, lzma.LZMADecompressor, b"\0")
    elif suffix == ".bz2":
        frames = _Frames(raw, path, bz2.BZ2Decompressor, b"\0")
    elif suffix == ".zst":
        library = import_package("zstandard", f"{path}: needs the package zstandard; {EXTRA}")
        frames = _Frames(raw, path, lambda: library.ZstdDecompressor().decompressobj())
    else:
        return raw
    return cast(BinaryIO, io.BufferedReader(frames, BLOCK_BYTES))


class _Frames(io.RawIOBase):
    """Reader of compressed frames one behind the other, to the last byte of the file.

    The packages' own readers ignore what follows a frame, or that its end is missing. Little is
    decompressed at once: 128 KiB of zeros are four bytes of Zstandard.

    Args:
        raw: the file.
        path: its name, for messages.
        new: makes the decompressor of a frame, with ``decompress``, ``eof`` and ``unused_data``.
        padding: bytes that may lie between frames.
    """

    def __init__(self, raw: BinaryIO, path: str, new: Callable[[], object], padding: bytes = b"") -> None:
        self._raw, self._path, self._new, self._padding = raw, path, new, padding
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # Anything but empty, which means the end of the file.
        data = b"start"
        while not self._ready and data:
            data = self._raw.read(COMPRESSED_BYTES)
            self._decompress(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, data: bytes) -> None:
        if not data and self._frame is not None:
            raise _damaged(self._path, "its end is missing")
        ready = []
        while data:
            if self._frame is None:
                data = data.lstrip(self._padding) if self._padding else data
                if not data:
                    break
                self._frame = self._new()
            try:
                ready.append(self._frame.decompress(data))
            # Each package of decompression has errors of its own.
            except Exception as error:
                raise _damaged(self._path, error) from None
            data = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        self._ready = memoryview(b"".join(ready))


def _damaged(path: str, error: object) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(f"{path}: not a whole {_suffix(path)} file ({reason}); compress or download it again")


def lines_as_they_arrive(name: str, file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of an open file, each as soon as it is there and with its line feed.

    Raises:
        UserError: a line is longer than :data:`LONGEST_ROW`; no more than that is read of it.
    """
    for number in itertools.count(1):
        line = file.readline(LONGEST_ROW + 1)
        if len(line) > LONGEST_ROW:
            raise UserError(f"{name}: line {number}: longer than {LONGEST_ROW >> 20} MiB; split it")
        if not line:
            return
        yield line


def decode_line(line: bytes, number: int, errors: str = "strict") -> str:
    """Return line *number* of a text, the first without a byte-order mark.

    Raises:
        UnicodeDecodeError: its ``start`` counts the bytes of the mark too.
    """
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8", errors)
    except UnicodeDecodeError as error:
        error.start += len(line) - len(error.object)
        raise


def text_line(line: bytes, number: int, name: str) -> str:
    """Return line *number* of the text *name*,
    see :func:`decode_line`; UserError if it is not UTF-8."""
    try:
        return decode_line(line, number)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name}: line {number}, byte {error.start + 1}: not UTF-8; convert the text, as with iconv"
        ) from None


def blocks_of(path: str, file: BinaryIO, form: TextFormat) -> Iterator[Block]:
    """Yield the blocks of an open file; *path* is its name in messages."""
    parts: list[bytes] = []
    first = number = 1
    size = 0
    # A row of JSON cannot be parsed in parts, a line of text can.
    limit = LONGEST_LINE if form.field is None else LONGEST_ROW
    while line := file.readline(limit):
        if not size and first == 1:
            line = line.removeprefix(BOM)
        complete = line.endswith(b"\n")
        number += complete
        rest = b""
        if not complete and len(line) == limit:
            if form.field is not None:
                raise _no_rows(path) if line.lstrip().startswith(b"[") else _too_long(path, f"line {number}")
            line, rest = _cut(line)
        parts.append(line)
        size += len(line)
        # A block ends between paragraphs, unless one is so long that memory would not be bounded.
        is_end = complete and not (form.join_lines and line.strip(BLANKS))
        if rest or size >= BLOCK_BYTES and (is_end or size >= 2 * LONGEST_LINE):
            data = b"".join(parts)
            if data:
                # A carriage return at the end is a line end
                # of its own: no line feed follows, see `_cut`.
                yield Block(path, first, data, not is_end if form.join_lines else not data.endswith((b"\n", b"\r")))
            parts, size, first = [rest] * bool(rest), len(rest), number
    if parts:
        yield Block(path, first, b"".join(parts), False)


def _no_rows(path: str) -> UserError:
    return UserError(f"{path}: is a JSON array; write one object per line, as jq -c '.[]' does")


def _too_long(path: str, row: str) -> UserError:
    return UserError(f"{path}: {row}: longer than {LONGEST_ROW >> 20} MiB; split the text of this row")


def _cut(line: bytes) -> tuple[bytes, bytes]:
    """Cut a part of a line behind its last space, or else before its last character."""
    at = line.rfind(b" ") + 1
    if not at:
        at = len(line) - 1
        while at and line[at] & 0xC0 == 0x80:  # inside a character
            at -= 1
    while line[at - 1 : at] == b"\r":  # its line feed may follow
        at -= 1
    return line[:at], line[at:]


def _documents(rows: str, block: Block, field: str) -> Iterator[list[str]]:
    """The lines of text in each row of JSON lines that is not blank."""
    for number, row in enumerate(rows.split("\n"), block.first):
        if not row.strip():
            continue
        try:
            value = json.loads(row)
        except ValueError as error:
            reason = str(error).partition(": line ")[0]  # it counts lines from here
            # The beginning of an array alone is no JSON, either.
            if row.lstrip().startswith("["):
                raise _no_rows(block.path) from None
            raise UserError(
                f"{block.path}: line {number}: not valid JSON ({reason}); write one object per line"
            ) from None
        if isinstance(value, list):
            raise _no_rows(block.path)
        text = value.get(field) if isinstance(value, dict) else None
        if not isinstance(text, str):
            known = f"fields {', '.join(map(str, value))}"[:100] if isinstance(value, dict) else "no JSON object"
            if isinstance(value, dict) and field in value:
                known = "null" if text is None else type(text).__name__
            raise UserError(f"{block.path}: line {number}: no text in field {field!r}, found {known}; see `text_field`")
        # JSON can hold halves of surrogate pairs, which no encoding of text takes.
        text = text.encode("utf-8", "replace").decode()
        yield text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")


def _paragraphs(lines: list[str]) -> list[str]:
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            # Indentation and trailing blanks belong to the page, not to the paragraph.
            paragraphs[-1].append(line.strip())
        elif paragraphs[-1]:
            paragraphs.append([])
    return [" ".join(paragraph) for paragraph in paragraphs if paragraph]


def check_raw(path: str) -> int:
    """Return the size on disk of a text; UserError if it cannot be read, is no regular file, is
    empty, or is of a kind that is not text."""
    # As `<(command)` of a shell.
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path}: not a regular file; the text is read more than once, so save it to a file first")
    with read_errors(path, "give a text file"), open(path, "rb") as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(512)
    if size == 0:
        raise no_words(path)
    kind = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None) if is_plain(path) else None
    if path.endswith(ARCHIVES) or head[257:262] == b"ustar":
        kind = "an archive; unpack it"
    if kind is not None:
        raise UserError(f"{path}: is {kind}")
    return size


def no_words(path: str) -> UserError:
    return UserError(f"{path}: the text is empty; give a file with at least one word")
