"""The generated pages show the present parsers."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import reference_pages

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_generated_pages_show_the_present_parsers(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert text == reference_pages.PAGES[name](), "run python -m scripts.reference_pages"
