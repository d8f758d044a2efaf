"""Pictures: short numbers, no control characters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fairseq.analysis import plots
from fairseq.analysis.recl import ContextLosses
from fairseq.evaluation import report


def test_the_perplexity_of_a_word_without_spaces_is_short() -> None:
    assert [report.format_perplexity(value) for value in (27.526, 1234567.0, 2.0**724, float("inf"))] == [
        "27.53", "1234567.00", "8.83e+217", "inf",
    ]  # fmt: skip


def test_a_warning_of_a_missing_character_has_no_control_characters(
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("matplotlib")
    measured = ContextLosses(["be\x07ll\x1b[2J"], np.array([1, 2]), np.ones((1, 2, 3)))
    plots.draw_perplexities(tmp_path / "perplexity.png", measured)
    shown = [str(warning.message) for warning in recwarn] + [*capfd.readouterr(), caplog.text]
    assert not [text for text in shown if "\x07" in text or "\x1b" in text]
