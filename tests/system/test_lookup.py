"""What is under a path is asked in one place: a folder that may not be entered is a user's mistake,
not a bug."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs

from fairseq.checkpoint import sharded
from fairseq.checkpoint.manager import CheckpointManager, find_checkpoint, is_model
from fairseq.config.settings import CheckpointConfig
from fairseq.data.folders import load_dictionary
from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq.system.files import atomic_folder, prepare_file
from fairseq.system.lookup import entries, exists, is_file, is_folder
from fairseq.system.plugins import import_user_module
from fairseq.text.raw_text import TextFormat, read_blocks
from fairseq.text.tokenizers.tokenizer import find_tokenizer

CALLS: dict[str, Callable[[Path], Any]] = {
    "exists": exists,
    "is_file": is_file,
    "is_folder": is_folder,
    "entries": entries,
    "checkpoint": find_checkpoint,
    "model": is_model,
    "sharded": sharded.is_folder,
    "save_dir": lambda path: CheckpointManager(CheckpointConfig(save_dir=str(path))),
    "data": load_dictionary,
    "hub": LanguageModel.from_pretrained,
    "plug-in": lambda path: import_user_module(str(path)),
    "text": lambda path: list(read_blocks(str(path), TextFormat())),
    "tokenizer": lambda path: find_tokenizer(path, []),
    "file": lambda path: prepare_file("--out", path),
    "folder": lambda path: atomic_folder(path).__enter__(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_path_in_a_folder_that_may_not_be_entered_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's answer is given by hand: root enters every folder."""
    closed = tmp_path / "closed"

    def refusing(call: Any) -> Any:
        def ask(path: Any, *rest: Any, **keywords: Any) -> Any:
            if not isinstance(path, int) and os.fspath(path).startswith(str(closed)):
                raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
            return call(path, *rest, **keywords)

        return ask

    for call in ("stat", "lstat", "open", "mkdir", "listdir", "scandir"):
        monkeypatch.setattr(os, call, refusing(getattr(os, call)))
    with pytest.raises(UserError, match="closed.*Permission denied"):
        CALLS[name](closed / "x")


def test_what_cannot_be_under_a_path_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("none")
    names = ("none", "file/below", "loop", "loop/below", "dangling", "x" * 5000, "nul\0", "\ud800")
    assert not any(ask(tmp_path / name) for ask in (exists, is_file, is_folder) for name in names)
    assert [ask(tmp_path / "file") for ask in (exists, is_file, is_folder)] == [True, True, False]
    assert [ask(str(tmp_path)) for ask in (exists, is_file, is_folder)] == [True, False, True]
    assert [path.name for path in entries(tmp_path)] == ["dangling", "file", "loop"]


def test_a_working_folder_that_was_removed_is_one_line(tmp_path: Path) -> None:
    code = (
        "import os, sys; from fairseq_cli.tokenize import cli_main\n"
        "os.chdir(sys.argv.pop()); os.rmdir(os.getcwd()); cli_main()"
    )
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, "text.txt", "--tokenizer", "space", str(tmp_path / "gone")],
        capture_output=True, text=True, env=runs.environment(),
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "the working folder is gone (No such file or directory)" in done.stderr
