"""Every field of every JSON and YAML file with a value of another type, too deep, too large, or not
a number."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.classes.lines import lines
from fuzz.commands import Case

DEEP = "@deep@"
RAW = {  # values that json.dumps does not write
    DEEP: "[" * 100_000 + "]" * 100_000,
    "@digits@": "1" + "0" * 400,
    "@more digits@": "9" * 5000,
    "@infinity@": "Infinity",
    "@nan@": "NaN",
    "@overflow@": "1e400",
    "@surrogate@": '"\\ud800\\u0000\\u001b[2J"',
}
VALUES: list[Any] = [None, True, -1, 2**70, 0.5, "", "x", [], {}, [[1]], {"x": [None]}, "y" * 100_000, *RAW]
WHOLE: dict[str, bytes] = {
    "empty": b"",
    "null": b"null",
    "number": b"3",
    "text": b'"x"',
    "list": b"[]",
    "infinity": b"Infinity",
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "digits": b"1" * 10_000,
    "not UTF-8": b'{"x": "\xff\xfe"}',
    "UTF-16": '{"x": 1}'.encode("utf-16"),
    "NUL": b"\0" * 100,
    "cut": b'{"x": [1, 2',
}


@dataclass(frozen=True)
class Document:
    """A file of fields.

    Attributes:
        name: its class.
        file: the file below the folder of inputs that is damaged.
        words: the command that reads it; ``{}`` is the folder with the damaged copy.
        per_line: whether each line is a document; the first is damaged.
        copied: the folder of *file* is copied as a whole.
    """

    name: str
    file: str
    words: tuple[str, ...]
    per_line: bool = False
    copied: bool = False


def documents(base: Path) -> list[Document]:
    """The files."""
    data, lm = f"{base}/data", f"{base}/lm/checkpoint_last.pt"
    tokenizers = [
        Document(
            f"tokenizer-{kind}",
            f"{kind}.json",
            ("tokenize", f"{base}/train.txt", "--bpe", "hf", "--bpe-codes", f"{{}}/{kind}.json"),
        )
        for kind in ("WordLevel", "WordPiece", "BPE", "Unigram")
    ]
    metrics = "{}/metrics.jsonl"
    return [
        *tokenizers,
        Document(
            "tokenization",
            "data/tokenization.json",
            ("tokenize", f"{base}/train.txt", "--data", "{}/data"),
            copied=True,
        ),
        Document(
            "counts",
            "data/valid.raw.json",
            ("eval_lm", "{}/data", "--path", lm, "--cpu", "--gen-subset", "valid"),
            copied=True,
        ),
        Document("metrics", "metrics.jsonl", ("plot", metrics, "--split", "train_inner"), per_line=True),
        Document(
            "metrics-hours",
            "metrics.jsonl",
            ("plot", metrics, "--split", "train_inner", "--over", "hours", "--results-path", "p.png"),
            per_line=True,
        ),
        Document(
            "metrics-resumed",
            "metrics.jsonl",
            (
                "train",
                *lines(base)["train"],
                "--metrics-file",
                metrics,
                "--restore-file",
                lm,
                "--reset-optimizer",
                "--max-update",
                "3",
            ),
            per_line=True,
        ),
        Document(
            "results",
            "results.json",
            ("export_model", lm, "--to", "hf", "--out", "out", "--data", data, "--results", "{}/results.json"),
        ),
        Document("hf-config", "hf/config.json", ("import_model", "{}/hf", "--from", "hf", "--out", "out"), copied=True),
        Document(
            "hf-tokenization",
            "hf/tokenization.json",
            ("import_model", "{}/hf", "--from", "hf", "--out", "out"),
            copied=True,
        ),
        Document("rows", "text.jsonl", ("tokenize", "{}/text.jsonl", "--tokenizer", "space"), per_line=True),
    ]


def cases(base: Path) -> Iterator[Case]:
    """The cases."""
    for document in documents(base):
        content = (base / document.file).read_text()
        first, _, rest = content.partition("\n") if document.per_line else (content, "", "")
        value = json.loads(first)
        for place in places(value):
            for number, other in enumerate(VALUES):
                written = dumped(changed(value, place, other)) + ("\n" + rest if document.per_line else "")
                shown = ".".join(map(str, place))
                yield _case(document, base, f"{shown} {number}", written.encode(), is_valid=True)
        for name, raw in WHOLE.items():
            yield _case(document, base, f"whole {name}", raw + (b"\n" if document.per_line else b""), is_valid=True)
        yield _case(document, base, "BOM", b"\xef\xbb\xbf" + content.encode(), is_valid=True)
        yield _case(document, base, "twice", (content + content).encode(), is_valid=document.per_line)


def places(value: Any, most: int = 24) -> list[tuple[Any, ...]]:
    """The places of the fields of *value*, the outermost first."""
    found: list[tuple[Any, ...]] = []
    left: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    while left and len(found) < most:
        place, inner = left.pop(0)
        keys = (
            list(inner)
            if isinstance(inner, dict)
            else list(range(min(len(inner), 2)))
            if isinstance(inner, list)
            else []
        )
        for key in keys:
            found.append((*place, key))
            left.append(((*place, key), inner[key]))
    return found[:most]


def changed(value: Any, place: tuple[Any, ...], other: Any) -> Any:
    """A copy of *value* with *other* at *place*."""
    value = copy.deepcopy(value)
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = other
    return value


def dumped(value: Any) -> str:
    """*value* as JSON, with :data:`RAW` values as they are."""
    text = json.dumps(value)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text


def _case(document: Document, base: Path, name: str, content: bytes, is_valid: bool) -> Case:
    def write(folder: Path) -> None:
        target = folder / document.file
        if document.copied:
            shutil.copytree(base / Path(document.file).parent, target.parent)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(content)

    words = tuple(word.replace("{}", ".") for word in document.words)
    flags = tuple(word for word in words if word.startswith("--"))
    names = (Path(document.file).name, *flags)
    written = "--metrics-file" in words or document.name == "outputs"
    output = document.file if written else ""
    return Case(f"documents {document.name} {name}", words, names, write, is_valid=is_valid, output=output)
