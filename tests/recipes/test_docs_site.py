"""The website: all pages have titles, long commands wrap and can be copied, the search works in an
opened file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import docs_site


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    docs_site.stage(tmp_path)
    return tmp_path


def test_commands_wrap_and_have_a_copy_button(pages: Path) -> None:
    settings: Any = docs_site.settings(pages, pages / "site")
    assert "content.code.copy" in settings["theme"]["features"]
    (style,) = settings["extra_css"]
    assert "white-space: pre-wrap" in (pages / style).read_text(encoding="utf-8")


def test_the_search_of_an_opened_file_needs_no_server_and_no_other_site(pages: Path) -> None:
    settings: Any = docs_site.settings(pages, pages / "site")
    assert {"search", "offline"} <= {plugin for plugin in settings["plugins"] if isinstance(plugin, str)}
    (script,) = settings["extra"]["polyfills"]
    assert "iframe-worker" in script, "otherwise the plug-in offline names one of another site"
    text = (pages / script).read_text(encoding="utf-8")
    assert "window.IFrameWorker = window.Worker" in text and "http" not in text


def test_every_page_of_the_menu_exists(pages: Path) -> None:
    settings: Any = docs_site.settings(pages, pages / "site")
    sections = [entry[name] for entry in settings["nav"] for name in entry if name in docs_site.SECTIONS]
    named = [path for section in sections for page in section for path in page.values()]
    assert set(named) == set(docs_site.TITLES) and all((pages / path).is_file() for path in named)
