"""Pictures and pages: labels apart, a font for every script, texts aligned by their direction."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq.analysis import plots
from fairseq.evaluation import report
from fairseq.notes import note_map
from fairseq.notes.note_map import HEIGHT, width, without_overlap
from fairseq.notes.study import Note
from fairseq.system import pages


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


def test_labels_of_a_map_of_notes_keep_apart() -> None:
    notes = [Note(f"occurrences{number}", 9, 9, 1, 1.0) for number in range(5)]
    places = np.array([[0, 0], [0.001, 0], [0.5, 0.5], [0.501, 0.5], [1, 1]], float)
    page = note_map.as_page(notes, places, {}, {})
    assert re.findall(r"<g class=named><title>(\w+)", page) == ["occurrences0", "occurrences2", "occurrences4"]
    assert page.count("<circle") == 5


def test_words_and_heads_of_tables_are_not_broken() -> None:
    page = pages.page("T", {}, pages.table([["word", "occurrences"], ["a", "1"]]))
    rules = re.findall(r"(?:^| )(?:td, )?th \{([^}]*)\}", page, flags=re.MULTILINE)
    assert len(rules) == 2 and not any("anywhere" in rule for rule in rules) and "nowrap" in rules[1]
    assert "<div class=table>" in page and re.search(r"\.table \{ overflow-x: auto", page)


def test_paragraphs_are_aligned_by_the_direction_of_their_text() -> None:
    assert "p { unicode-bidi: plaintext; text-align: start; }" in pages.page("T", {}, pages.paragraphs(["שלום"]))


def figure_with(text: str) -> Any:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.text(0.5, 0.5, text)
    return figure


def test_texts_get_an_installed_font_that_has_their_characters(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    figure = figure_with("loss 中文")
    font_manager = pytest.importorskip("matplotlib.font_manager")
    entry = font_manager.FontEntry
    installed = [
        entry(fname="latin.ttf", name="Latin Sans", style="normal", weight=400),
        entry(fname="some.ttf", name="Some Sans", style="normal", weight=400),
        entry(fname="cjk.ttf", name="CJK Serif", style="normal", weight=400),
        entry(fname="last.ttf", name="Last Resort High-Efficiency", style="normal", weight=400),
    ]
    have = {"latin.ttf": "loss", "some.ttf": "中", "cjk.ttf": "中文", "last.ttf": "loss中文"}
    monkeypatch.setattr(font_manager.fontManager, "ttflist", installed)
    monkeypatch.setattr(plots, "_default_file", lambda: "latin.ttf")
    monkeypatch.setattr(plots, "_characters", lambda file: frozenset(map(ord, have[file])))
    plots.choose_fonts(figure)
    assert figure.texts[0].get_fontfamily()[-1] == "CJK Serif" and "Some Sans" not in figure.texts[0].get_fontfamily()
    assert not caplog.messages
    have["cjk.ttf"] = "文"
    have["some.ttf"] = ""
    with caplog.at_level(logging.WARNING):
        plots.choose_fonts(figure_with("中文"))
    (message,) = caplog.messages
    assert message.startswith("pictures: no installed font has 中, boxes are drawn; install a font")


def test_matplotlibs_own_fonts_are_kept_where_they_suffice() -> None:
    figure = figure_with("loss α → 100 %")
    before = figure.texts[0].get_fontfamily()
    plots.choose_fonts(figure)
    assert figure.texts[0].get_fontfamily() == before
    assert ord("A") in plots._characters(plots._default_file()) and plots._characters("missing.ttf") == frozenset()


def test_the_perplexity_of_a_word_without_spaces_is_short() -> None:
    assert [report.shown(value) for value in (27.526, 1234567.0, 2.0**724, float("inf"))] == [
        "27.53", "1234567.00", "8.83e+217", "inf",
    ]  # fmt: skip


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
