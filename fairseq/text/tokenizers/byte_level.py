"""GPT-2's byte-level byte-pair encoding (Radford et al. 2019), from its file of merges."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fairseq.config.registry import register_bpe
from fairseq.text.tokenizers.base import Vocabulary
from fairseq.text.tokenizers.hf import LibrarySubwords, import_tokenizers
from fairseq.text.tokenizers.rules import BYTES, ByteLevelWords, WordRule, bytes_text


@register_bpe("gpt2")
@dataclass(frozen=True)
class GPT2(LibrarySubwords):
    """Byte-level merges (``vocab.bpe`` or ``merges.txt``); the symbols follow from them. ``Ġ`` stands for a space."""

    rule: ClassVar[WordRule] = ByteLevelWords()
    glue: ClassVar[str] = ""

    def check(self) -> None:
        _ = self._tokenizer

    def decode(self, symbols: Sequence[str]) -> str:
        return bytes_text("".join(symbols))

    @functools.cached_property
    def _tokenizer(self) -> Any:
        library = import_tokenizers("gpt2")
        vocabulary = {symbol: index for index, symbol in enumerate(self._symbols)}
        with self.library():
            tokenizer = library.Tokenizer(library.models.BPE(vocabulary, self._merges))
            tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(dict(enumerate(self._symbols)), None, self.source)

    @functools.cached_property
    def _symbols(self) -> list[str]:
        # The order of GPT-2's ids.
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
            # In order: a merge can use only what the merges before it have made.
            if len(pair) != 2 or not made.issuperset(pair):
                raise self.invalid(f"line {number}: {line[:40]!r} is not a merge of two byte-level symbols before it")
            merges.append((pair[0], pair[1]))
            made.add(pair[0] + pair[1])
        if not merges:
            raise self.invalid("no merges")
        return merges
