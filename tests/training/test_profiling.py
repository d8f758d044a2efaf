"""--profile traces the updates that it names, changes nothing else, and rejects other windows in
one line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

from fairseq.errors import UserError
from fairseq.training import loop, profiler
from fairseq.training.state import TrainingState
from fairseq_cli import train as command

SMALL = f"{runs.BASELINE} --no-epoch-checkpoints --no-last-checkpoints --disable-validation"


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces have the number of each update."""
    step = loop.update

    def update(state: TrainingState, *args: Any) -> bool:
        with torch.profiler.record_function(f"update {state.num_updates + 1}"):
            return step(state, *args)

    monkeypatch.setattr(loop, "update", update)


def traced(folder: Path) -> set[int]:
    """The updates in the trace of a run."""
    events = json.loads((folder / "profile" / "trace.json").read_text())["traceEvents"]
    assert any(event["name"].startswith("aten::") for event in events)
    found = (re.fullmatch(r"update (\d+)", event["name"]) for event in events)
    return {int(match[1]) for match in found if match}


@pytest.mark.usefixtures("named")
def test_the_updates_after_from_up_to_to_are_traced_and_training_is_the_same(tmp_path: Path) -> None:
    log = runs.train(tmp_path / "a", SMALL, "--max-update 4 --profile 1:3")
    assert traced(tmp_path / "a") == {2, 3}
    table = (tmp_path / "a" / "profile" / "operators.txt").read_text()
    assert table.startswith("updates 2 to 3; cpu, torch") and "aten::" in table and "Self CPU" in table
    assert not (tmp_path / "a" / "profile" / "memory.pickle").exists()
    assert runs.updates(log) == runs.updates(runs.train(tmp_path / "b", SMALL, "--max-update 4"))
    assert not (tmp_path / "b" / "profile").exists()


@pytest.mark.usefixtures("named")
def test_a_run_that_ends_or_resumes_inside_the_window_traces_its_part(tmp_path: Path) -> None:
    saved = f"{runs.BASELINE} --no-epoch-checkpoints --disable-validation"
    runs.train(tmp_path, saved, "--max-epoch 1 --update-freq 2 --max-tokens 640 --profile 1:5")  # three updates
    assert traced(tmp_path) == {2, 3}
    runs.train(tmp_path, saved, "--max-epoch 2 --update-freq 2 --max-tokens 640 --profile 1:5")
    assert traced(tmp_path) == {4, 5}


def test_without_the_flag_nothing_is_profiled_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "profile", None)
    runs.train(tmp_path, SMALL, "--max-update 1")
    assert not (tmp_path / "profile").exists()


def test_an_update_that_fails_leaves_no_profile_and_no_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "update", fail)
        runs.train(tmp_path, SMALL, "--max-update 2 --profile 0:2")
    assert not list((tmp_path / "profile").iterdir())
    runs.train(tmp_path, SMALL, "--max-update 2 --profile 0:2")  # torch has one profiler at a time
    assert (tmp_path / "profile" / "trace.json").exists()


@pytest.mark.parametrize(
    "flags, line",
    [
        ("--profile 3:3", "--profile 3:3: FROM must be less than TO; 3:6 profiles three updates"),
        ("--profile 4:3", "--profile 4:3: FROM must be less than TO"),
        ("--profile=-1:3", "--profile -1:3: expected FROM:TO, two numbers of updates such as 10:13"),
        ("--profile a:b", "--profile a:b: expected FROM:TO"),
        ("--profile 5", "--profile 5: expected FROM:TO"),
        ("--profile 1:2:3", "--profile 1:2:3: expected FROM:TO"),
        ("--profile 1:5 --max-update 4", "--profile 1:5: beyond the last update, 4; give TO up to 4"),
        ("--profile 1:9 --stages 8:4,16:8", "--profile 1:9: beyond the last update, 8"),
    ],
)
def test_mistakes_are_one_line(
    flags: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(runs.DATA), *SMALL.split(), "--save-dir", str(tmp_path / "run"), *flags.split()]
    monkeypatch.setattr(sys, "argv", ["fairseq-train", *argv])
    with pytest.raises(SystemExit) as end:
        command.cli_main()
    stderr = [text for text in capsys.readouterr().err.splitlines() if "error:" in text]
    assert end.value.code == 2 and len(stderr) == 1 and line in stderr[0]
    assert not list((tmp_path / "run").glob("profile*"))


def test_a_profile_that_cannot_be_written_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    with pytest.raises(UserError, match=r"--profile .*profile: cannot be written"):
        runs.train(tmp_path, SMALL, "--max-update 2 --profile 0:1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_kernels_are_traced_and_memory_is_recorded(tmp_path: Path) -> None:
    runs.train(tmp_path, SMALL.replace("--cpu", ""), "--max-update 3 --profile 1:3")
    events = json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert (tmp_path / "profile" / "memory.pickle").stat().st_size > 1000
