"""Pictures: labels apart, texts of every script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq.analysis import plots
from fairseq.analysis.plots import HEIGHT, width, without_overlap
from fairseq.evaluation import report
from fairseq.notes.study import Note


@given(
    st.lists(st.tuples(st.floats(0, 300), st.floats(0, 300), st.text("ab中", min_size=1, max_size=12)), max_size=30),
    st.integers(0, 30),
)
def test_labels_do_not_overlap_and_no_label_that_fits_is_left_out(points: list[Any], most: int) -> None:
    places, words = np.array([point[:2] for point in points]).reshape(-1, 2), [point[2] for point in points]
    chosen = without_overlap(places, words, 9, most)

    def overlap(a: int, b: int) -> bool:
        across = places[a, 0] <= places[b, 0] + width(words[b], 9) and places[b, 0] <= places[a, 0] + width(words[a], 9)
        return bool(across and abs(places[a, 1] - places[b, 1]) <= HEIGHT * 9)

    assert not any(overlap(a, b) for a in chosen for b in chosen if a < b) and len(chosen) <= most
    if len(chosen) < most:
        left_out = set(range(len(points))) - set(chosen)
        assert all(any(overlap(a, b) for b in chosen if b < a) for a in left_out)


def test_the_perplexity_of_a_word_without_spaces_is_short() -> None:
    assert [report.shown(value) for value in (27.526, 1234567.0, 2.0**724, float("inf"))] == [
        "27.53", "1234567.00", "8.83e+217", "inf",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
def test_pictures_of_this_machine_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    notes = [Note(word, 9, 9, 1, 1.0) for word in ("中华", "שלום", "plain")]
    plots.draw_notes(tmp_path / "notes.png", notes, np.array([[0, 0], [1, 1], [2, 0]], float))
    assert (tmp_path / "notes.png").read_bytes().startswith(b"\x89PNG")


def test_a_warning_of_a_missing_character_has_no_control_characters(
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("matplotlib")
    notes = [Note("be\x07ll\x1b[2J", 5, 5, np.zeros(2), []), Note("low", 5, 5, np.zeros(2), [])]
    plots.draw_notes(tmp_path / "notes.png", notes, np.array([[0.0, 0.0], [1.0, 1.0]]))
    shown = [str(warning.message) for warning in recwarn] + [*capfd.readouterr(), caplog.text]
    assert not [text for text in shown if "\x07" in text or "\x1b" in text]
