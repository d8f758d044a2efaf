"""fairseq-demo goes on where it stopped, and runs nothing of the folder that it is started in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairseq.errors import UserError
from fairseq_cli import demo

SMALL = ["--max-words", "100", "--updates", "4", "8"]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that a demo runs, which do nothing but write what the demo reads."""
    names: list[str] = []

    def run(command: str, *flags: str, show: Any = str) -> list[str]:
        names.append(command)
        if command == "preprocess":
            folder = Path(flags[flags.index("--destdir") + 1])
            folder.mkdir()
            (folder / "dict.txt").touch()
        if command == "train":
            records = [
                {"tag": "train_inner", "step": 4, "loss": 5.0, "wps": 100.0},
                {"tag": "valid", "step": 8, "loss": 4.0},
            ]
            log = Path(flags[flags.index("--metrics-file") + 1])
            log.write_text("".join(json.dumps(values) + "\n" for values in records))
        return ["Evaluated 9 tokens in 1 s (9.0 tokens/s)", "Loss (base 2): 3, Perplexity: 8.0"]

    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(demo, "plot", lambda folder: None)
    monkeypatch.setattr(demo, "sample", lambda folder: "a text")
    return names


def test_a_demo_goes_on_with_the_data_and_the_run_that_are_there(commands: list[str], tmp_path: Path) -> None:
    demo.main(["--output", str(tmp_path), *SMALL])
    assert commands == ["corpus", "preprocess", "train", "eval_lm", "eval_lm"]
    report = (tmp_path / "report.txt").read_text()
    assert "training, 128 tokens" in report and "16.00" in report and "a text" in report
    demo.main(["--output", str(tmp_path), *SMALL])
    assert commands[5:] == ["train", "eval_lm", "eval_lm"]


@pytest.mark.parametrize("name", demo.OUTPUTS)
def test_files_of_another_demo_or_of_something_else_stay(name: str, commands: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"stages": [1, 2]}')
    with pytest.raises(UserError, match=f"--output {tmp_path}: has {name}, not of a demo with these settings"):
        demo.main(["--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == [name] and commands == []


def test_commands_of_the_demo_import_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("yaml", "numpy", "fairseq", "fairseq_cli", "argparse"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('ran')")
    monkeypatch.chdir(tmp_path)
    finished = demo.run("checkpoint", "merge", "--help")
    assert finished[0].startswith("usage: fairseq-checkpoint merge CHECKPOINT")


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
    assert err.startswith("fairseq-demo: error: --max-words: expected a whole number above 0") and "\x1b" not in err
    assert err.count("\n") == 1
