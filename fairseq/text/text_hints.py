"""Hints on a text that looks unlike what the flags say:
hard-wrapped lines, raw text without a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence

FEWEST_LINES, FEWEST_WORDS = 40, 200  # of a text that shows what it is
MOST_WORDS = 20_000  # looked at
WIDTHS = range(40, 101)  # characters of hard-wrapped lines
LONGEST_SYMBOL = 25  # mean characters of a symbol where words are separated
ENDS = tuple(".!?:;\"'”’»)")  # of paragraphs and sentences
GLUED, ALONE = re.compile(r"\w[.,;:!?]"), re.compile(r"[.,;:!?]")
LEAST_GLUED = 0.03  # share of the words of raw text, at least


def wrapped_at(lines: Sequence[str]) -> int | None:
    """Return the width at which *lines* are wrapped; None if each is a paragraph or a sentence.

    Wrapped lines are nearly equally long, and most end inside a sentence.
    """
    lengths = sorted(len(line) for line in lines if line.strip())
    if len(lengths) < FEWEST_LINES:
        return None
    # Not the longest line: a table or an address may exceed the width.
    width = lengths[int(0.98 * (len(lengths) - 1))]
    pairs = zip(lines, lines[1:], strict=False)
    inner = [line.rstrip() for line, following in pairs if line.strip() and following.strip()]
    # Most lines of wrapped text have a line below;
    # a list of sentences between blank lines has none.
    if width not in WIDTHS or 2 * len(inner) < len(lengths):
        return None
    long = sum(len(line) >= 0.7 * width for line in inner)
    ended = sum(line.endswith(ENDS) for line in inner)
    return width if long >= 0.7 * len(inner) and 2 * ended < len(inner) else None


def raw_text(lines: Sequence[str]) -> str | None:
    """Return what shows that *lines* are not symbols between white space; None if they may be."""
    words = [word for line in lines for word in line.split()][:MOST_WORDS]
    if sum(map(len, words)) > LONGEST_SYMBOL * max(1, len(words)) and sum(map(len, words)) >= FEWEST_WORDS:
        return "words are not separated"
    # Tokenised text has marks of its own between blanks, raw text at the ends of words.
    glued = sum(GLUED.fullmatch(word[-2:]) is not None for word in words)
    alone = sum(ALONE.fullmatch(word) is not None for word in words)
    if len(words) >= FEWEST_WORDS and glued > alone and glued >= LEAST_GLUED * len(words):
        return "punctuation is part of words"
    return None
