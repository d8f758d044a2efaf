"""Tokenizers: text to symbols of a dictionary and back, as values that data and models carry with them."""

from __future__ import annotations

from fairseq.registry import Registry
from fairseq.tokenizers.base import Subwords, WordTokenizer
from fairseq.tokenizers.rules import SubwordMarks, WordRule

TOKENIZERS: Registry[type[WordTokenizer]] = Registry("word tokenizer", "--tokenizer")
BPES: Registry[type[Subwords]] = Registry("subword encoding", "--bpe")
register_tokenizer = TOKENIZERS.register
register_bpe = BPES.register

# Registration is a side effect of the import.
from fairseq.tokenizers import byte_level, hf, moses, sentencepiece, space, subword_nmt  # noqa: E402
from fairseq.tokenizers.tokenizer import TOKENIZATION, Tokenizer, find_tokenizer, fingerprint  # noqa: E402

__all__ = [
    "BPES",
    "TOKENIZATION",
    "TOKENIZERS",
    "SubwordMarks",
    "Subwords",
    "Tokenizer",
    "WordRule",
    "WordTokenizer",
    "byte_level",
    "find_tokenizer",
    "fingerprint",
    "hf",
    "moses",
    "register_bpe",
    "register_tokenizer",
    "sentencepiece",
    "space",
    "subword_nmt",
]
