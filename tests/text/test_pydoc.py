"""The corpus of fairseq-corpus pydoc: prose, laid out like WikiText, the same bytes every time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq.errors import UserError
from fairseq.text import pydoc
from fairseq.text.pydoc import Article, Section

ROOT = Path(__file__).parents[2]
SPLITS = ("train", "valid", "test")

SOURCE = '''
"""Rules for the sizes of the boxes that are drawn.

This module has a *short* description with ``code`` and a :func:`~boxes.draw` in it, written over
two lines that end in well-
known hyphens.

    >>> draw(1)
    a doctest is not in the corpus of the demo at all.

For example::

    this is indented code and must be left out of it.
"""

def draw(size):
    """Draw a box of the given size on the screen and wait for the user to close it.

    Args:
        size (int): the length of a side of the box in pixels, which must not
            be negative.

    .. note:
        directive
    """

class Box:
    """Too short."""

add_docstr(lib.paint, "Paint the box that was drawn last in the colour that the user has chosen before.")
'''


def build(folder: Path, hash_seed: str) -> dict[str, str]:
    command = [sys.executable, "-m", "fairseq_cli.corpus", "pydoc", str(folder), "--max-words", "12000"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": hash_seed})
    return {split: (folder / f"{split}.txt").read_text(encoding="utf-8") for split in SPLITS}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build(tmp_path_factory.mktemp("pydoc"), "1")


def test_the_corpus_is_the_same_whatever_the_hash_seed(corpus: dict[str, str], tmp_path: Path) -> None:
    assert build(tmp_path, "2") == corpus


def test_every_article_opens_with_a_heading_between_empty_lines(corpus: dict[str, str]) -> None:
    for text in corpus.values():
        lines = text.split("\n")
        assert lines[0] == " "
        assert re.fullmatch(r" = [^=].* = ", lines[1])
        for number, line in enumerate(lines):
            if re.fullmatch(r" =( =)? .* = ", line):
                assert lines[number - 1] == lines[number + 1] == " "


def test_every_line_begins_and_ends_with_a_space_as_in_wikitext(corpus: dict[str, str]) -> None:
    for text in corpus.values():
        assert all(line == " " or re.fullmatch(r" \S(.*\S)? ", line) for line in text.split("\n")[:-1])


def test_no_paragraph_is_in_two_splits(corpus: dict[str, str]) -> None:
    paragraphs = {name: {p for p in text.split("\n") if len(p.split()) > 12} for name, text in corpus.items()}
    without_unknowns = {name: {p for p in found if "<unk>" not in p} for name, found in paragraphs.items()}
    assert all(paragraphs.values())
    assert not without_unknowns["train"] & without_unknowns["valid"]
    assert not without_unknowns["train"] & without_unknowns["test"]
    assert not without_unknowns["valid"] & without_unknowns["test"]


def test_every_paragraph_is_prose_without_code(corpus: dict[str, str]) -> None:
    for text in corpus.values():
        paragraphs = [line for line in text.split("\n") if line.strip() and not line.startswith(" = ")]
        assert all(re.search(r"[.!?] ([\"')] )*$", paragraph) for paragraph in paragraphs)
        assert not re.search(r">>>|0x[0-9a-f]{5,}|def \w+ \(| \.\. ", text)
        words = [word for paragraph in paragraphs for word in paragraph.split()]
        assert sum(word in {"the", "a", "of", "is", "to"} for word in words) > 0.12 * len(words)


def test_a_word_that_is_rare_in_the_training_text_is_unknown(corpus: dict[str, str]) -> None:
    words = corpus["train"].split()
    counts = {word: words.count(word) for word in set(words) if word != "<unk>"}
    assert min(counts.values()) >= pydoc.MIN_COUNT
    assert set(corpus["valid"].split()) | set(corpus["test"].split()) <= set(counts) | {"<unk>"}


def test_rare_words_are_left_as_they_are_if_asked_for(tmp_path: Path) -> None:
    articles = [Article("one", [Section("", ["A rare word occurs once, as gizmo does."])])]
    pydoc.write({"train": articles, "valid": articles}, tmp_path, rare_words=True)
    assert (tmp_path / "valid.txt").read_text() == " \n = one = \n \n A rare word occurs once , as gizmo does . \n"


def test_another_text_of_the_same_name_is_not_replaced(tmp_path: Path) -> None:
    articles = [Article("one", [Section("", ["A word."])])]
    for _ in range(2):  # its own may be written again
        pydoc.write({"train": articles, "valid": articles}, tmp_path, rare_words=True)
    (tmp_path / "valid.txt").write_text("mine")
    with pytest.raises(UserError, match="has another valid.txt; give a new folder"):
        pydoc.write({"train": articles, "valid": articles}, tmp_path, rare_words=True)
    assert (tmp_path / "valid.txt").read_text() == "mine"


def test_a_package_that_is_not_installed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="packages no_such_package: is not installed"):
        pydoc.make_corpus(tmp_path / "text", None, ["numpy", "no_such_package"], rare_words=False)
    assert not (tmp_path / "text").exists()


def test_a_module_gives_its_prose_and_leaves_out_its_code(tmp_path: Path) -> None:
    path = tmp_path / "boxes.py"
    path.write_text(SOURCE, encoding="utf-8")
    assert pydoc.module(("boxes", path)) == Article(
        "boxes",
        [
            Section(
                "",
                [
                    "Rules for the sizes of the boxes that are drawn.",
                    "This module has a short description with code and a draw in it, written over two lines that end in"
                    " well-known hyphens.",
                ],
            ),
            Section(
                "draw",
                [
                    "Draw a box of the given size on the screen and wait for the user to close it.",
                    "The length of a side of the box in pixels, which must not be negative.",
                ],
            ),
            Section("Box", []),
            Section("paint", ["Paint the box that was drawn last in the colour that the user has chosen before."]),
        ],
    )


def test_a_source_that_cannot_be_parsed_gives_no_article(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def (", encoding="utf-8")
    assert pydoc.module(("broken", path)).sections == []


def test_repeated_paragraphs_are_kept_once() -> None:
    once = " ".join(["word"] * 50)
    first, second = Article("first", [Section("", [once, once])]), Article("second", [Section("", [once])])
    assert list(pydoc.unique([first, second])) == [Article("first", [Section("", [once])])]


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("See :class:`torch.nn.Linear` for it.", "See Linear for it."),
        ("See :ref:`the notes <notes>` for it.", "See the notes for it."),
        ("A `link <https://example.org>`_ is text.", "A link is text."),
        ("- *one* of **several** items.", "One of several items."),
        ("That is all. It is used as follows:", "That is all."),
        ("Shown in [1]_ by two people.", "Shown in by two people."),
    ],
)
def test_markup_is_taken_off(marked: str, expected: str) -> None:
    assert pydoc.plain(marked) == expected


@pytest.mark.parametrize(
    "text", ["x = f(a) + g(b) is the value of it.", "int a b c d e f g.", "The end of the line of", "Short."]
)
def test_what_is_no_sentence_is_no_prose(text: str) -> None:
    assert not pydoc.is_prose(text)
