"""Tables of sentences, and lines of text, to fine-tune with and to classify: of another form,
encoding or size."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from fuzz.classes.lines import lines
from fuzz.commands import Case

NO_TABLE = ("empty", "header", "no header", "one column", "NUL", "ones", "UTF-16")  # never valid
ROWS = 40


def contents(good: bytes) -> dict[str, bytes]:
    """Contents of a table of sentences and labels, by their kind."""
    header, _, rows = good.partition(b"\n")

    def labelled(label: str) -> bytes:
        return header + b"\n" + "".join(f"ax by\t{label.format(i=i)}\n" for i in range(ROWS)).encode()

    return {
        "empty": b"",
        "header": header + b"\n",
        "no header": rows,
        "one column": good.replace(b"\t", b" "),
        "NUL": b"\0" * 1000,
        "ones": b"\xff" * 1000,
        "UTF-16": good.decode().encode("utf-16"),
        "BOM": b"\xef\xbb\xbf" + good,
        "cut": good[:-2],
        "not UTF-8": good.replace(b"ax", b"\xe9\xff"),
        "CRLF": good.replace(b"\n", b"\r\n"),
        "more columns": good.replace(b"\n", b"\tx\ty\n"),
        "fewer columns": good + b"ax by\n",
        "blank lines": good.replace(b"\n", b"\n\n"),
        "empty cells": header + b"\n" + b"\t\n" * ROWS,
        "quotes": good.replace(b"ax", b'"ax'),
        "column twice": good.replace(header, b"sentence\tlabel\tlabel").replace(b"\t1\n", b"\t1\t0\n"),
        "long line": good + b"ax " * 400_000 + b"\t1\n",
        "no line feed": b"a" * 2_000_000,
        "classes": labelled("class{i}"),
        "one class": labelled("1"),
        "nan": labelled("nan"),
        "overflow": labelled("1e999"),
        "digits": labelled("9" * 5000),
        "control": labelled("\x1b[2J{i}"),
        "separators": good.replace(b"ax", "\u2028\x85\x1c".encode()),
    }


def cases(base: Path) -> Iterator[Case]:
    """The cases."""
    _, *finetune = lines(base)["finetune"]
    good = (base / "tables" / "train.tsv").read_bytes()
    for kind, content in contents(good).items():
        for file in ("train.tsv", "dev.tsv"):

            def write(folder: Path, file: str = file, content: bytes = content) -> None:
                shutil.copytree(base / "tables", folder / "tables")
                (folder / "tables" / file).write_bytes(content)

            words, valid = ("finetune", "tables", *finetune), kind not in NO_TABLE
            yield Case(f"tables {file} {kind}", words, ("train.tsv", "dev.tsv", "--"), write, is_valid=valid)

        def write_text(folder: Path, content: bytes = content) -> None:
            (folder / "text").write_bytes(content)

        classifier = f"{base}/classifier/checkpoint_last.pt"
        yield Case(
            f"tables text {kind}", ("classify", classifier, "text", "--cpu"), ("text",), write_text, is_valid=True
        )
