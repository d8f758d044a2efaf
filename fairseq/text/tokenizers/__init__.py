"""Tokenizers: text to symbols of a dictionary and back,
as values that data and models carry with them."""

from __future__ import annotations

from fairseq.config.registry import BPES, TOKENIZERS, register_bpe, register_tokenizer
from fairseq.text.tokenizers import hf, moses, sentencepiece, subword_nmt
from fairseq.text.tokenizers.base import Subwords, WordTokenizer
from fairseq.text.tokenizers.rules import SubwordMarks, WordRule
from fairseq.text.tokenizers.tokenizer import TOKENIZATION, Tokenizer, find_tokenizer, read_tokenization

__all__ = [
    "BPES",
    "TOKENIZATION",
    "TOKENIZERS",
    "SubwordMarks",
    "Subwords",
    "Tokenizer",
    "WordRule",
    "WordTokenizer",
    "find_tokenizer",
    "hf",
    "moses",
    "read_tokenization",
    "register_bpe",
    "register_tokenizer",
    "sentencepiece",
    "subword_nmt",
]
