"""Tokenizers of Hugging Face's library ``tokenizers``:
any ``tokenizer.json``, learned or GPT-2's byte-level merges."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import ModuleType
from typing import Any, ClassVar

from fairseq.errors import UserError
from fairseq.system.terminal import silent_stderr
from fairseq.text.tokenizers.base import Span, Subwords, Vocabulary, import_package
from fairseq.text.tokenizers.rules import (
    BYTES,
    BeginMarks,
    ByteLevelWords,
    ContinuationMarks,
    EndMarks,
    WordRule,
    bytes_text,
)

PROBES = ["The cat  sat, ż 語 🙂 \u200d", "", " ", "\0", "a" * 1000]
"""Text that uses what a tokenizer has for unknown characters, none at all, and long words."""


LONGEST_WORD = 1000  # characters of a word from which merges are learned


@dataclass(frozen=True)
class LibrarySubwords(Subwords):
    """Subwords that the library computes with a tokenizer that a subclass makes."""

    reads_lines: ClassVar[bool] = True

    @property
    def byte_level(self) -> bool:
        """Whether symbols are sequences of bytes, as in GPT-2."""
        return True

    @property
    def glue(self) -> str:
        # Symbols of bytes hold every space of the text.
        return "" if self.byte_level else super().glue

    def encode(self, lines: Sequence[str]) -> list[str]:
        with self.library():
            # The fast variant leaves out offsets, which nothing reads here.
            encodings = self._tokenizer.encode_batch_fast(list(lines), add_special_tokens=False)
            return [self._vocabulary.line(encoding.ids) for encoding in encodings]

    def spans(self, line: str) -> list[Span]:
        with self.library():
            encoding = self._tokenizer.encode(line, add_special_tokens=False)
            return self._vocabulary.spans(encoding.ids, encoding.offsets)

    def written(self, symbol: str) -> str:
        """Return a symbol of the library as :meth:`encode` writes it."""
        return self._vocabulary.written.get(symbol, symbol)

    def library_json(self) -> str:
        """Return the ``tokenizer.json``, as the library writes it."""
        return str(self._tokenizer.to_str())

    @functools.cached_property
    def _tokenizer(self) -> Any:
        raise NotImplementedError

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        with self.library():
            ids = self._tokenizer.get_vocab()
            # WordPiece names its unknown symbol in the model; byte-level models have none.
            unknown = ids.get(getattr(self._tokenizer.model, "unk_token", None))
            symbols = {index: symbol for symbol, index in sorted(ids.items(), key=itemgetter(1))}
            return Vocabulary(symbols, unknown, self.source)


@dataclass(frozen=True)
class HuggingFace(LibrarySubwords):
    """Symbols of a ``tokenizer.json``, without those
    that its post-processor adds; its unknown one is ``<unk>``."""

    learns_lines: ClassVar[bool] = True

    @classmethod
    def learn_lines(cls, lines: Iterable[list[str]], size: int) -> bytes:
        """Return a ``tokenizer.json`` of *size* byte-level symbols (Radford et al. 2019, section
        2.2), or fewer.

        Pairs that occur once are not merged. All bytes have symbols, so that nothing is unknown,
        and no prefix space is added, so that every text comes back exactly.
        """
        if size < len(BYTES):
            raise UserError(f"`learn_bpe` {size}: byte-level symbols include {len(BYTES)} bytes; give more")
        import_tokenizers("hf")
        return _learned(lines, size)

    @property
    def symbols(self) -> Sequence[str]:
        return self._vocabulary.line(range(self._tokenizer.get_vocab_size())).split() if self.byte_level else ()

    @property
    def words(self) -> WordRule:
        """The rule of the file's decoder; UserError if
        that marks neither beginnings nor ends of words."""
        for kind, rule in _RULES.items():
            if kind in self._names:
                return rule
        raise UserError(
            f"{self.source}: `notes` needs words, and the decoder of this tokenizer does not mark them; "
            f"known decoders: {', '.join(_RULES)}"
        )

    @property
    def byte_level(self) -> bool:
        return "ByteLevel" in self._names

    def check(self) -> None:
        _ = self._vocabulary, self._names
        # A panic of the library is a damaged file, and is reported on descriptor 2 before it is
        # raised. Its other errors, as for characters without a symbol, depend on the text.
        with self.library(), silent_stderr(), contextlib.suppress(Exception):
            for probe in PROBES:
                symbols = self._tokenizer.encode(probe, add_special_tokens=False).tokens
                if self._tokenizer.decoder is not None:
                    self._tokenizer.decoder.decode(symbols)

    def decode(self, symbols: Sequence[str]) -> str:
        plain = self._vocabulary.plain(symbols)
        with self.library():
            decoder = self._tokenizer.decoder
            return str(decoder.decode(plain)) if decoder is not None else " ".join(plain)

    @functools.cached_property
    def _names(self) -> list[str]:
        """The types of the file's decoder and of those that it is a sequence of."""
        try:
            values = json.loads(self.content)
        except ValueError as error:
            raise self.invalid(error) from None
        if not isinstance(values, dict):
            raise self.invalid("not a JSON object")
        return _names(values.get("decoder"))

    @functools.cached_property
    def _tokenizer(self) -> Any:
        library = import_tokenizers("hf")
        with self.library(), silent_stderr():
            tokenizer = library.Tokenizer.from_str(self.content.decode("utf-8"))
            # A file may ask for rows to be cut and padded
            # as its model reads them; a corpus is neither.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return tokenizer


