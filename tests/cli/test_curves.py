"""fairseq-analyze curves reads the files of --metrics-file: figures, axes, seeds, stages and
targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
from mistakes import user_error

from fairseq.analysis import plots
from fairseq_cli.analyze import curves, get_curves_parser

LOSSES = (10.0, 8.0, 6.0, 6.5)


def metrics(path: Path, losses: tuple[float, ...] = LOSSES, **further: Any) -> Path:
    """A run with an interval and a validation every 10 updates, each of 100 tokens and 36
    seconds."""
    lines = []
    for number, loss in enumerate(losses, start=1):
        figures = {"step": 10 * number, "loss": loss, "wpb": 100.0, "wall": 360.0 * number}
        stage = {"stage": 1 if number < 3 else 2} if further.get("staged") else {}
        lines += [{"tag": "train_inner", **figures, **stage}, {"tag": "valid", **figures, **stage}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"tag": "valid", "st')
    return path


def plot(*flags: object) -> list[dict[str, Any]]:
    return curves(get_curves_parser().parse_args(runs.words(*flags)))


@pytest.mark.parametrize(
    ("over", "last", "reached"), [("updates", 40, 15), ("tokens", 4000, 1500), ("hours", 0.4, 0.15)]
)
def test_the_first_place_at_a_target_is_interpolated(tmp_path: Path, over: str, last: float, reached: float) -> None:
    (row,) = plot(metrics(tmp_path / "run.jsonl"), "--reach 9 --over", over)
    assert row["run"] == "run" and row[over] == pytest.approx(last)
    assert row[f"{over} to 9"] == pytest.approx([reached])
    assert (row["last loss"], row["lowest loss"]) == ([6.5], [6.0])


def test_runs_of_several_seeds_are_one_row_with_their_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = metrics(tmp_path / "1.jsonl"), metrics(tmp_path / "2.jsonl", (9.0, 8.0, 7.0))
    (row,) = plot(f"BERT={one},{two} --reach 6")
    assert row["seeds"] == 2 and row["updates"] == 30  # the shorter run's
    assert list(row["last loss"]) == [6.0, 7.0]
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown == "| BERT | 2 | 30 | 6.5 (6 to 7) | 6.5 (6 to 7) | not reached |"


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture_is_written_with_stages_marked(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"curves.{kind}"
    plot("staged=" + str(metrics(tmp_path / "run.jsonl", staged=True)), "--results-path", picture)
    assert picture.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[kind])


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn."""
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    make = plots._figure
    monkeypatch.setattr(plots, "_figure", lambda *size: drawn.append(make(*size)) or drawn[-1])
    return drawn


def test_training_and_validation_of_a_run_share_a_picture_and_a_colour(tmp_path: Path, figure: list[Any]) -> None:
    run = metrics(tmp_path / "run.jsonl", staged=True)
    rows = plot(f"A={run} B={run} --split train_inner,valid --results-path {tmp_path}/curves.png")
    names = ["A, train_inner", "A, valid", "B, train_inner", "B, valid"]
    assert [row["run"] for row in rows] == names
    (panel,) = figure[-1].axes
    assert [text.get_text() for text in panel.get_legend().get_texts()] == [*names, "next stage"]
    lines = panel.get_lines()[:4]
    assert [line.get_marker() for line in lines] == ["None", "o", "None", "s"]
    colours = [line.get_color() for line in lines]
    assert colours[0] == colours[1] != colours[2] == colours[3]


@pytest.mark.parametrize(
    ("flags", "x", "y", "tick"),
    [
        ("", "updates", "loss of valid (bits per target)", "100 k"),
        ("--figure wpb --split train_inner --over tokens", "tokens read", "wpb of train_inner (tokens)", "10 M"),
        ("--figure wall --over hours", "time of training (hours)", "wall of valid (seconds)", None),
    ],
)
def test_axes_have_units_and_large_numbers_a_prefix(
    tmp_path: Path, figure: list[Any], flags: str, x: str, y: str, tick: str | None
) -> None:
    lines = [
        {"tag": tag, "step": 100_000 * n, "loss": 9 - n, "wpb": 100.0, "wall": 60.0 * n}
        for n in (1, 2)
        for tag in ("train_inner", "valid")
    ]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plot(f"{tmp_path}/run.jsonl --results-path {tmp_path}/curves.png", flags)
    (panel,) = figure[-1].axes
    assert (panel.get_xlabel(), panel.get_ylabel()) == (x, y)
    shown = [label.get_text() for label in panel.get_xticklabels()]
    assert tick is None or tick in shown, shown


def test_tables_write_updates_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.jsonl").write_text('{"tag": "valid", "step": 300000, "loss": 6.25}\n')
    plot(tmp_path / "run.jsonl")
    assert capsys.readouterr().out.splitlines()[-1] == "| run | 1 | 300,000 | 6.25 | 6.25 |"


def test_a_stage_begins_at_the_last_figure_of_the_one_before(tmp_path: Path) -> None:
    from fairseq.analysis.curves import read_curve

    run = metrics(tmp_path / "run.jsonl", staged=True)
    assert read_curve("", [str(run)], "valid", "loss", "tokens").stages == (2000,)


def test_figures_of_a_run_are_those_that_training_wrote(tmp_path: Path) -> None:
    runs.train(tmp_path / "run", runs.BASELINE, "--max-update 4 --metrics-file", tmp_path / "run.jsonl")
    (row,) = plot(tmp_path / "run.jsonl", "--split train_inner")
    assert row["updates"] == 4 and 0 < row["lowest loss"][0] <= row["last loss"][0] < 30


def test_bad_runs_are_one_line_each(tmp_path: Path) -> None:
    run, other = metrics(tmp_path / "run.jsonl"), tmp_path / "other.jsonl"
    other.write_text('{"tag": "valid", "step": 15, "loss": 1}\n{"tag": "valid", "step": 20, "loss": 1}\n')
    (tmp_path / "text").write_text("some text\n")
    for flags, message in [
        (f"{tmp_path}/missing", "missing: file not found"),
        (f"{tmp_path}/text", "text: not a file of --metrics-file"),
        (f"{run} --figure bleu", "has no figure 'bleu' of 'valid'; it has of 'train_inner' loss, wpb"),
        (f"{run} --split ,", "--split ',': empty; give a validation split"),
        (f"{run} --split test", "has no figure 'loss' of 'test'"),
        (f"{run},{other}", "figures are from different updates"),
        (f"{run} --results-path {tmp_path}/curve.gif", "must end in .png, .svg, .pdf"),
    ]:
        with user_error(message) as error:
            plot(flags)
        assert "\n" not in error.value.with_flags


def test_names_that_are_not_utf8_are_escaped_in_the_table_and_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = metrics(tmp_path / "run\udcff.jsonl")
    rows = plot(path, f"name\udcfe={path}", "--results-path", tmp_path / "curves\udcff.png")
    assert [row["run"] for row in rows] == ["run\\udcff", "name\\udcfe"]
    assert (tmp_path / "curves\udcff.png").read_bytes().startswith(b"\x89PNG")
