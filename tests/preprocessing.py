"""Runs of ``fairseq-preprocess`` in this process, and what they leave behind."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from fairseq import preprocessing
from fairseq.errors import UserError
from fairseq_cli import preprocess


def run(destdir: Path, **flags: Any) -> None:
    """Run the command with as many processes as are asked for, also for a short text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocessing, "useful_workers", lambda workers, sources: workers)
        preprocess.main(argparse.Namespace(only_source=True, destdir=str(destdir), **flags))


def refused(destdir: Path, **flags: Any) -> str:
    """The error's message, once it is one line and nothing was left behind or changed."""
    before = files(destdir)
    with pytest.raises(UserError) as caught:
        run(destdir, **flags)
    assert files(destdir) == before and destdir.exists() == bool(before)
    assert "\n" not in caught.value.with_flags
    return caught.value.with_flags


def files(folder: Path) -> dict[str, bytes]:
    """The content of the files of *folder*, but for their checksums."""
    paths = (
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("checksums.txt", "preprocess.log")
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def text_file(folder: Path, content: bytes | str, name: str = "text.txt") -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return str(path)
