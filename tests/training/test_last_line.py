"""The last line of a run: the limit that ended it, its best metric, and the command that evaluates
or goes on."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import runs

from fairseq.config.settings import CheckpointConfig, training_settings
from fairseq.training import stop
from fairseq.training.limit import Limit

PATIENCE = Limit("--patience 3")


def test_the_end_has_time_and_metric() -> None:
    line = stop.describe_end(3661.26, "ppl", 12.34567)
    assert line == "done training in 3661.3 seconds (1:01:01); best validation ppl 12.35"
    assert stop.describe_end(1.0, "ppl", None) == "done training in 1.0 seconds (00:01); no validation"


def test_a_limit_names_what_lets_training_go_on() -> None:
    assert PATIENCE.describe_nothing_to_do(5) == (
        "nothing to do: --patience 3 is reached after 5 updates; raise it to train on"
    )
    assert Limit("--stop-min-lr 0.1", "lower").describe_nothing_to_do(5).endswith("5 updates; lower it to train on")


# --- the command that evaluates


def evaluation(save_dir: Path, *flags: Any, data: Path = runs.DATA, command: str = "eval_lm", program: str) -> Any:
    settings = training_settings(runs.arguments(runs.BASELINE, "--save-dir", save_dir, *flags, data=data))
    return stop.evaluation(settings, command, [program, "--flag"])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with both checkpoints that a run may leave."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
        (folder / name).touch()
    return folder


def test_the_folder_of_a_run_is_evaluated_if_it_has_a_checkpoint(saved: Path) -> None:
    command = f"fairseq-eval-lm {runs.DATA} --path {saved}"
    assert evaluation(saved, program="fairseq-train") == command
    assert evaluation(saved, "--no-save", program="fairseq-train") is None
    (saved / "checkpoint_best.pt").unlink()
    assert evaluation(saved, program="fairseq-train") == command
    (saved / "checkpoint_last.pt").unlink()
    assert evaluation(saved, program="fairseq-train") is None


def test_a_command_starts_as_the_run_was_started(saved: Path, tmp_path: Path) -> None:
    ending = f" {runs.DATA} --path {saved}"
    (tmp_path / "eval_lm.py").touch()
    for program, start in (
        ("/env/bin/fairseq-train", "fairseq-eval-lm"),
        ("/x/fairseq_cli/train.py", "python -m fairseq_cli.eval_lm"),
        (f"{tmp_path}/train.py", f"python {tmp_path}/eval_lm.py"),
        ("/nowhere/train.py", "fairseq-eval-lm"),
        (f"{tmp_path}/train", "fairseq-eval-lm"),
    ):
        assert evaluation(saved, program=program) == start + ending


def test_a_folder_without_a_test_split_is_evaluated_on_the_validation_split(saved: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(runs.DATA, data)
    (data / "test.idx").unlink()
    flags = "--valid-subset valid,other"
    assert evaluation(saved, flags, data=data, program="x").endswith(f"{saved} --gen-subset valid")
    assert evaluation(saved, flags, program="x").endswith(f" {saved}")


def test_other_tasks_are_evaluated_on_their_validation_split(saved: Path) -> None:
    def command(flags: str) -> str:
        return str(evaluation(saved, flags, command="validate", program="x")).rpartition(str(saved))[2]

    assert command("--valid-subset valid,other") == ""
    assert command("--valid-subset other,valid") == " --valid-subset other"


def test_plug_ins_are_named(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "a plugin").mkdir()
    (tmp_path / "a plugin" / "__init__.py").touch()
    settings = training_settings(runs.arguments(runs.BASELINE, "--save-dir", saved))
    settings = settings.changed(user_dir=str(tmp_path / "a plugin"))
    command = str(stop.evaluation(settings, "eval_lm", ["x"]))
    assert command.endswith(f" --user-dir '{tmp_path}/a plugin'"), "quoted for a shell"


# --- the command that goes on


def test_an_interrupted_run_names_its_checkpoint_and_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/env/bin/fairseq-train", "data", "--restore-file", "x.pt", "--lr", "1"])
    line = stop.describe_interruption(15, 8, CheckpointConfig(save_dir="a"))
    assert line == (
        "stopped by SIGTERM after update 8; saved a/checkpoint_last.pt; to go on: fairseq-train data --lr 1"
    )
    for flag in ("no_save", "no_last_checkpoints"):
        line = stop.describe_interruption(2, 8, CheckpointConfig(**{flag: True}))
        assert line == f"stopped by SIGINT after update 8; nothing to go on from was saved (`{flag}`)"


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/x/fairseq_cli/train.py", "data"], "python -m fairseq_cli.train data"),
        (["train.py", "data", "--lr", "1"], "python train.py data --lr 1"),
        (["/env/bin/fairseq-train", "data"], "fairseq-train data"),
        (["/env/bin/fairseq-train", "my data"], "fairseq-train 'my data'"),
        (["train.py", "--restore-file", "a.pt", "data", "--reset-optimizer"], "python train.py data"),
        (["f", "d", "--restore-file", "x", "--lr", "1"], "f d --lr 1"),
        (["f", "d", "--finetune-from-model=x", "--lr", "1"], "f d --lr 1"),
        (["f", "--reset-optimizer", "--restore-file=x", "d", "--finetune-from-model", "y", "--reset-meters"], "f d"),
        (["f", "d", "--restore-filename", "x"], "f d --restore-filename x"),
    ],
)
def test_the_command_that_goes_on_has_no_flag_that_starts_anew(argv: list[str], command: str) -> None:
    assert stop.continuation(argv) == command
