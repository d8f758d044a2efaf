"""The documents: their length, what fits on a screen, and words that an English-speaking colleague
would not use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import reference_pages

ROOT = Path(__file__).parents[1]
GENERATED = {"docs/commands.md", "docs/compatibility.md"}
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "examples").glob("**/*.md"))
PAGES = [page for page in PAGES if str(page.relative_to(ROOT)) not in GENERATED]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
AVOID = re.compile(
    r"\b(beside|that of|those of|goes on|in turns|anew|an update (takes|holds|has)|tokens an update|updates an epoch"
    r")\b",
    re.IGNORECASE,
)
# A picture is a figure; a number of the log is a metric.
FIGURE = re.compile(r"\bfigures?\b(?! \d)", re.IGNORECASE)
# Commands as the papers' authors published them.
PUBLISHED = {"examples/language_model/README.md", "examples/truncated_bptt/README.md"}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """The text of *page* without code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def lines(page: Path, pattern: str) -> list[str]:
    return [line for line in prose(page).splitlines() if re.search(pattern, line)]


def test_all_documents_together_are_a_book_of_an_afternoon() -> None:
    counts = {page.name: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert sum(counts.values()) <= 30_000, sorted(counts.items(), key=lambda item: -item[1])


def test_readme_and_changelog_are_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 150


@each_page
def test_rows_of_tables_fit_on_a_screen(page: Path) -> None:
    assert not [row for row in page.read_text(encoding="utf-8").splitlines() if row.startswith("|") and len(row) > 160]


@each_page
def test_code_fits_eighty_columns(page: Path) -> None:
    if str(page.relative_to(ROOT)) in PUBLISHED:
        pytest.skip("commands as the authors published them")
    blocks = FENCE.findall(page.read_text(encoding="utf-8"))
    assert not [line for block in blocks for line in block.splitlines() if len(line) > 80]


@each_page
def test_sentences_use_the_words_of_the_field(page: Path) -> None:
    assert not [match[0] for match in AVOID.finditer(prose(page))]
    if page.name != "CHANGELOG.md":
        assert not [line for line in prose(page).splitlines() if FIGURE.search(line) and "the figures are" not in line]


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_generated_pages_show_the_present_parsers(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert text == reference_pages.PAGES[name](), "run python -m scripts.reference_pages"
