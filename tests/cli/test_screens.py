"""What a user sees on a terminal: next steps, curves, tables, a session of prompts."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs

from fairseq.config import options
from fairseq.system.tables import table
from fairseq_cli import interactive
from fairseq_cli.analyze import curves, get_curves_parser
from fairseq_cli.interactive import get_interactive_generation_parser

MODEL = runs.GOLDEN / "baseline.pt"


def plotted(*flags: Any) -> list[dict[str, Any]]:
    return curves(get_curves_parser().parse_args(runs.words(*flags)))


def test_a_run_keeps_its_metrics(tmp_path: Path) -> None:
    runs.train(tmp_path / "own", runs.BASELINE, "--max-update 4")
    entries = [json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries if entry["tag"] == "train_inner"] == [1, 2, 3, 4]
    runs.train(tmp_path / "own", runs.BASELINE, "--max-update 6")
    entries = [json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries if entry["tag"] == "train_inner"] == [1, 2, 3, 4, 5, 6]
    runs.train(tmp_path / "none", runs.SHORT, "--no-save")
    assert not (tmp_path / "none").exists() or not list((tmp_path / "none").iterdir())
    runs.train(tmp_path / "named", runs.SHORT, "--metrics-file", tmp_path / "m.jsonl")
    assert (tmp_path / "m.jsonl").exists() and not (tmp_path / "named" / "metrics.jsonl").exists()


def test_the_folder_of_a_run_is_enough_for_its_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "own").mkdir()
    lines = [
        {"tag": tag, "step": n, "loss": 9.0 - n, "wpb": 1.0, "wall": 1.0 * n}
        for n in (1, 2)
        for tag in ("train_inner", "valid")
    ]
    (tmp_path / "own" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = plotted(tmp_path / "own")
    assert [row["run"] for row in rows] == ["own, train_inner", "own, valid"]
    picture = tmp_path / "own" / "curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and capsys.readouterr().out.endswith(f"\n\n{picture}\n")
    plotted(f"a={tmp_path}/own,{tmp_path}/own --out", tmp_path / "two.png")
    assert (tmp_path / "two.png").exists()


def test_a_table_is_aligned_on_a_terminal_and_markdown_elsewhere() -> None:
    rows = [["run", "loss"], ["a", "10"], ["longer", "9.5"]]
    assert table(rows, 1, terminal=True) == ["run     loss", "────────────", "a         10", "longer   9.5"]
    assert table(rows, 1, terminal=False)[1] == "| --- | ---: |"


def session(monkeypatch: pytest.MonkeyPatch, text: bytes, terminal: bool, *flags: Any) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO(text), isatty=lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stdin)
    words = runs.words(runs.DATA, "--cpu --max-new-tokens 5 --path", MODEL, *flags)
    interactive.main(options.parse_args_and_arch(get_interactive_generation_parser(), words))


def test_a_session_has_a_banner_samples_and_does_not_repeat_the_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session(monkeypatch, b"gres shouth\n", True)
    shown = capsys.readouterr()
    assert "Samples from all tokens, temperature 1, up to 5 tokens" in shown.err
    assert "Ctrl-D ends" in shown.err and str(MODEL) in shown.err and max(map(len, shown.err.splitlines()[1:])) <= 80
    assert "gres shouth" not in shown.out and shown.out.strip()
    session(monkeypatch, b"gres shouth\n", False)
    piped = capsys.readouterr()
    assert piped.out == "gres shouth" + shown.out, "the same sample"
    session(monkeypatch, b"gres shouth\n", True, "--beam 2")
    assert "Beam of 2" in capsys.readouterr().err
