"""Words between white space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairseq.config.registry import register_tokenizer
from fairseq.text.tokenizers.base import WordTokenizer


@register_tokenizer("space")
@dataclass(frozen=True)
class Space(WordTokenizer):
    """Words that white space separates, unchanged."""

    def split(self, line: str) -> list[str]:
        return line.split()

    def join(self, words: Sequence[str]) -> str:
        return " ".join(words)
