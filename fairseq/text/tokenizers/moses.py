"""The Moses tokenizer (Koehn et al. 2007) of sacremoses,
with the words of each chunk of text cached."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fairseq.errors import UserError
from fairseq.text.tokenizers.base import Span, WordTokenizer, aligned

CACHED_CHUNKS = 1 << 18  # chunks, at most
JUNK = dict.fromkeys(range(32))  # sacremoses deletes control characters
# A word with punctuation that sacremoses splits off wherever
# it stands; it marks runs of full stops with MULTI.
SIMPLE = re.compile(r"""(["(\[]*)((?!\w*MULTI)[A-Za-z0-9]+)([;:!?")\]]*,?[;:!?")\]]*)(\.?)""")
HYPHEN = "@-@"  # a hyphen inside a word
LOWER, DIGIT, OTHER = "a0A"  # kinds of the chunk after a full stop, each with a chunk of that kind


@dataclass(frozen=True)
class Moses(WordTokenizer):
    """Words and punctuation of sacremoses for *language*;
    hyphens inside words as ``@-@``, no XML escapes."""

    language: str = "en"

    def check(self) -> None:
        from sacremoses.corpus import NonbreakingPrefixes

        known = set(NonbreakingPrefixes().available_langs.values())
        if self.language not in known:
            raise UserError(f"language {self.language[:40]!r}: Moses has {', '.join(sorted(known))}")

    def split(self, line: str) -> list[str]:
        return self._chunks.split(line)

    def join(self, words: Sequence[str]) -> str:
        # Nothing was escaped, and text may speak of `&amp;` itself.
        return str(self._detokenizer.detokenize(words, unescape=False)) if words else ""

    def spans(self, line: str) -> list[Span]:
        words = self.split(line)
        return aligned(line, words, ["-" if word == HYPHEN and HYPHEN not in line else word for word in words])

    @functools.cached_property
    def _chunks(self) -> _Chunks:
        return _Chunks(self.language)

    @functools.cached_property
    def _detokenizer(self) -> Any:
        from sacremoses import MosesDetokenizer

        return MosesDetokenizer(lang=self.language)


class _Chunks:
    """sacremoses' words, computed once for each chunk between spaces.

    Of the text around a chunk its words depend on: whether it is the first or the last of the line;
    after a final full stop on the kind of the next character; and, where a chunk ends and the next
    begins with an apostrophe, on more: such lines are split as a whole.
    """

    def __init__(self, language: str) -> None:
        from sacremoses import MosesTokenizer

        self._moses = MosesTokenizer(lang=language)
        # sacremoses builds sets of all letters for each token with a full stop.
        lower, letters = frozenset(self._moses.IsLower), frozenset(self._moses.IsAlpha)
        self._moses.islower = lower.issuperset
        self._moses.isanyalpha = lambda text: not letters.isdisjoint(text)
        self._lower = lower
        self._before_numbers = frozenset(self._moses.NUMERIC_ONLY_PREFIXES)
        self._abbreviations = frozenset(self._moses.NONBREAKING_PREFIXES) - self._before_numbers
        self._words: dict[str, list[str]] = {}  # of a chunk inside a line that does not end in a full stop
        self._in_context: dict[tuple[str, bool, str], list[str]] = {}

    def split(self, line: str) -> list[str]:
        chunks = line.split()
        if not line.isprintable():
            # sacremoses drops them as well; here a chunk is looked up without them.
            chunks = " ".join(chunks).translate(JUNK).split()
        if not chunks:
            return []
        if "'" in line and "' '" in " ".join(chunks):
            return self._tokenize(line)
        words = list(self._of(chunks[0], True, self._kind(chunks[1]) if len(chunks) > 1 else ""))
        get = self._words.get
        for index in range(1, len(chunks) - 1):
            chunk = chunks[index]
            words += get(chunk) or self._inside(chunk, chunks[index + 1])
        if len(chunks) > 1:
            words += self._of(chunks[-1], False, "")
        return words

    def _inside(self, chunk: str, after: str) -> list[str]:
        if chunk.endswith("."):
            return self._of(chunk, False, self._kind(after))
        words = self._of(chunk, False, OTHER)
        # Emptied at once: frequent chunks are back soon,
        # and an order of use would cost more than it saves.
        if len(self._words) >= CACHED_CHUNKS:
            self._words.clear()
        self._words[chunk] = words
        return words

    def _kind(self, chunk: str) -> str:
        return LOWER if chunk[0] in self._lower else DIGIT if "0" <= chunk[0] <= "9" else OTHER

    def _of(self, chunk: str, is_first: bool, after: str) -> list[str]:
        """The words of *chunk* at the beginning of a line or not, before a chunk of the kind
        *after*, if not empty."""
        simple = SIMPLE.fullmatch(chunk)
        if simple and not simple[4]:
            return [*simple[1], simple[2], *simple[3]]
        if simple and not simple[3]:
            # The full stop belongs to an abbreviation, and to a word that does not end a sentence.
            one = simple[2] in self._abbreviations or after == LOWER
            one = one or after == DIGIT and simple[2] in self._before_numbers
            return [*simple[1], f"{simple[2]}."] if one else [*simple[1], simple[2], "."]
        key = chunk, is_first, after
        tokens = self._in_context.get(key)
        if tokens is None:
            # Neighbours of the same kinds stand for the line's, and are cut off again.
            text = ("" if is_first else f"{OTHER} ") + chunk + (f" {after}" if after else "")
            words = self._tokenize(text)
            tokens = words[0 if is_first else 1 : len(words) - 1 if after else len(words)]
            if len(self._in_context) >= CACHED_CHUNKS:
                self._in_context.clear()
            self._in_context[key] = tokens
        return tokens

    def _tokenize(self, text: str) -> list[str]:
        # As WikiText was tokenised: hyphens as `@-@`,
        # and no XML escapes, which would be words of their own.
        return list(self._moses.tokenize(text, aggressive_dash_splits=True, escape=False))
