"""Tokenizers of Hugging Face's library ``tokenizers``: any ``tokenizer.json``."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fairseq.errors import UserError
from fairseq.registry import register_bpe
from fairseq.tokenizers.base import EXTRA, Subwords, Vocabulary
from fairseq.tokenizers.rules import BeginMarks, ByteLevelWords, ContinuationMarks, EndMarks, WordRule


@register_bpe("hf")
@dataclass(frozen=True)
class HuggingFace(Subwords):
    """Symbols of a ``tokenizer.json``, without those that its post-processor adds; its unknown one is ``<unk>``."""

    @property
    def words(self) -> WordRule:
        """The rule of the file's decoder.

        Raises:
            UserError: the decoder marks neither beginnings nor ends of words.
        """
        names = _names(json.loads(self.content).get("decoder"))
        for kind, rule in _RULES.items():
            if kind in names:
                return rule
        raise UserError(
            f"{self.source}: --notes needs words, and the decoder of this tokenizer does not mark them; "
            f"known decoders: {', '.join(_RULES)}"
        )

    @property
    def byte_level(self) -> bool:
        """Whether symbols are sequences of bytes."""
        return "ByteLevel" in _names(json.loads(self.content).get("decoder"))

    def check(self) -> None:
        _ = self._vocabulary

    def encode(self, lines: Sequence[str]) -> list[str]:
        found = self._tokenizer.encode_batch_fast(list(lines), add_special_tokens=False)
        return [self._vocabulary.line(encoding.ids) for encoding in found]

    def decode(self, symbols: Sequence[str]) -> str:
        plain = self._vocabulary.plain(symbols)
        decoder = self._tokenizer.decoder
        return str(decoder.decode(plain)) if decoder is not None else " ".join(plain)

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        ids = self._tokenizer.get_vocab()
        unknown = ids.get(getattr(self._tokenizer.model, "unk_token", None))
        return Vocabulary({index: symbol for symbol, index in ids.items()}, unknown, self.source)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        library = import_tokenizers("hf")
        try:
            tokenizer = library.Tokenizer.from_str(self.content.decode("utf-8"))
        except Exception as error:  # the library raises Exception itself
            raise self.invalid(error) from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


_RULES: dict[str, WordRule] = {
    "WordPiece": ContinuationMarks(),
    "ByteLevel": ByteLevelWords(),
    "Metaspace": BeginMarks("▁"),
    "BPEDecoder": EndMarks(),
}


def import_tokenizers(kind: str) -> Any:
    """Return the package ``tokenizers``.

    Raises:
        UserError: it is missing.
    """
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"--bpe {kind}: the package tokenizers is missing; {EXTRA}") from None
    return tokenizers


def _names(decoder: Any) -> list[str]:
    """The types of a decoder and of those that it is a sequence of."""
    if not isinstance(decoder, dict):
        return []
    parts = [name for part in decoder.get("decoders", []) for name in _names(part)]
    marks = ["Metaspace"] if (decoder.get("type"), decoder.get("pattern")) == ("Replace", {"String": "▁"}) else []
    return [str(decoder.get("type")), *parts, *marks]
