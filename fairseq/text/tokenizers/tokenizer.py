"""A tokenizer, which makes words of text and then subwords of them; its file ``tokenization.json``,
and its flags."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq.config.command_settings import TextConfig
from fairseq.config.registry import BPES, TOKENIZERS
from fairseq.errors import UserError
from fairseq.system import checksums
from fairseq.system.files import atomic_file
from fairseq.system.opening import read_named, read_text
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers.base import UNKNOWN, Span, Subwords, Value, WordTokenizer, composed
from fairseq.text.tokenizers.moses import Moses
from fairseq.text.tokenizers.rules import SPACE, BeginMarks, SubwordMarks, WordRule, readable

TOKENIZATION = "tokenization.json"
ENTRIES = {"version", "dictionary", "tokenizer", "bpe"}
VERSION = 1
MASK = "<mask>"
LETTER = "\ua66e"  # of one manuscript: no subword joins it to its neighbours
AGAIN = "run fairseq-preprocess again"


@dataclass(frozen=True)
class Steps(Value):
    """Text to symbols and back: words, then subwords."""

    words: WordTokenizer | None = None  # the word tokenizer; None: subwords are made of the text as it is
    subwords: Subwords | None = None  # the subword encoding; None: words are symbols
    reads_unknown: bool = True  # `<unk>` in text is the unknown symbol, not for the subwords to read

    @property
    def glue(self) -> str:
        """What separates the texts of parts of a line, each decoded for itself."""
        # Words were cut at spaces, which then no symbol holds.
        return self.subwords.glue if self.words is None and self.subwords is not None else " "

    def encode_lines(self, lines: Sequence[str]) -> list[str]:
        """Return the symbols of each of *lines*, separated by spaces."""
        if self.reads_unknown and any(UNKNOWN in line for line in lines):
            return [self.encode(line) for line in lines]
        return self._encode(lines)

    def encode(self, line: str) -> str:
        """Return the symbols of one line, separated by spaces."""
        # Cut out before encoding: subwords would split `<unk>` into brackets and letters.
        parts = self._encode(line.split(UNKNOWN))
        return f" {UNKNOWN} ".join(parts).strip() if len(parts) > 1 else parts[0]

    def spans(self, line: str) -> list[Span]:
        """Return the symbols that :meth:`encode` makes
        of one line, with the text that each stands for."""
        spans, start = [], 0
        for number, part in enumerate(line.split(UNKNOWN)):
            if number:
                spans.append(Span(UNKNOWN, start - len(UNKNOWN), start))
            spans += [span.moved(start) for span in self._spans(part)]
            start += len(part) + len(UNKNOWN)
        return spans

    def spans_after(self, text: str) -> list[Span]:
        """Return the symbols of *text* that stands behind another symbol of its line, such as a
        mask: without the space that SentencePiece puts before a text."""
        spans = self.spans(text)
        if not spans or text[:1].isspace() or not spans[0].symbol.startswith((BeginMarks.mark, SPACE)):
            return spans
        behind = [span for span in self.spans(LETTER + text) if span.end > len(LETTER)]
        return [Span(symbol, max(0, start - len(LETTER)), end - len(LETTER)) for symbol, start, end in behind]

    def decode(self, symbols: Iterable[str]) -> str:
        """Return the text of the symbols of one line."""
        if self.subwords is None:
            assert self.words is not None
            return self.words.join(list(symbols))
        # Unknown symbols stand for themselves.
        parts: list[list[str]] = [[]]
        for symbol in symbols:
            if symbol == UNKNOWN:
                parts.append([])
            else:
                parts[-1].append(symbol)
        glue = self.glue
        decoded = [self.subwords.decode(part) if part else "" for part in parts]
        text = f"{glue}{UNKNOWN}{glue}".join(decoded).strip(glue)
        return self.words.join(text.split()) if self.words is not None else text

    def _encode(self, lines: Sequence[str]) -> list[str]:
        if self.words is not None:
            split = self.words.split
            lines = [" ".join(split(line)) for line in lines]
        return self.subwords.encode(lines) if self.subwords is not None else list(lines)

    def _spans(self, line: str) -> list[Span]:
        if self.words is None:
            assert self.subwords is not None
            return self.subwords.spans(line)
        words = self.words.spans(line)
        if self.subwords is None:
            return words
        return composed(line, words, self.subwords.spans(" ".join(word.symbol for word in words)))


@dataclass(frozen=True)
class Tokenizer(Steps):
    """Text to symbols and back, with its file; it has words, subwords or both."""

    @property
    def readable(self) -> Callable[[str], str]:
        """The function that shows a symbol to people, in tables, plots and on a terminal."""
        return readable if getattr(self.subwords, "byte_level", False) else str

    @property
    def rule(self) -> WordRule:
        """The rule that groups symbols into words."""
        return self.subwords.words if self.subwords is not None else SubwordMarks()

    def __str__(self) -> str:
        names = [_name(self.words, TOKENIZERS)] if self.words is not None else []
        return ", ".join(names + ([_name(self.subwords, BPES)] if self.subwords is not None else []))

    def save(self, folder: str | Path, symbols: Sequence[str]) -> None:
        """Write ``tokenization.json`` beside the ``dict.txt`` with *symbols*."""
        values = {
            "version": VERSION,
            # Files of two runs in one folder would encode text into ids of other words.
            "dictionary": checksums.fingerprint(symbols),
            "tokenizer": None,
            "bpe": None,
        }
        if self.words is not None:
            values["tokenizer"] = {"name": _name(self.words, TOKENIZERS), **dataclasses.asdict(self.words)}
        if self.subwords is not None:
            values["bpe"] = {"name": _name(self.subwords, BPES), **_written(self.subwords.content)}
        with atomic_file(Path(folder) / TOKENIZATION) as file:
            file.write(json.dumps(values, ensure_ascii=False, indent=1).encode() + b"\n")

    @classmethod
    def load(cls, path: str | Path, symbols: Sequence[str] | None = None) -> Tokenizer:
        """Read a ``tokenization.json``; see :func:`read_tokenization`.

        Raises:
            UserError: it is missing or damaged, or was made
                with another dictionary, or a package is missing.
        """
        _, values = read_tokenization(path, symbols)
        tokenizer = cls(_words(values.get("tokenizer"), path), _subwords(values.get("bpe"), path))
        if tokenizer == cls():
            raise UserError(f"{path}: names neither a tokenizer nor subwords; {AGAIN}")
        return tokenizer


def read_tokenization(path: str | Path, symbols: Sequence[str] | None = None) -> tuple[bytes, dict[str, object]]:
    """Return the content of a ``tokenization.json``, and its values.

    Args:
        symbols: of the dictionary that it must have been made with; None: any.

    Raises:
        UserError: it is missing, damaged, something else or of another dictionary; a pipe or device
            is not waited for.
    """
    content = read_named(path, AGAIN)
    checksums.check(path, content)
    try:
        values = json.loads(content)
    except ValueError as error:
        raise UserError(f"{path}: damaged: not JSON in UTF-8 ({error}); {AGAIN}") from None
    if not isinstance(values, dict) or values.get("version") != VERSION or not values.keys() <= ENTRIES:
        raise UserError(f"{path}: not a tokenization of version {VERSION}; {AGAIN}")
    if symbols is not None and values.get("dictionary") != checksums.fingerprint(symbols):
        # A task of masked tokens adds its symbol to the dictionary of a data folder.
        before = symbols[:-1] if symbols[-1:] == [MASK] else symbols
        if values.get("dictionary") != checksums.fingerprint(before):
            raise UserError(f"{path}: made for another dict.txt; use both files of one data folder")
    return content, values


def find_tokenizer(data: str | Path, symbols: Sequence[str]) -> Tokenizer | None:
    """Return what :meth:`Tokenizer.load` reads beside the dictionary of *data*, a folder or a
    ``dict.txt``, or None."""
    folder = Path(data) if os.path.isdir(data) else Path(data).parent
    path = folder / TOKENIZATION
    # A link that leads nowhere is an error, not a missing tokenizer.
    return Tokenizer.load(path, symbols) if os.path.lexists(path) else None


def _name(part: WordTokenizer | Subwords, registry: Any) -> str:
    return next(name for name in registry if registry[name] is type(part))


def _written(content: bytes) -> dict[str, str]:
    try:
        return {"text": content.decode("utf-8")}
    except UnicodeDecodeError:
        # Models of SentencePiece are binary.
        return {"base64": base64.b64encode(content).decode()}


def _words(values: object, path: str | Path) -> WordTokenizer | None:
    if values is None:
        return None
    name, settings = _entry(values, TOKENIZERS, path)
    known = {field.name: field for field in dataclasses.fields(TOKENIZERS[name])}
    if not known.keys() >= settings.keys() or not all(isinstance(value, str) for value in settings.values()):
        raise UserError(f"{path}: settings of tokenizer {name}: {str(sorted(settings))[:200]}; known: {sorted(known)}")
    words: WordTokenizer = TOKENIZERS[name](**settings)
    try:
        words.check()
    except UserError as error:
        raise UserError(f"{path}: {error.args[0]}; {AGAIN}") from None
    return words


def _subwords(values: object, path: str | Path) -> Subwords | None:
    if values is None:
        return None
    name, content = _entry(values, BPES, path)
    try:
        data = content["text"].encode() if "text" in content else base64.b64decode(content["base64"], validate=True)
    except (KeyError, AttributeError, TypeError, binascii.Error, UnicodeEncodeError):
        raise UserError(f"{path}: damaged: no content of {name}; {AGAIN}") from None
    subwords = BPES[name](data, str(path))
    subwords.check()
    return subwords


def _entry(values: Any, registry: Any, path: str | Path) -> tuple[str, Mapping[str, Any]]:
    name = values.get("name") if isinstance(values, dict) else None
    if not isinstance(name, str) or name not in registry:
        known = ", ".join(registry)
        raise UserError(f"{path}: unknown {registry.kind} {str(name)[:40]}; known: {known} (plug-ins need `user_dir`)")
    return name, {key: value for key, value in values.items() if key != "name"}


def chosen_words(config: TextConfig) -> WordTokenizer | None:
    """Return the word tokenizer of ``--tokenizer``;
    UserError if it or a setting, as the language, is unknown."""
    if config.moses_source_lang != "en" and config.tokenizer != "moses":
        raise UserError("`moses_source_lang`: has an effect with `tokenizer` moses only; leave it out")
    if config.tokenizer is None:
        return None
    kind = TOKENIZERS[config.tokenizer]
    words = Moses(config.moses_source_lang) if kind is Moses else kind()
    try:
        words.check()
    except UserError as error:
        flag = "`moses_source_lang`" if kind is Moses else f"`tokenizer` {config.tokenizer}"
        raise UserError(f"{flag}: {error.args[0]}") from None
    return words


def chosen_subwords(config: TextConfig) -> Subwords | None:
    """Return the encoding of ``--bpe`` with the file ``--bpe-codes``,
    None without; UserError if it is invalid."""
    if config.bpe is None:
        if config.bpe_codes is not None:
            raise UserError("`bpe_codes`: needs the kind of the codes; add `bpe` subword_nmt, or another")
        return None
    kind = BPES[config.bpe]
    if config.bpe_codes is None:
        return None
    source, advice = f"`bpe_codes` {config.bpe_codes}", f"give the file of `bpe` {config.bpe}"
    content = read_text(config.bpe_codes, advice, "`bpe_codes`")
    if not content.strip():
        raise UserError(f"{source}: is empty; {advice}")
    subwords = kind(content, source)
    subwords.check()
    return subwords


def chosen_rule(mark: str, dictionary: Dictionary) -> SubwordMarks | BeginMarks:
    """Return the rule of ``--remove-bpe`` for symbols of data without a tokenizer: a *mark* at the
    end of subwords, or ``sentencepiece``; UserError if no symbol of *dictionary* has the mark."""
    if mark == "sentencepiece":
        rule: SubwordMarks | BeginMarks = BeginMarks()
        marked = any(symbol.startswith(rule.mark) for symbol in dictionary.symbols)
    else:
        rule = SubwordMarks(mark.strip())
        marked = rule.mark != "" and any(symbol.endswith(rule.mark) for symbol in dictionary.symbols)
    if not marked:
        where = "begins" if mark == "sentencepiece" else "ends"
        raise UserError(
            f"`remove_bpe` {mark!r}: no symbol of the dictionary {where} with {rule.mark or 'it'}; give the mark of "
            "its subwords, such as @@, or sentencepiece, or leave it out"
        )
    return rule


def readable_symbols(dictionary: Dictionary) -> list[str]:
    """The symbols of *dictionary* as people read them."""
    tokenizer = find_tokenizer(dictionary.path, dictionary.symbols) if dictionary.path is not None else None
    return (
        [tokenizer.readable(symbol) for symbol in dictionary.symbols] if tokenizer is not None else dictionary.symbols
    )