@dataclass(frozen=True)
class GPT2(LibrarySubwords):
    """GPT-2's byte-level merges (``vocab.bpe`` or ``merges.txt``; Radford et al. 2019). ``Ġ``
    stands for a space."""

    rule: ClassVar[WordRule] = ByteLevelWords()

    def check(self) -> None:
        _ = self._tokenizer

    def decode(self, symbols: Sequence[str]) -> str:
        return bytes_text("".join(symbols))

    @functools.cached_property
    def _tokenizer(self) -> Any:
        library = import_tokenizers("gpt2")
        ids = {symbol: index for index, symbol in enumerate(self._symbols)}
        with self.library():
            tokenizer = library.Tokenizer(library.models.BPE(ids, self._merges))
            tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer

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


_RULES: dict[str, WordRule] = {
    "WordPiece": ContinuationMarks(),
    "ByteLevel": ByteLevelWords(),
    "Metaspace": BeginMarks("▁"),
    "BPEDecoder": EndMarks(),
}


def import_tokenizers(kind: str) -> ModuleType:
    """Return the package ``tokenizers``; UserError if it is missing."""
    return import_package("tokenizers", f"`bpe` {kind}: the package tokenizers is missing; pip install tokenizers")


def _learned(lines: Iterable[list[str]], size: int) -> bytes:
    library = import_tokenizers("hf")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    # All 256 bytes are in the alphabet, seen or not;
    # a fixed order makes equal texts give equal files.
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, initial_alphabet=sorted(BYTES), show_progress=False
    )
    cut = functools.partial(_cut_words, tokenizer.pre_tokenizer)
    texts = (list(itertools.chain(*map(cut, batch))) for batch in lines)
    # The library looks for no signals, and merging takes minutes: Ctrl-C ends the process at once.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        tokenizer.train_from_iterator(texts, trainer)
    finally:
        signal.signal(signal.SIGINT, before)
    return str(tokenizer.to_str()).encode()


def _cut_words(words: Any, line: str) -> list[str]:
    """Cut the *words* of a line, by a pre-tokenizer, at :data:`LONGEST_WORD`: learning is quadratic
    in their length."""
    if len(line) <= LONGEST_WORD:
        return [line]
    spans = (span for _, span in words.pre_tokenize_str(line))
    cuts = [at for start, end in spans for at in range(start + LONGEST_WORD, end, LONGEST_WORD)]
    return [line[start:end] for start, end in itertools.pairwise([0, *cuts, len(line)])]


def _names(decoder: object) -> list[str]:
    """The types of a decoder and of those that it is a sequence of."""
    if not isinstance(decoder, dict):
        return []
    inner = decoder.get("decoders")
    parts = [name for part in (inner if isinstance(inner, list) else []) for name in _names(part)]
    # Files made of SentencePiece models replace its mark instead of naming Metaspace.
    marks = ["Metaspace"] if (decoder.get("type"), decoder.get("pattern")) == ("Replace", {"String": "▁"}) else []
    return [str(decoder.get("type")), *parts, *marks]
