"""``--distributed-init-method file://…`` names a file that can be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fairseq.distributed import rendezvous
from fairseq.errors import UserError


@pytest.mark.parametrize(
    "name, reason", [("file/below", "cannot be written"), ("", "Is a directory"), ("pipe", "a pipe")]
)
def test_a_file_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(rendezvous.dist, "rendezvous", lambda *args, **flags: pytest.fail("torch tries until its end"))
    with pytest.raises(UserError, match=f"--distributed-init-method .*{reason}"):
        rendezvous.connect(f"file://{tmp_path}/{name}", 0, 2, 60)
