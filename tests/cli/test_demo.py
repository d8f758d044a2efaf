"""fairseq-demo goes on where it stopped, and runs nothing of the folder that it is started in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairseq.errors import UserError
from fairseq_cli import demo

SMALL = ["--max-words", "100", "--updates", "4", "8"]


class Commands:
    """Stands in for the commands: lists them, and stops at the one that is named."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.stop_at = ""

    def run(self, command: str, *flags: str, show: Any = str) -> demo.Finished:
        self.names.append(command)
        if command == self.stop_at:
            raise KeyboardInterrupt
        if command == "train":
            records = [
                {"tag": "train_inner", "step": 4, "loss": 5.0, "wps": 100.0},
                {"tag": "valid", "step": 8, "loss": 4.0},
            ]
            log = Path(flags[flags.index("--metrics-file") + 1])
            log.write_text("".join(json.dumps(values) + "\n" for values in records))
        return demo.Finished(["Evaluated 9 tokens in 1 s (9.0 tokens/s)", "Loss (base 2): 3, Perplexity: 8.0"], 2.0)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    stub = Commands()
    monkeypatch.setattr(demo, "run", stub.run)
    monkeypatch.setattr(demo, "plot", lambda folder: None)
    monkeypatch.setattr(demo, "sample", lambda folder: "a text")
    return stub


def started(folder: Path, commands: Commands, *flags: str, stop_at: str = "") -> list[str]:
    """The commands that a demo in *folder* runs."""
    commands.names, commands.stop_at = [], stop_at
    try:
        demo.main(["--output", str(folder), *SMALL, *flags])
    except KeyboardInterrupt:
        assert stop_at
    return commands.names


def test_an_interrupted_demo_goes_on_with_the_step_that_it_stopped_in(commands: Commands, tmp_path: Path) -> None:
    assert started(tmp_path, commands, stop_at="train") == ["corpus", "preprocess", "train"]
    (tmp_path / "checkpoints").mkdir()
    assert started(tmp_path, commands, stop_at="eval_lm") == ["train", "eval_lm"]
    assert (tmp_path / "checkpoints").exists(), "training goes on from its checkpoint"
    assert started(tmp_path, commands) == ["eval_lm", "eval_lm"]
    report = (tmp_path / "report.txt").read_text()
    assert "training, 128 tokens" in report and "16.00" in report and "a text" in report


@pytest.mark.parametrize("flags", [[], ["--cutoffs", "10,20"]])
def test_a_finished_demo_or_another_one_starts_again(flags: list[str], commands: Commands, tmp_path: Path) -> None:
    started(tmp_path, commands, stop_at="" if not flags else "eval_lm")
    (tmp_path / "checkpoints").mkdir()
    assert started(tmp_path, commands, *flags) == ["corpus", "preprocess", "train", "eval_lm", "eval_lm"]
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("name", demo.OUTPUTS)
def test_files_of_something_else_are_not_removed_or_replaced(name: str, commands: Commands, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"settings": {}, "finished": true}')
    with pytest.raises(UserError, match=f"--output {tmp_path}: has {name}, which is not the demo's; use another"):
        demo.main(["--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == [name] and commands.names == []


def test_checkpoints_beside_a_state_of_something_else_stay(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "demo.json").write_text('{"scenes": 3}')
    with pytest.raises(UserError, match="has demo.json, which is not the demo's"):
        demo.main(["--output", str(tmp_path)])
    assert (tmp_path / "checkpoints").exists() and "scenes" in (tmp_path / "demo.json").read_text()


def test_commands_of_the_demo_import_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("yaml", "numpy", "fairseq", "fairseq_cli", "argparse"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('ran')")
    monkeypatch.chdir(tmp_path)
    finished = demo.run("checkpoint", "merge", "--help")
    assert finished.output[0].startswith("usage: fairseq-checkpoint merge CHECKPOINT")


def test_what_a_failing_command_printed_is_shown_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "LAUNCHER", "print('\\x1b[31mred'); raise SystemExit(3)")
    for show in (str, lambda line: None):
        with pytest.raises(SystemExit, match="3"):
            demo.run("train", "\x1b[31m", show=show)
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err and "\\x1b[31mred" in out and "\\x1b[31mred" in err


def test_invalid_flags_are_one_line_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fairseq-demo", "--max-words", "\x1b[31m"])
    with pytest.raises(SystemExit, match="2"):
        demo.cli_main()
    err = capsys.readouterr().err
    assert err.startswith("fairseq-demo: error: --max-words: invalid int value") and "\x1b" not in err
    assert err.count("\n") == 1
