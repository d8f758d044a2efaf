"""Folders of sharded checkpoints, which are merged or evaluated: files that are damaged, missing or
of another kind."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from fuzz.classes.checkpoints import BAD
from fuzz.classes.documents import VALUES, WHOLE, changed, dumped, places
from fuzz.commands import Case

FILES = ("plain.pt", "manifest.json", "__0_0.distcp")
NAMES = ("copy", "c.pt", *FILES)


def cases(base: Path) -> Iterator[Case]:
    """The cases."""
    commands = {
        "merge": ("merge_checkpoint", "copy", "out.pt"),
        "eval_lm": ("eval_lm", f"{base}/data", "--path", "copy", "--cpu", "--gen-subset", "valid"),
    }
    for file in FILES:
        good = (base / "sharded" / file).read_bytes()
        damaged = {
            "missing": None, "empty": b"", "cut": good[: len(good) // 2], "shorter": good[:-1], "more": good + b"x",
            "twice": good + good, "NUL": b"\0" * len(good), "ones": b"\xff" * len(good),
            "head": b"\xff" * 24 + good[24:],
        }  # fmt: skip
        for kind, content in damaged.items():
            for name, words in commands.items():
                # What comes after the tensors is not read.
                is_valid = kind == "more" or (kind == "twice" and file.endswith(".distcp"))
                yield _case(base, f"{name} {file} {kind}", words, file, content, is_valid)
    manifest = json.loads((base / "sharded" / "manifest.json").read_text())
    written = [
        (f"{'.'.join(map(str, place))} {number}", dumped(changed(manifest, place, value)).encode())
        for place in places(manifest)
        for number, value in enumerate(VALUES)
    ]
    for kind, content in [*written, *WHOLE.items()]:
        yield _case(base, f"manifest {kind}", commands["merge"], "manifest.json", content, is_valid=True)
    for key in ("parts", "manifest", "model", "args"):
        for kind in BAD:
            yield _plain(base, key, kind, commands["merge"])


def _case(base: Path, name: str, words: tuple[str, ...], file: str, content: bytes | None, is_valid: bool) -> Case:
    def write(folder: Path) -> None:
        copy = shutil.copytree(base / "sharded", folder / "copy")
        (copy / file).unlink()
        if content is not None:
            (copy / file).write_bytes(content)
        if name.startswith("manifest "):  # it belongs to the other files: the checksum does not hide the reader
            plain = torch.load(copy / "plain.pt", weights_only=True)
            torch.save({**plain, "manifest": zlib.crc32(content or b"")}, copy / "plain.pt")

    return Case(f"sharded {name}", words, NAMES, write, is_valid=is_valid)


def _plain(base: Path, key: str, kind: str, words: tuple[str, ...]) -> Case:
    def write(folder: Path) -> None:
        copy = shutil.copytree(base / "sharded", folder / "copy")
        plain = torch.load(copy / "plain.pt", weights_only=True)
        torch.save({**plain, key: BAD[kind]()}, copy / "plain.pt")

    return Case(f"sharded plain {key} {kind}", words, NAMES, write, is_valid=True)
