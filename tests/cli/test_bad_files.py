"""Data, checkpoints and folders that cannot be used: one line each."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import sys

import pytest
import runs
import torch
import warm

from fairseq import checkpoint
from fairseq_cli import tokenize


def test_data_folder_that_is_not_there(mistake, tmp_path):
    assert mistake(data=tmp_path / "none").startswith(
        f"{tmp_path}/none: folder not found; make it with fairseq-preprocess"
    )


def test_a_file_in_place_of_the_data_folder(mistake, data):
    assert mistake(data=data / "dict.txt").startswith(f"{data}/dict.txt: is a file; give the folder")


def test_a_split_that_is_not_there_names_those_that_are(mistake, data):
    line = mistake("--valid-subset", "dev", data=data)
    assert line.startswith(f"{data}/dev.idx: file not found; the splits in this folder are test, ")


def test_settings_are_not_written_before_the_data_are_found(mistake, data, tmp_path):
    mistake("--valid-subset", "dev", data=data)
    assert not (tmp_path / "checkpoints" / "settings.yaml").exists()


@pytest.mark.parametrize("name", ["dict.txt", "valid.bin", "valid.idx", "test.bin", "test.idx"])
def test_data_file_that_is_not_there(mistake, data, name):
    (data / name).unlink()
    assert mistake(data=data).startswith(f"{data}/{name}: ")


@pytest.mark.parametrize("size", [0, 1, -1, -24])
@pytest.mark.parametrize("name", ["valid.bin", "valid.idx", "test.bin", "test.idx"])
def test_data_file_that_is_truncated(mistake, data, name, size):
    content = (data / name).read_bytes()
    (data / name).write_bytes(content[:size])
    assert str(data) in mistake(data=data)


def test_dictionary_of_other_data(mistake, data):
    lines = (data / "dict.txt").read_text().splitlines(keepends=True)
    (data / "dict.txt").write_text("".join(lines[:700]))
    assert mistake(data=data).startswith(f"{data}/valid.bin: token ")


@pytest.mark.parametrize("content", [b"", b"w", b"word\n", b"word 1\nword 2\n", b"\xff\xfe 1\n", b"word many\n"])
def test_dictionary_that_is_none(mistake, data, content):
    (data / "dict.txt").write_bytes(content)
    assert mistake(data=data).startswith(f"{data}/dict.txt: ")


def test_split_that_does_not_exist(mistake):
    assert mistake("--train-subset", "trian").startswith(f"{runs.DATA}/trian.idx: ")


def test_validation_set_empty_after_filtering(mistake):
    flags = "--max-target-positions 8 --train-subset test --valid-subset valid --skip-invalid-size-inputs-valid-test"
    line = mistake(*flags.split())
    assert line.startswith("valid: nothing is left of this split")


# --- checkpoints


def test_checkpoint_that_is_not_there(mistake, tmp_path):
    assert mistake("--finetune-from-model", tmp_path / "none.pt").startswith(f"{tmp_path}/none.pt: file not found")
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "checkpoints" / "checkpoint_last.pt").touch()  # of a run that a new one would replace
    assert mistake("--restore-file", tmp_path / "none.pt").startswith(
        f"--restore-file {tmp_path}/none.pt: file not found"
    )


@pytest.mark.parametrize("size", [0, 10, 5000, -100])
def test_checkpoint_that_is_truncated(mistake, trained, tmp_path, size):
    (tmp_path / "cut.pt").write_bytes(trained.read_bytes()[:size])
    assert mistake("--restore-file", tmp_path / "cut.pt").startswith(f"{tmp_path}/cut.pt: ")


@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--decoder-layers 3", ["missing (decoder.layers.2."]),
        ("--decoder-layers 1", ["unexpected (decoder.layers.1."]),
        ("--decoder-ffn-embed-dim 48", ["of another shape (decoder.layers.0.fc1.weight [64, 32] for [48, 32]"]),
    ],
)
def test_checkpoint_of_another_architecture_says_which_parameters_differ(mistake, trained, flags, parts):
    line = mistake("--restore-file", trained, *flags.split())
    assert line.startswith(f"{trained}: does not fit this model: parameters ")
    assert all(part in line for part in parts)


@pytest.mark.parametrize(
    "flags, line",
    [
        (
            "--optimizer adam",
            "made with optimizer nag, not adam; give its --optimizer, or --reset-optimizer",
        ),
        (
            "--criterion cross_entropy",
            "made with criterion adaptive_loss, not cross_entropy; give its --criterion, or --reset-optimizer",
        ),
    ],
)
def test_checkpoint_of_another_optimizer_or_criterion(mistake, trained, flags, line):
    assert mistake("--restore-file", trained, "--max-update", 9, *flags.split()) == f"{trained}: {line}"


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_hostile_settings_in_a_checkpoint_are_data(trained, tmp_path):
    state = checkpoint.read(trained)
    state["args"]["optimizer_overrides"] = f"__import__('os').system('touch {tmp_path}/run')"
    torch.save(state, tmp_path / "hostile.pt")
    runs.train(tmp_path / "c", runs.SHORT, "--max-update 3 --no-save --restore-file", tmp_path / "hostile.pt")
    assert not (tmp_path / "run").exists()


def test_save_dir_that_is_a_file(mistake, tmp_path):
    (tmp_path / "checkpoints").write_text("")
    assert mistake().startswith(f"--save-dir {tmp_path}/checkpoints: cannot be made")


@pytest.mark.parametrize("flag", ["--metrics-file", "--tensorboard-logdir", "--log-file", "--wandb-project"])
@pytest.mark.parametrize("name", ["file/below", "x" * 5000, "."])
def test_what_a_run_cannot_write_is_found_before_it_writes_anything(mistake, tmp_path, monkeypatch, flag, name):
    if flag == "--tensorboard-logdir":
        pytest.importorskip("tensorboard")
        name = name.replace(".", "file")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    line = mistake(flag, name)
    assert line.startswith(f"{flag}: wandb" if flag == "--wandb-project" else f"{flag} ")
    assert os.listdir(tmp_path) == ["file"]


def test_a_metrics_file_is_not_left_where_a_run_ends_before_it_begins(mistake, data, tmp_path):
    mistake("--metrics-file", tmp_path / "new" / "metrics.jsonl", "--valid-subset", "dev", data=data)
    assert os.listdir(tmp_path) == ["data-bin"]


# --- no space left


def test_old_checkpoint_survives_when_writing_stops_halfway(mistake, tmp_path):
    runs.train(tmp_path / "checkpoints", runs.SHORT)
    old = (tmp_path / "checkpoints" / "checkpoint_last.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, limits[1]))
    try:
        line = mistake("--max-update", 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be written (File too large)" in line
    assert (tmp_path / "checkpoints" / "checkpoint_last.pt").read_bytes() == old
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("*.pt")) == [
        "checkpoint_best.pt",
        "checkpoint_last.pt",
    ]


def test_a_full_disk_leaves_no_new_folder(tmp_path, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "text").write_text("one two\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(sys, "argv", ["tokenize", "text", "--tokenizer", "space", "--output", "new/folder/text"])
    with pytest.raises(SystemExit, match="2"):
        tokenize.cli_main()
    assert "--output new/folder/text: cannot be written (No space left on device)" in capsys.readouterr().err
    assert os.listdir() == ["text"]


# --- the command itself


@pytest.mark.parametrize(
    "flags, line",
    [
        (["nowhere", runs.SHORT], "train.py: error: nowhere: folder not found"),
        (
            [runs.DATA, runs.SHORT, "--restore-file hostile.pt --no-save"],
            "train.py: error: hostile.pt: cannot be read as",
        ),
    ],
)
def test_command_prints_one_line_and_no_traceback(flags, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostile.pt").write_bytes(pickle.dumps({"model": {}, "args": Hostile(tmp_path / "run")}))
    result = warm.command("train.py", *flags)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(line) and result.stderr.count("\n") == 1


def test_nothing_is_left_behind_by_a_mistake(mistake, tmp_path):
    mistake("--decoder-attention-heads", "5")
    folder = tmp_path / "checkpoints"
    assert not folder.exists() or not list(folder.iterdir())
