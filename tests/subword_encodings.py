"""Small subword encodings of every kind, for the tests."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import Subwords, Tokenizer
from fairseq.text.tokenizers.hf import GPT2, HuggingFace
from fairseq.text.tokenizers.sentencepiece import SentencePiece
from fairseq.text.tokenizers.subword_nmt import SubwordNMT

TEXT = "the lower the wider the newest lowest river , the low new riverbed isn't wide\n" * 3
COUNTS = Counter(TEXT.split())
MERGES = b"#version: 0.2\nt h\n\xc4\xa0 th\n\xc4\xa0th e\nl o\nlo w\n\xc4\xa0 low\n"


def hugging_face(kind: str) -> bytes:
    """A small ``tokenizer.json``."""
    library = pytest.importorskip("tokenizers")
    trainer: Any
    if kind == "wordpiece":
        tokenizer = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = library.decoders.WordPiece()
        trainer = library.trainers.WordPieceTrainer(vocab_size=32, special_tokens=["[UNK]"], show_progress=False)
    elif kind == "byte":
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    else:
        tokenizer = library.Tokenizer(library.models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace()
        tokenizer.decoder = library.decoders.Metaspace()
        trainer = library.trainers.BpeTrainer(vocab_size=32, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    return tokenizer.to_str().encode()


def encodings() -> dict[str, Subwords]:
    pytest.importorskip("tokenizers")
    pytest.importorskip("sentencepiece")
    return {
        "subword_nmt": SubwordNMT(SubwordNMT.learn(COUNTS, 20)),
        "sentencepiece": SentencePiece(SentencePiece.learn(COUNTS, 24)),
        "gpt2": GPT2(MERGES),
        "wordpiece": HuggingFace(hugging_face("wordpiece")),
        "byte": HuggingFace(hugging_face("byte")),
        "metaspace": HuggingFace(hugging_face("metaspace")),
    }


def complete(tokenizer: Tokenizer) -> Dictionary:
    """A dictionary with every symbol of a byte-level encoding, not in its order."""
    dictionary = Dictionary()
    for symbol in sorted(json.loads(tokenizer.subwords.library_json())["model"]["vocab"]):  # type: ignore[union-attr]
        dictionary.add_symbol(symbol)
    return dictionary
