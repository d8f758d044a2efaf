"""Files that change while a command reads them, and archives whose records have odd names."""

from __future__ import annotations

import functools
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from fuzz.classes.lines import TRAIN
from fuzz.commands import Case

RECORDS = (
    *("../outside", "/absolute", "c/DATA.PKL", "C/data.pkl", "c/data.pkl ", "c//data.pkl", "c\\data.pkl", ""),
    *("c/" + "x" * 3000, "c/\x1b[2J", "c/data/\ud7ff", "c/.data/serialization_id", "c/data/", "c/./data.pkl"),
    *("d/data.pkl", "c/constants.pkl", "c/code/__init__.py", "c/version", "c/byteorder", "c/.format_version"),
)


def cases(base: Path) -> Iterator[Case]:
    """The cases."""
    yield from _records(base)
    yield from _changing(base)


def _records(base: Path) -> Iterator[Case]:
    """One more record of an odd name in a checkpoint, before or behind the others, or one renamed
    to it."""
    commands = {
        "eval_lm": ("eval_lm", f"{base}/data", "--path", "c.pt", "--cpu", "--gen-subset", "valid"),
        "average_checkpoints": ("average_checkpoints", "--inputs", "c.pt", "--output", "out.pt"),
    }
    for number, name in enumerate(RECORDS):
        for kind in ("before", "behind", "renamed"):
            for command, words in commands.items():
                yield Case(
                    f"records {command} {number} {kind}",
                    words,
                    ("c.pt",),
                    functools.partial(_write_archive, base=base, name=name, kind=kind),
                    is_valid=True,
                )


def _write_archive(folder: Path, base: Path, name: str, kind: str) -> None:
    with zipfile.ZipFile(base / "lm" / "checkpoint_last.pt") as source:
        content = [(record.filename, source.read(record)) for record in source.infolist()]
    root = content[0][0].partition("/")[0]
    odd = (name.replace("c/", f"{root}/", 1).encode("utf-8", "replace").decode(), content[0][1])
    if kind == "renamed":
        content[1] = (odd[0], content[1][1])
    else:
        content.insert(0 if kind == "before" else len(content), odd)
    with zipfile.ZipFile(folder / "c.pt", "w") as target:
        for key, value in content:
            target.writestr(zipfile.ZipInfo(key), value)


def _changing(base: Path) -> Iterator[Case]:
    """A file that grows, shrinks, is replaced, or is removed and made again, again and again."""
    train, lm = f"{base}/train.txt", f"{base}/lm/checkpoint_last.pt"
    commands = {
        "preprocess": (train, ("preprocess", "--only-source", "--trainpref", "x", "--destdir", "out")),
        "tokenize": (train, ("tokenize", "x", "--tokenizer", "space")),
        "symbols": (train, ("symbols", "x", "out", "--kind", "bytes")),
        "text": (train, ("eval_lm", f"{base}/data", "--path", lm, "--cpu", "--text", "x")),
        "checkpoint": (lm, ("eval_lm", f"{base}/data", "--path", "x", "--cpu", "--gen-subset", "valid")),
        "average": (lm, ("average_checkpoints", "--inputs", "x", "--output", "out.pt")),
        "plot": (f"{base}/metrics.jsonl", ("plot", "x", "--split", "train_inner")),
    }  # fmt: skip
    for name, (source, words) in commands.items():
        for kind, action in ACTIONS.items():
            yield Case(
                f"changes {name} {kind}",
                words,
                ("x", "--"),
                functools.partial(_link_apart, source=source),
                meanwhile=functools.partial(_act, action, source),
                is_valid=True,
                shrinks=kind == "shrinks",
            )
    data = f"{base}/data/train.bin"
    for kind, action in ACTIONS.items():
        yield Case(
            f"changes corpus {kind}",
            ("train", "data", *TRAIN),
            ("data/train.bin", "--"),
            functools.partial(_link_corpus, data=base / "data"),
            meanwhile=functools.partial(_act, action, data),
            is_valid=True,
            shrinks=kind == "shrinks",
        )


def _link_corpus(folder: Path, data: Path) -> None:
    shutil.copytree(data, folder / "data")
    _link_apart(folder / "data", f"{data}/train.bin", "train.bin", "..")


def _link_apart(folder: Path, source: str, name: str = "x", root: str = ".") -> None:
    """The file that changes is the target of a link: the check compares what a command may
    change."""
    (folder / root / ".changing").mkdir()
    shutil.copyfile(source, folder / root / ".changing" / "x")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(f"{root}/.changing/x")


def _act(action: Callable[[Path, Path, int], None], source: str, count: int) -> None:
    action(Path(".changing/x"), Path(source), count)


def _grow(path: Path, source: Path, count: int) -> None:
    with path.open("ab") as file:
        file.write(source.read_bytes()[:100])


def _shrink(path: Path, source: Path, count: int) -> None:
    if count % 2:
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.write_bytes(source.read_bytes())


def _replace(path: Path, source: Path, count: int) -> None:
    shutil.copyfile(source, path.with_name("new"))
    os.replace(path.with_name("new"), path)


def _remove(path: Path, source: Path, count: int) -> None:
    path.unlink(missing_ok=True)
    _replace(path, source, count)


ACTIONS = {"grows": _grow, "shrinks": _shrink, "is replaced": _replace, "is removed": _remove}
