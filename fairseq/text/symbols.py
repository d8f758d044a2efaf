"""Bytes or letters of a text as symbols separated by spaces, as in enwik8 and text8.

A text becomes ``train.txt`` (the first 90 %), ``valid.txt`` and ``test.txt`` (5 % each), cut at
exact bytes, and ``dict.txt``, the symbols of all three by falling frequency. A line ends at each
line feed (bytes) or space (letters), which ``</s>`` represents: a split has as many tokens as
characters, or one more if it ends in the middle of a line.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fairseq.errors import UserError
from fairseq.system.files import atomic_folder, prepare_file
from fairseq.system.terminal import byte_bar
from fairseq.text.dictionary import Dictionary

LINE_ENDS = {"bytes": ord("\n"), "letters": ord(" ")}
LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz ")
BYTES = frozenset(map(str, range(256)))  # symbols of bytes
CHUNK = 1 << 20


def symbol(byte: int, kind: str) -> str:
    return str(byte) if kind == "bytes" else chr(byte)


def split_sizes(total: int) -> dict[str, int]:
    """Bytes of each split of a text of *total* bytes:
    90, 5 and 5 %; for enwik8 and text8 90, 5 and 5 million."""
    part = total // 20
    return {"train": total - 2 * part, "valid": part, "test": part}


def convert(source: Path, destdir: Path, kind: str) -> dict[str, int]:
    """Write the splits of *source* and their dictionary to *destdir*, all four files or none;
    return tokens by split.

    Memory is constant in the length of the text.

    Raises:
        UserError: the text cannot be read, is too short to split or has other characters than
            letters; the files are there, or cannot be written.
    """
    try:
        with contextlib.ExitStack() as files:
            text = files.enter_context(open(source, "rb"))
            total = os.fstat(text.fileno()).st_size
            if total < 20:
                raise UserError(f"{source}: has {total} bytes; a split of 90, 5 and 5 % needs at least 20")
            for name in (*split_sizes(total), "dict"):
                if os.path.lexists(destdir / f"{name}.txt"):
                    raise UserError(f"DIR {destdir}: has a {name}.txt; give a new folder, or remove it")
                prepare_file("DIR", destdir / f"{name}.txt", {"TEXT": source})
            report = files.enter_context(byte_bar(total))
            tokens, counts = {}, np.zeros(256, dtype=np.int64)
            folder = files.enter_context(atomic_folder(destdir, flag="DIR", last="dict.txt"))
            for name, size in split_sizes(total).items():
                with open(folder / f"{name}.txt", "wb") as out:
                    tokens[name] = _write_split(text, out, size, kind, counts, report)
            dictionary = Dictionary()
            # From all three splits: of 256 possible symbols none
            # must be unknown in a test of bits per character.
            for byte in np.flatnonzero(counts).tolist():
                if byte != LINE_ENDS[kind]:
                    dictionary.add_symbol(symbol(byte, kind), int(counts[byte]))
            dictionary.finalize()
            dictionary.save(folder / "dict.txt")
    except FileNotFoundError as error:
        raise UserError(f"{error.filename or source}: file not found; check the path") from None
    except OSError as error:
        raise UserError(f"{error.filename or destdir}: {error.strerror}; choose another file or folder") from None
    return tokens


def _write_split(
    text: BinaryIO, out: BinaryIO, size: int, kind: str, counts: np.ndarray, report: Callable[[int], object]
) -> int:
    """Write the next *size* bytes of *text* as symbols,
    and count them; return the number of tokens."""
    end = LINE_ENDS[kind]
    table = [b"\n" if byte == end else f"{symbol(byte, kind)} ".encode("latin-1") for byte in range(256)]
    tokens, last, left = size, end, size
    while left:
        chunk = text.read(min(left, CHUNK))
        if not chunk:
            raise UserError(f"{text.name}: became shorter while reading; run again when it is complete")
        left -= len(chunk)
        if kind == "letters" and not LETTERS.issuperset(chunk):
            at = next(i for i, byte in enumerate(chunk) if byte not in LETTERS)
            raise UserError(
                f"{text.name}: byte {text.tell() - len(chunk) + at} is {chunk[at : at + 1]!r}, neither a letter from a "
                "to z nor a space; use `kind` bytes"
            )
        out.write(b"".join([table[byte] for byte in chunk]))
        counts += np.bincount(np.frombuffer(chunk, np.uint8), minlength=256)
        last = chunk[-1]
        report(len(chunk))
    if last != end:
        out.write(b"\n")
        tokens += 1
    return tokens
