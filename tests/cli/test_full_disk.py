"""A disk that is full, or too few descriptors, end a command with one line, and neither files nor
folders are left behind."""

from __future__ import annotations

import errno
import importlib
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
import runs

from fairseq.analysis import plots
from fairseq.errors import UserError
from fairseq.system.files import make_folder, prepare_file, removing_empty_folders

COMMANDS = {
    "corpus symbols": "TEXT new/folder --kind bytes",
    "corpus pydoc": "new/folder --max-words 12000 --packages numpy",
    "tokenize": "TEXT --tokenizer space --output new/folder/text",
    "checkpoint average": f"--inputs {runs.GOLDEN / 'baseline.pt'} --output new/folder/average.pt",
    "preprocess": "--only-source --trainpref TEXT --tokenizer space --destdir new/folder",
    "train": f"{runs.DATA} {runs.SHORT} --save-dir new/folder --disable-validation",
}
WITHOUT_CHECK = ("preprocess", "train")
# At the check before the work, and at its end.
MOMENTS: dict[str, tuple[Any, str]] = {"begin": (tempfile, "TemporaryFile"), "end": (os, "fsync")}


def full(*arguments: Any, **settings: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "command, moment",
    [*((name, "end") for name in COMMANDS), *((name, "begin") for name in COMMANDS if name not in WITHOUT_CHECK)],
)
def test_a_full_disk_leaves_no_new_folder(
    command: str,
    moment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text").write_text("one two three four five\n" * 9)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(*MOMENTS[moment], full)
    monkeypatch.setattr(sys, "argv", [*command.split(), *COMMANDS[command].replace("TEXT", "text").split()])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"fairseq_cli.{command.split()[0]}").cli_main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and last.startswith(f"{command}: error: ") and "No space left on device" in last
    assert os.listdir(tmp_path) == ["text"]


def test_after_an_exception_new_folders_that_are_empty_are_gone_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    with pytest.raises(KeyboardInterrupt), removing_empty_folders():
        make_folder(tmp_path / "before" / "new")
        make_folder(tmp_path / "full" / "a" / "b")
        (tmp_path / "full" / "file").touch()
        # A statement that ended well within one that did not.
        with removing_empty_folders():
            prepare_file("--output", tmp_path / "late" / "file")
        raise KeyboardInterrupt
    remaining = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert remaining == ["before", "full", "full/file"]


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_picture_that_fills_the_disk_is_one_line(kind: str, tmp_path: Path) -> None:
    figure = plots._figure(3, 3)
    figure.subplots().plot([1, 2], [3, 4])
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 2500):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
        try:
            with pytest.raises(UserError, match="cannot be written"):
                plots._save(figure, tmp_path / f"picture.{kind}", kind)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert os.listdir(tmp_path) == []
