"""GPT-2's byte-level byte-pair encoding (Radford et al. 2019), from its file of merges."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fairseq.config.registry import register_bpe
from fairseq.text.tokenizers.base import Subwords
from fairseq.text.tokenizers.hf import import_tokenizers
from fairseq.text.tokenizers.rules import BYTES, ByteLevelWords, WordRule, bytes_text
from fairseq.text.tokenizers.spans import Span


@register_bpe("gpt2")
@dataclass(frozen=True)
class GPT2(Subwords):
    """Byte-level merges (``vocab.bpe`` or ``merges.txt``); the symbols follow from them. ``Ġ`` stands for a space."""

    rule: ClassVar[WordRule] = ByteLevelWords()
    glue: ClassVar[str] = ""

    def check(self) -> None:
        _ = self._tokenizer

    def encode(self, lines: Sequence[str]) -> list[str]:
        with self.library(lines):
            # The fast variant leaves out offsets, which nothing reads here.
            encodings = self._tokenizer.encode_batch_fast(list(lines), add_special_tokens=False)
        return [" ".join([self._symbols[index] for index in encoding.ids]) for encoding in encodings]

    def spans(self, line: str) -> list[Span]:
        with self.library([line]):
            encoding = self._tokenizer.encode(line, add_special_tokens=False)
        return [Span(self._symbols[index], *ends) for index, ends in zip(encoding.ids, encoding.offsets, strict=True)]

    def decode(self, symbols: Sequence[str]) -> str:
        return bytes_text("".join(symbols))

    def library_json(self) -> str:
        """Return the ``tokenizer.json`` of this encoding, with ids of its own."""
        return str(self._tokenizer.to_str())

    @functools.cached_property
    def _tokenizer(self) -> Any:
        library = import_tokenizers("gpt2")
        vocabulary = {symbol: index for index, symbol in enumerate(self._symbols)}
        with self.library():
            tokenizer = library.Tokenizer(library.models.BPE(vocabulary, self._merges))
            tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer

    @functools.cached_property
    def _symbols(self) -> list[str]:
        return list(dict.fromkeys([*BYTES, *(first + second for first, second in self._merges)]))

    @functools.cached_property
    def _merges(self) -> list[tuple[str, str]]:
        try:
            lines = self.content.decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise self.invalid(error) from None
        merges, made = [], set(BYTES)
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#version"):
                continue
            pair = line.rstrip("\r").split(" ")
            if len(pair) != 2 or not made.issuperset(pair):
                raise self.invalid(f"line {number}: {line[:40]!r} is not a merge of two byte-level symbols before it")
            merges.append((pair[0], pair[1]))
            made.add(pair[0] + pair[1])
        if not merges:
            raise self.invalid("no merges")
        return merges
