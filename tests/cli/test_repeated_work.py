"""Killed work is repeated; odd names and folders of two preparations are neither tracebacks nor
silent mixtures."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from kills import leftover
from states import a_state

from fairseq import checkpoint
from fairseq.config.command_settings import ModelPathConfig
from fairseq.errors import UserError
from fairseq.inference.loading import data_and_models
from fairseq.interop import exporting, importing
from fairseq.system import checksums


@pytest.mark.parametrize("work", ["export", "import"])
def test_work_that_was_killed_is_repeated_into_the_same_folder(work: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    half = leftover(out / "folder") / "half"
    half.mkdir(parents=True)
    if work == "import":
        importing._check(out)
    else:
        # Beyond the check of the folder.
        with pytest.raises(UserError, match=r"none.pt: file not found"):
            exporting.export_model(str(tmp_path / "none.pt"), out)
    assert list(out.iterdir()) == []


def test_a_path_with_a_colon_is_one_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    for path in (tmp_path / "a:b" / "c.pt", tmp_path / "d.pt"):
        checkpoint.save(path, a_state(1.0))
    one = str(tmp_path / "a:b" / "c.pt")
    assert data_and_models(ModelPathConfig(path=one), "data") == ("data", [one])
    two = str(tmp_path / "d.pt")
    assert data_and_models(ModelPathConfig(path=f"{two}:{two}"), "data") == ("data", [two, two])


def test_a_file_of_another_preparation_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, written = tmp_path / "data", tmp_path / "written"
    for folder in (data, written):
        folder.mkdir()
    (written / "train.bin").write_bytes(b"1")
    checksums.record(written, data)
    shutil.copytree(written, data, dirs_exist_ok=True)
    with caplog.at_level(logging.WARNING):
        checksums.check(data / "train.bin")
        assert caplog.messages == []
        (data / "train1.bin").write_bytes(b"2")
        checksums.check(data / "train1.bin")
    assert caplog.messages == [
        f"{data / 'train1.bin'}: not in checksums.txt, so of another preparation; preprocess all texts together"
    ]


def test_shards_of_an_earlier_run_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fairseq_cli.preprocess import get_preprocessing_parser, main

    for name in ("one", "two"):
        (tmp_path / name).write_text("a b c a b c\n")
    one, two, out = (str(tmp_path / name) for name in ("one", "two", "out"))

    def prepare(*texts: str) -> str:
        words = ["--only-source", "--trainpref", ",".join(texts), "--destdir", out, "--tokenizer", "space"]
        main(get_preprocessing_parser().parse_args(words))
        return capsys.readouterr().out

    assert "warning" not in prepare(one, two)
    assert f"warning: train1 in {out} are of an earlier run and are read with train; remove them" in prepare(one)
    assert "warning" not in prepare(one, two)
