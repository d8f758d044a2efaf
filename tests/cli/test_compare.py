"""fairseq-compare: runs within a budget, what is missing only, and a test of differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import warm
from mistakes import user_error
from scipy import stats

from fairseq.config import options
from fairseq_cli import compare

PAIRS = runs.ROOT / "examples" / "babylm" / "pairs.jsonl"
TINY = """--arch transformer_lm_tiny --cpu --train-subset valid --valid-subset test --tokens-per-sample 16
    --batch-size 4 --decoder-layers 1 --disable-validation"""


def run(*words: Any) -> None:
    compare.main(options.parse_args_and_arch(compare.get_compare_parser(), list(map(str, words))))


def report(*words: Any) -> None:
    compare.report(options.parse_args_and_arch(compare.get_report_parser(), list(map(str, words))))


def write_rows(folder: Path, bits: dict[str, tuple[float, ...]]) -> None:
    for name, values in bits.items():
        for seed, value in enumerate(values, start=1):
            row = folder / name / str(seed) / "row.json"
            row.parent.mkdir(parents=True)
            rest = {"seed": seed, "updates": 7, "tokens": 7, "sittings": [{"wall": 2.0}, {"wall": 3, "processor": 5}]}
            row.write_text(json.dumps({"bits_per_token": value, **rest}))


def test_what_is_missing_is_trained_and_measured_within_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, out = tmp_path / "settings.yaml", tmp_path / "out"
    settings.write_text(f"base: {TINY}\nfirst: ''\nsecond: --lr 0.001\n")
    write_rows(out, {"second": (99.0,)})
    words = ["--seconds", 0.2, "--seeds", 1, "--pairs", PAIRS, "--eval-flags", "--cpu --gen-subset test"]
    with warm.interpreter(tmp_path) as program:
        monkeypatch.setattr("sys.executable", str(program))
        run(settings, runs.DATA, "--out", out, *words)
    first, head, _, best, second = capsys.readouterr().out.splitlines()
    row = json.loads((out / "first" / "1" / "row.json").read_text())
    assert row["updates"] == int((out / "first" / "updates").read_text()) > 0
    assert row["sittings"][0]["wall"] > 0 and row["flags"] == " ".join(TINY.split())
    scores = json.loads((out / "first" / "1" / "scores" / "text" / "results.json").read_text())
    assert row["bits_per_token"] == scores["loss_base2"] and 0 < row["accuracy"]["all"] < 1
    assert not list(out.glob("*/*/*.pt"))
    assert first.startswith("first seed 1: ") and head.endswith("bits per token | from first | p | pairs (%) |")
    assert best.endswith(f" {row['bits_per_token']:.4f} | – | – | {100 * row['accuracy']['all']:.2f} |")
    change = 99 - row["bits_per_token"]
    assert second.startswith("| second | 1 | 7 | ") and second.endswith(f" | 99.0000 | {change:+.4f} | – | – |")


def test_differences_are_between_runs_of_one_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, {"b": (1.5, 2.7, 9.0), "a": (2.0, 3.0)})
    report(tmp_path, "--against", "a")
    a, b = capsys.readouterr().out.splitlines()[2:]
    # −0.5 and −0.3: t(0.975; 1) · 0.1 = 1.2706, and t = −4.
    p = 2 * stats.t.sf(4, 1)
    assert a.endswith("| – | – |") and b.endswith(f" -0.4000 ± 1.2706 | {p:.1g} |")
    assert b.startswith("| b | 3 | 7 | 0.00 | 5 | – | ")


def test_a_mistake_is_one_line_before_anything_is_trained(tmp_path: Path) -> None:
    settings, out = tmp_path / "settings.yaml", tmp_path / "out"
    words = (settings, tmp_path, "--out", out)
    with user_error("--seconds, --updates: give one of them"):
        run(*words)
    with user_error("--seeds 1,1: one value twice"):
        run(*words, "--updates", 1, "--seeds", "1,1")
    for content in ("- a\n", "a: 1\n", "a: '\"'\n", "\xff", "a: [", "base: ''\n", "x/y: ''\n"):
        settings.write_bytes(content.encode("latin-1"))
        with user_error(f"^{settings}: "):
            run(*words, "--updates", 1)
    settings.write_text("first: ''\n")
    with user_error(f"--only nine: not in {settings}; it has first"):
        run(*words, "--updates", 1, "--only", "nine")
    with user_error("--processes 4096: must be at most "):
        run(*words, "--updates", 1, "--processes", 4096)
    with user_error(f"{out}: no complete runs"):
        report(out)
    assert not out.exists()


def test_a_run_that_fails_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings.yaml").write_text("first: --no-such-flag\n")
    out = tmp_path / "out"
    with warm.interpreter(tmp_path) as program, user_error(f"{out}/first/1/train.log: the command failed"):
        monkeypatch.setattr("sys.executable", str(program))
        run(tmp_path / "settings.yaml", runs.DATA, "--out", out, "--updates", 1)
    assert "--no-such-flag" in (out / "first" / "1" / "train.log").read_text().splitlines()[-1]


def test_a_system_that_cannot_pin_processes_uses_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    from fairseq.analysis import comparison

    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert comparison.available_cores() == [0, 1, 2]
