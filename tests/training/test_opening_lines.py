"""What training says before its first update: how much it reads, how long it takes, where it
saves."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import runs


def messages(folder: Path, caplog: pytest.LogCaptureFixture, *flags: str) -> list[str]:
    with caplog.at_level(logging.INFO):
        runs.train(folder, runs.BASELINE, "--max-tokens 640 --max-update 2 --disable-validation", *flags)
    return [record.getMessage() for record in caplog.records if not getattr(record, "only_in_files", False)]


def test_the_first_lines_tell_the_size_of_an_update_and_an_epoch_and_the_updates_to_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = messages(tmp_path, caplog, "--update-freq 2 --no-save")
    [data] = [line for line in lines if "tokens per epoch" in line]
    total, updates, each = (int(word.replace(",", "")) for word in data.split() if word[0].isdigit())
    assert total // updates == each and 640 < each <= 1280
    assert any(line.startswith("2 updates to come (") and "fp32; nothing is saved" in line for line in lines)


def test_the_dump_of_settings_is_in_the_log_file_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = messages(tmp_path, caplog, f"--log-file {tmp_path}/log.txt")
    assert not any(line.startswith("settings: ") for line in lines)
    assert "settings: data=" in (tmp_path / "log.txt").read_text()
    assert any(f"saved in {tmp_path}" in line for line in lines)
