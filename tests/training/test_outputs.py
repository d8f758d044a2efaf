"""What a run writes beside its checkpoints is its own: it never cuts, hides or replaces that of
another run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import runs
import yaml

from fairseq.config.settings_file import for_another_run
from fairseq.errors import UserError

QUICK = f"{runs.BASELINE} --no-epoch-checkpoints --disable-validation"


def steps(path: Path) -> list[int]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["step"] for line in lines if line["tag"] == "train_inner"]


def content(folder: Path) -> dict[str, bytes]:
    """The files in *folder* and below, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_settings_of_another_run_write_beside_the_new_checkpoints(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    places = ["--metrics-file", tmp_path / "elsewhere" / "m.jsonl", "--log-file", tmp_path / "a" / "logs" / "log.txt"]
    runs.train(tmp_path / "a", QUICK, places, "--max-update 2")
    before = content(tmp_path)
    runs.train(tmp_path / "b", "--config", tmp_path / "a" / "settings.yaml", "--max-update 3")
    after = content(tmp_path)
    assert {name: after[name] for name in before} == before, "nothing of the first run was changed"
    new = {name for name in after.keys() - before.keys() if name.endswith((".jsonl", ".txt"))}
    assert new == {"b/m.jsonl", "b/logs/log.txt", "b/dict.txt"}
    assert steps(tmp_path / "b" / "m.jsonl") == [1, 2, 3]
    written = yaml.safe_load((tmp_path / "b" / "settings.yaml").read_text())
    assert written["metrics_file"] == str(tmp_path / "b" / "m.jsonl")


def test_curves_of_another_run_are_not_hidden(tmp_path):
    pytest.importorskip("tensorboard")
    runs.train(tmp_path / "a", QUICK, "--tensorboard-logdir", tmp_path / "a" / "curves", "--max-update 1")
    before = content(tmp_path / "a" / "curves")
    runs.train(tmp_path / "b", "--config", tmp_path / "a" / "settings.yaml")
    assert content(tmp_path / "a" / "curves") == before and list((tmp_path / "b" / "curves" / "train_inner").iterdir())
    with pytest.raises(
        UserError, match="--tensorboard-logdir .*a/curves: exists, and is not of the run in .*c; choose"
    ):
        runs.train(tmp_path / "c", QUICK, "--tensorboard-logdir", tmp_path / "a" / "curves", "--max-update 1")
    assert content(tmp_path / "a" / "curves") == before and not (tmp_path / "c").exists()


def test_the_same_run_goes_on_with_its_settings_from_any_folder(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    runs.train(Path("a"), QUICK, "--metrics-file m.jsonl --max-update 2")
    monkeypatch.chdir(tmp_path / "two")
    args = runs.arguments("--config", tmp_path / "one" / "a" / "settings.yaml", "--max-update 4")
    assert args.save_dir == str(tmp_path / "one" / "a")
    runs.train(Path(args.save_dir), "--config", tmp_path / "one" / "a" / "settings.yaml", "--max-update 4")
    assert steps(tmp_path / "one" / "m.jsonl") == [1, 2, 3, 4] and list((tmp_path / "two").iterdir()) == []


@pytest.mark.parametrize("flags", ["", "--restore-file a/checkpoint_last.pt", "--no-save"])
def test_a_file_of_another_run_is_refused_and_stays_as_it_is(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs.train(Path("a"), QUICK, "--metrics-file m.jsonl --max-update 2")
    before = content(tmp_path)
    with pytest.raises(UserError, match="--metrics-file m.jsonl: exists, and is not of the run in b; choose another"):
        runs.train(Path("b"), QUICK, "--metrics-file m.jsonl --max-update 3", flags)
    assert content(tmp_path) == before and not Path("b").exists()


def test_a_file_that_is_no_metrics_file_stays_as_it_is(tmp_path):
    file = tmp_path / "result.json"
    file.write_text('{"step": 0}\n')
    with pytest.raises(UserError, match="--metrics-file .*: exists"):
        runs.train(tmp_path / "a", QUICK, "--max-update 1 --metrics-file", file)
    assert file.read_text() == '{"step": 0}\n'


def test_a_run_that_goes_on_with_another_file_leaves_the_former_one(tmp_path):
    for updates, name in enumerate(("a", "b"), 1):
        runs.train(tmp_path / "run", QUICK, f"--max-update {updates} --metrics-file", tmp_path / name)
    assert (steps(tmp_path / "a"), steps(tmp_path / "b")) == ([1], [2])
    with pytest.raises(UserError, match="--metrics-file .*: exists, and is not of the run in"):
        runs.train(tmp_path / "other", QUICK, "--max-update 1 --metrics-file", tmp_path / "a")


def test_a_run_that_starts_again_replaces_its_own_figures(tmp_path):
    flags = [QUICK, "--metrics-file", tmp_path / "m.jsonl", "--max-update 2"]
    runs.train(tmp_path / "a", flags)
    (tmp_path / "a" / "checkpoint_last.pt").unlink()  # as if it had been killed before it saved
    runs.train(tmp_path / "a", flags)
    assert steps(tmp_path / "m.jsonl") == [1, 2]


def test_a_moved_or_copied_run_goes_on_with_its_own_file_not_with_the_first_ones(tmp_path):
    runs.train(tmp_path / "a", QUICK, "--metrics-file", tmp_path / "a" / "m.jsonl", "--max-update 2")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    before = content(tmp_path / "a")
    runs.train(tmp_path / "b", QUICK, "--metrics-file", tmp_path / "b" / "m.jsonl", "--max-update 3")
    assert steps(tmp_path / "b" / "m.jsonl") == [1, 2, 3]
    with pytest.raises(UserError, match="--metrics-file .*a/m.jsonl: exists"):
        runs.train(tmp_path / "b", QUICK, "--metrics-file", tmp_path / "a" / "m.jsonl", "--max-update 4")
    assert content(tmp_path / "a") == before


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"save_dir": "/a", "metrics_file": "/a/logs/m"}, "b/logs/m"),
        ({"save_dir": "/a", "metrics_file": "/other/m"}, "b/m"),
        ({"save_dir": "/a", "metrics_file": "/a/../etc/m"}, "b/m"),
        ({"save_dir": "b", "metrics_file": "/other/m"}, "/other/m"),
        ({"save_dir": "./c/../b", "metrics_file": "m"}, "m"),
        ({"metrics_file": "m"}, "m"),
        ({"save_dir": "/a", "metrics_file": ""}, ""),
    ],
)
def test_where_the_metrics_of_another_run_go(settings: dict[str, Any], expected: str):
    assert for_another_run(settings, "b") == {**settings, "metrics_file": expected}


def test_what_the_command_line_names_is_not_moved(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text(f"save_dir: {tmp_path}/a\nmetrics_file: {tmp_path}/m.jsonl\narch: transformer_lm_tiny\n")
    named = runs.arguments("--config", file, "--save-dir b --metrics-file", os.devnull)
    assert (named.save_dir, named.metrics_file) == ("b", os.devnull)
