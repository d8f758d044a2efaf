"""The word tokenizers and subword encodings of exported tokenizers; an export has its own ones
only."""

from __future__ import annotations

from typing import Any

from fairseq.text.tokenizers.base import Space
from fairseq.text.tokenizers.hf import GPT2, HuggingFace
from fairseq.text.tokenizers.moses import Moses
from fairseq.text.tokenizers.sentencepiece import SentencePiece
from fairseq.text.tokenizers.subword_nmt import SubwordNMT

PARTS: dict[str, Any] = {
    "space": Space,
    "moses": Moses,
    "subword_nmt": SubwordNMT,
    "sentencepiece": SentencePiece,
    "gpt2": GPT2,
    "hf": HuggingFace,
}
