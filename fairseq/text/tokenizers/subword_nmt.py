"""Byte-pair encoding of words (Sennrich et al. 2016) with subword-nmt, each word encoded once."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairseq.errors import UserError
from fairseq.text.tokenizers.base import Span, Subwords, aligned

CACHED_WORDS = 1 << 19  # words, at most
MARK = "@@"
FEWEST_MERGES = 100  # that show the alphabet they were learned on


@dataclass(frozen=True)
class SubwordNMT(Subwords):
    """Merges learned by subword-nmt; subwords that the next one continues end in ``@@``."""

    @classmethod
    def learn(cls, counts: Mapping[str, int], size: int) -> bytes:
        from subword_nmt.learn_bpe import learn_bpe

        if not counts:
            raise UserError("`learn_bpe`: the training text is empty; give a file with at least one word")
        words = io.StringIO("".join(f"{word} {counts[word]}\n" for word in sorted(counts)))
        codes = io.StringIO()
        # Its progress bar is for terminals only.
        output = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
        try:
            with output:
                learn_bpe(words, codes, size, is_dict=True)
        except ValueError:  # every word has one character
            raise UserError("`learn_bpe`: all words of the training text have one character; leave it out") from None
        # The first line is the version; a pair must occur twice to be merged.
        if codes.getvalue().count("\n") < 2:
            raise UserError("`learn_bpe`: no two letters of the training text occur together twice; give more text")
        return codes.getvalue().encode()

    def check(self) -> None:
        if not self._bpe.bpe_codes:
            raise UserError(f"{self.source}: has no merges; give a file of subword-nmt codes")
        if self._bpe.version not in ((0, 1), (0, 2)):
            version = ".".join(map(str, self._bpe.version))
            raise UserError(f"{self.source}: version {version[:40]} of subword-nmt codes; known are 0.1 and 0.2")

    def encode(self, lines: Sequence[str]) -> list[str]:
        encoded = []
        get = self._cache.get
        for line in lines:
            encoded.append(" ".join([get(word) or self._encode(word) for word in line.split()]))
        return encoded

    def spans(self, line: str) -> list[Span]:
        spans: list[Span] = []
        for word in line.split():
            symbols = self._encode(word).split()
            letters = [*(symbol.removesuffix(MARK) for symbol in symbols[:-1]), symbols[-1]]
            spans += aligned(line, symbols, letters, spans[-1].end if spans else 0)
        return spans

    def decode(self, symbols: Sequence[str]) -> str:
        return (" ".join(symbols) + " ").replace(f"{MARK} ", "").rstrip()

    def knows(self, text: str) -> float:
        if len(self._bpe.bpe_codes) < FEWEST_MERGES:
            return 1.0
        letters = Counter("".join(text.split()))
        merged = set().union(*(part.removesuffix("</w>") for pair in self._bpe.bpe_codes for part in pair))
        # By scripts and not by letters: merges show few of the letters of a large script.
        scripts = {_script(letter) for letter in merged}
        return sum(n for letter, n in letters.items() if _script(letter) in scripts) / max(1, letters.total())

    def _encode(self, word: str) -> str:
        if len(self._cache) >= CACHED_WORDS:
            self._cache.clear()
            # The cache of subword-nmt has no bound.
            self._bpe.cache.clear()
        symbols = self._cache[word] = " ".join(self._bpe.segment_tokens([word]))
        return symbols

    @functools.cached_property
    def _cache(self) -> dict[str, str]:
        return {}

    @functools.cached_property
    def _bpe(self) -> Any:
        from subword_nmt.apply_bpe import BPE

        with self.library(), contextlib.redirect_stderr(io.StringIO()):
            try:
                return BPE(io.StringIO(self.content.decode("utf-8")), separator=MARK)
            # subword-nmt ends the process after a message on stderr.
            except SystemExit:
                raise self.invalid("a line is not two symbols") from None


def _script(letter: str) -> str:
    """The script of a letter, e.g. ``CJK`` or ``LATIN``,
    from its Unicode name; the category of other characters."""
    category = unicodedata.category(letter)
    return unicodedata.name(letter, "").partition(" ")[0] if category[0] in "LM" else category
