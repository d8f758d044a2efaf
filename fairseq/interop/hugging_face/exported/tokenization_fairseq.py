# From fairseq-short. MIT License, Copyright (c) the fairseq-short authors.
"""Tokenizers of fairseq-short for transformers: the dictionary, and ``tokenization.json`` where
there is one.

A text is lines, separated by the end-of-line symbol; the tokenizer of a model from elsewhere, such
as GPT-2, reads a text with its line feeds. Without ``tokenization.json``, symbols are what white
space separates.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from importlib import import_module  # transformers asks for packages of import statements before it needs them
from typing import Any, NamedTuple

import tokenizers
from transformers import BatchEncoding, PreTrainedTokenizer
from transformers.utils import PaddingStrategy

ROLES = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
UNKNOWN, HYPHEN, SPACES = "<unk>", "@-@", ("▁", "Ġ")  # in which a symbol may begin for a space
LINE_END = re.compile(r"\r\n|\r|\n")
LETTER = "\ua66e"  # of one manuscript: no subword joins it to its neighbours


class Span(NamedTuple):
    """A symbol and the characters *start* to *end* of the text that it stands for."""

    symbol: str
    start: int
    end: int

    def moved(self, count: int) -> Span:
        return Span(self.symbol, self.start + count, self.end + count)


class Space:
    """Words that white space separates."""

    def spans(self, text: str) -> list[Span]:
        return [Span(word[0], *word.span()) for word in re.finditer(r"\S+", text)]

    def join(self, words: Sequence[str]) -> str:
        return " ".join(words)


class Moses:
    """Words and punctuation of the Moses tokenizer; hyphens inside words are ``@-@``."""

    def __init__(self, language: str = "en") -> None:
        library = import_module("sacremoses")
        self.tokenizer, self.detokenizer = library.MosesTokenizer(language), library.MosesDetokenizer(language)
        # Faster than the library's own, which build these sets for each word with a full stop.
        lower, letters = frozenset(self.tokenizer.IsLower), frozenset(self.tokenizer.IsAlpha)
        self.tokenizer.islower = lower.issuperset
        self.tokenizer.isanyalpha = lambda text: not letters.isdisjoint(text)

    def spans(self, text: str) -> list[Span]:
        line = " ".join(text.split())
        words = self.tokenizer.tokenize(line, aggressive_dash_splits=True, escape=False) if line else []
        written = ["-" if word == HYPHEN and HYPHEN not in text else word for word in words]
        return aligned(text, words, written)

    def join(self, words: Sequence[str]) -> str:
        return str(self.detokenizer.detokenize(words, unescape=False)) if words else ""


class SubwordNMT:
    """Merges of subword-nmt; subwords that the next one continues end in ``@@``."""

    def __init__(self, content: bytes) -> None:
        self.bpe = import_module("subword_nmt.apply_bpe").BPE(io.StringIO(content.decode("utf-8")))

    def spans(self, text: str) -> list[Span]:
        spans = []
        for word in re.finditer(r"\S+", text):
            start, symbols = word.start(), self.bpe.segment_tokens([word[0]])
            for number, symbol in enumerate(symbols, 1):
                end = word.end() if number == len(symbols) else start + len(symbol) - len("@@")
                spans.append(Span(symbol, start, end))
                start = end
        return spans

    def decode(self, symbols: Sequence[str]) -> str:
        return (" ".join(symbols) + " ").replace("@@ ", "").rstrip()


class SentencePiece:
    """Pieces of a SentencePiece model; ``▁`` stands for a space."""

    def __init__(self, content: bytes) -> None:
        self.model = import_module("sentencepiece").SentencePieceProcessor(model_proto=content)
        pieces = {index: self.model.id_to_piece(index) for index in range(len(self.model))}
        self.written, self.plain = spelled(pieces, self.model.unk_id())

    def spans(self, text: str) -> list[Span]:
        ids, pieces = self.model.encode(text, out_type=int), self.model.encode(text, out_type=str)
        normal, origin = self.model.normalize(text, with_offsets=True)
        at = [number for number, letter in enumerate(normal) for _ in letter.encode()] + [len(normal)]  # of each byte
        spans, byte = [], 0
        for index, piece in zip(ids, pieces, strict=True):
            first = byte
            # A byte piece is written `<0x41>`, six letters for one byte.
            byte += 1 if self.model.is_byte(index) else len(piece.encode())
            start, end = origin[at[first]], origin[at[byte - 1] + 1]
            # Several letters of one, as of a ligature: all of them stand for it.
            if start == end and piece != "▁":
                end = next((position for position in origin[at[byte - 1] :] if position > start), start)
            spans.append(Span(self.written[index], start, end))
        return spans

    def decode(self, symbols: Sequence[str]) -> str:
        return str(self.model.decode_pieces([self.plain.get(symbol, symbol) for symbol in symbols]))


class HuggingFace:
    """Symbols of a ``tokenizer.json``, without those that it adds around a text."""

    def __init__(self, content: bytes) -> None:
        self.library = self.build(content.decode("utf-8"))
        self.library.no_truncation()
        self.library.no_padding()
        ids = self.library.get_vocab()
        unknown = ids.get(getattr(self.library.model, "unk_token", None))
        symbols = {index: symbol for symbol, index in sorted(ids.items(), key=lambda item: item[1])}
        self.written, self.plain = spelled(symbols, unknown)
        # Whether symbols are sequences of bytes, which hold every space of a text.
        self.byte_level = '"ByteLevel"' in json.dumps(json.loads(self.library.to_str())["decoder"])

    build: Any = staticmethod(tokenizers.Tokenizer.from_str)

    def spans(self, text: str) -> list[Span]:
        encoding = self.library.encode(text, add_special_tokens=False)
        return [Span(self.written[index], *ends) for index, ends in zip(encoding.ids, encoding.offsets, strict=True)]

    def decode(self, symbols: Sequence[str]) -> str:
        plain = [self.plain.get(symbol, symbol) for symbol in symbols]
        return " ".join(plain) if self.library.decoder is None else str(self.library.decoder.decode(plain))


class GPT2(HuggingFace):
    """GPT-2's byte-level merges (Radford et al. 2019)."""

    def build(self, content: str) -> Any:
        lines = [line.rstrip("\r").split(" ") for line in content.split("\n") if line.strip()]
        merges = [(line[0], line[1]) for line in lines if line[0] != "#version:"]
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        symbols = dict.fromkeys([*letters, *(first + second for first, second in merges)])
        library = tokenizers.Tokenizer(tokenizers.models.BPE({symbol: n for n, symbol in enumerate(symbols)}, merges))
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        return library


KINDS: dict[str, Any] = {"space": Space, "moses": Moses, "subword_nmt": SubwordNMT, "sentencepiece": SentencePiece}
KINDS |= {"gpt2": GPT2, "hf": HuggingFace}


class Coder:
    """Symbols of a line of text and back: words, then subwords.

    *values*: of a ``tokenization.json``.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        words, subwords = values.get("tokenizer"), values.get("bpe")
        self.words: Any = None
        self.subwords: Any = None
        if words is not None:
            self.words = KINDS[words["name"]](**{key: value for key, value in words.items() if key != "name"})
        if subwords is not None:
            content = subwords["text"].encode() if "text" in subwords else base64.b64decode(subwords["base64"])
            self.subwords = KINDS[subwords["name"]](content)

    def spans(self, line: str) -> list[Span]:
        """The symbols of *line*, in which ``<unk>`` is the unknown symbol."""
        spans, start = [], 0
        for number, part in enumerate(line.split(UNKNOWN)):
            if number:
                spans.append(Span(UNKNOWN, start - len(UNKNOWN), start))
            spans += [span.moved(start) for span in self._spans(part)]
            start += len(part) + len(UNKNOWN)
        return spans

    def spans_after(self, text: str) -> list[Span]:
        """The symbols of *text* behind a mask: without the space that some encodings put first."""
        spans = self.spans(text)
        if not spans or text[:1].isspace() or not spans[0].symbol.startswith(SPACES):
            return spans
        behind = [span for span in self.spans(LETTER + text) if span.end > len(LETTER)]
        return [Span(symbol, max(0, start - len(LETTER)), end - len(LETTER)) for symbol, start, end in behind]

    def decode(self, symbols: Iterable[str]) -> str:
        """The text of the symbols of one line; unknown symbols stand for themselves."""
        if self.subwords is None:
            return str(self.words.join(list(symbols)))
        glue = "" if self.words is None and getattr(self.subwords, "byte_level", False) else " "
        parts = [self.subwords.decode(part) if part else "" for part in split(symbols, UNKNOWN)]
        text = f"{glue}{UNKNOWN}{glue}".join(parts).strip(glue)
        return text if self.words is None else str(self.words.join(text.split()))

    def _spans(self, line: str) -> list[Span]:
        if self.words is None:
            return list(self.subwords.spans(line))
        words = self.words.spans(line)
        if self.subwords is None:
            return list(words)
        return composed(line, words, self.subwords.spans(" ".join(word.symbol for word in words)))


class FairseqTokenizer(PreTrainedTokenizer):
    """Text to ids and back, for language models; ``bos_token`` is the end-of-line symbol."""

    vocab_files_names = {"vocab_file": "dict.txt", "tokenization_file": "tokenization.json"}
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(
        self,
        vocab_file: str,
        tokenization_file: str | None = None,
        keeps_lines: bool = False,  # whether the tokenizer of a model from elsewhere reads line feeds
        **kwargs: object,
    ) -> None:
        self.vocab_file, self.tokenization_file, self.keeps_lines = vocab_file, tokenization_file, keeps_lines
        with open(vocab_file, encoding="utf-8") as file:
            self.symbols, roles = self.read_vocabulary(file.read().removesuffix("\n").split("\n"))
        self.ids = {symbol: index for index, symbol in enumerate(self.symbols)}
        self.line_end, self.unknown, self.padding = roles["eos"], roles.get("unk"), self._padding(roles)
        self.coder: Any = Coder({"tokenizer": {"name": "space"}})
        if tokenization_file is not None and os.path.exists(tokenization_file):
            with open(tokenization_file, encoding="utf-8") as file:
                whole = Coder(json.load(file))
            self.coder = whole.subwords if keeps_lines else whole
        super().__init__(**{**self.special_names(roles), "keeps_lines": keeps_lines, **kwargs})

    def read_vocabulary(self, lines: list[str]) -> tuple[list[str], dict[str, str]]:
        """The symbols in the order of their ids, and the special ones by role."""
        fields = lines[0].split()
        header = fields[0] == "#specials" and "=" in fields[-1]
        # Each before its count.
        words = [line.rstrip().removesuffix(" #fairseq:overwrite").rpartition(" ")[0] for line in lines[header:]]
        if header:
            return words, dict(field.partition("=")[::2] for field in fields[1:])
        return [*ROLES.values(), *words], dict(ROLES)

    def special_names(self, roles: dict[str, str]) -> dict[str, object]:
        """The arguments of transformers for the special symbols *roles*."""
        end = roles.get("stop", roles["eos"])
        names = {"bos_token": roles["eos"], "eos_token": end, "unk_token": roles.get("unk")}
        return {**names, "pad_token": roles.get("pad", roles["eos"])}

    @property
    def vocab_size(self) -> int:
        return len(self.symbols)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)

    def tokenize(self, text: str, *args: object, **kwargs: object) -> list[str]:
        return [span.symbol for span in self.spans(text)]

    def spans(self, text: str) -> list[Span]:
        """The symbols of *text*, without those that stand around it."""
        result, start, masked = [], 0, False
        for part in [text] if self.split_special_tokens else self._parts(text):
            if part in self._added_tokens_encoder and part != self.padding:
                result.append(Span(part, start, start + len(part)))
            elif self.keeps_lines:
                result += [span.moved(start) for span in self.coder.spans(part)]
            else:
                result += [span.moved(start) for span in self._lines(part, masked)]
            start += len(part)
            masked = part == self._special_tokens_map.get("mask_token")
        # Padding stands around texts and not in them.
        unknown = self.unknown or ""
        return [span._replace(symbol=unknown) if span.symbol == self.padding else span for span in result]

    def _padding(self, roles: dict[str, str]) -> str | None:
        """The padding symbol; None if it is another's, or its text a word with its own id."""
        symbol = roles.get("pad", "")
        is_own = symbol in self.ids and self.symbols.index(symbol) == self.ids[symbol] and symbol != roles["eos"]
        return symbol if is_own and "unk" in roles else None

    def _parts(self, text: str) -> list[str]:
        """Cut *text* at special symbols; padding is left in the text around it."""
        parts, cut = [""], False
        for part in self.tokens_trie.split(text):
            is_symbol = part in self._added_tokens_encoder and part != self.padding
            if is_symbol or cut:
                parts.append(part)
            else:
                parts[-1] += part
            cut = is_symbol
        return [part for part in parts if part]

    def _lines(self, text: str, masked: bool) -> list[Span]:
        """The symbols of *text*, before which *masked* says whether there is a mask."""
        result, start = [], 0
        for end in [*LINE_END.finditer(text), None]:
            stop = len(text) if end is None else end.start()
            spans = self.coder.spans_after if masked and not start else self.coder.spans
            result += [span.moved(start) for span in spans(text[start:stop])]
            if end is not None:
                # The last of its characters: so do tokenizers of the library `tokenizers`.
                result.append(Span(self.line_end, end.end() - 1, end.end()))
                start = end.end()
        return result

    def _encode_plus(self, text: Any, text_pair: Any = None, **kwargs: Any) -> BatchEncoding[Any]:
        if not kwargs.get("return_offsets_mapping"):
            return super()._encode_plus(text, text_pair, **kwargs)
        if not isinstance(text, str):
            if kwargs.get("is_split_into_words"):
                raise ValueError("return_offsets_mapping: give texts, or pairs of texts")
            return super()._encode_plus(text, text_pair, **kwargs)  # which calls this for every single text
        # At the end, since offsets must be padded with the ids.
        padding = kwargs.pop("padding_strategy", PaddingStrategy.DO_NOT_PAD)
        tensors = kwargs.pop("return_tensors", None)
        kwargs["return_offsets_mapping"] = False
        encoding = super()._encode_plus(text, text_pair, **{**kwargs, "return_attention_mask": False})
        encoding["offset_mapping"] = self._offsets(text, text_pair, kwargs)
        names = ("max_length", "pad_to_multiple_of", "padding_side", "return_attention_mask")
        padded = self.pad(encoding, padding.value, **{name: kwargs[name] for name in names if name in kwargs})
        return BatchEncoding(padded.data, tensor_type=tensors, prepend_batch_axis=True)

    def _offsets(self, text: str, pair: str | None, kwargs: dict[str, Any]) -> list[tuple[int, int]]:
        """The offsets of what truncation leaves; (0, 0) for symbols around texts."""
        first, second = self.spans(text), self.spans(pair) if pair is not None else []
        # Truncation cuts numbers of spans in place of ids, which it does not look at.
        ends = {len(self) + number: (span.start, span.end) for number, span in enumerate([*first, *second])}
        numbers, truncation = list(ends), kwargs.get("truncation_strategy")
        names = ("add_special_tokens", "max_length", "stride")
        cut = self.prepare_for_model(
            numbers[: len(first)],
            numbers[len(first) :] if pair is not None else None,
            truncation=getattr(truncation, "value", False),
            **{name: kwargs[name] for name in names if name in kwargs},
        )
        return [ends.get(number, (0, 0)) for number in cut["input_ids"]]

    def _pad(self, encoded_inputs: Any, *args: Any, **kwargs: Any) -> dict[str, object]:
        before = len(encoded_inputs["input_ids"])
        padded: dict[str, Any] = super()._pad(encoded_inputs, *args, **kwargs)
        if "offset_mapping" in padded:
            # transformers pads the fields that it knows in slow tokenizers, of which this is none.
            missing, offsets = [(0, 0)] * (len(padded["input_ids"]) - before), padded["offset_mapping"]
            on_the_left = (kwargs.get("padding_side") or self.padding_side) == "left"
            padded["offset_mapping"] = missing + offsets if on_the_left else offsets + missing
        return padded

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.ids.get(token, self.ids.get(self.unknown or ""))

    def _convert_id_to_token(self, index: int) -> str:
        return self.symbols[index]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The symbols of *ids*; ends of lines are kept, except at the beginning."""
        if isinstance(ids, int) or not skip_special_tokens:
            return super().convert_ids_to_tokens(ids, skip_special_tokens=skip_special_tokens)
        # A line end inside of a text is a special symbol, but not one to skip: it is a line feed.
        end, skipped, ids = self.ids[self.line_end], set(self.all_special_ids), [*map(int, ids)]
        visible = [index for place, index in enumerate(ids) if index not in skipped or (index == end and place)]
        return super().convert_ids_to_tokens(visible)

    def _decode(self, token_ids: object, skip_special_tokens: bool = False, **kwargs: object) -> str:
        # transformers 4 would leave out special symbols in a text, and with them the ends of lines.
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.convert_tokens_to_string(self.convert_ids_to_tokens(ids, skip_special_tokens))

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        return "\n".join(map(self.coder.decode, split(tokens, self.line_end)))

    def build_inputs_with_special_tokens(self, first: list[int], second: list[int] | None = None) -> list[int]:
        return [*first, *(second or [])]

    def create_token_type_ids_from_sequences(self, first: list[int], second: list[int] | None = None) -> list[int]:
        return [0] * len(self.build_inputs_with_special_tokens(first, second))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        saved, sources = [], (self.vocab_file, self.tokenization_file)
        for source, name in zip(sources, self.vocab_files_names.values(), strict=True):
            if source is not None and os.path.exists(source):
                target = os.path.join(save_directory, name)
                if os.path.abspath(source) != os.path.abspath(target):
                    shutil.copyfile(source, target)
                saved.append(target)
        return tuple(saved)


class FairseqEncoderTokenizer(FairseqTokenizer):
    """Text to ids and back, for encoders: ``<s> a </s>``, or ``<s> a </s> b </s>`` for pairs."""

    vocab_files_names = {"vocab_file": "vocab.txt", "tokenization_file": "tokenization.json"}
    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    padding_side = "right"

    def __init__(
        self,
        vocab_file: str,
        tokenization_file: str | None = None,
        token_types: int = 1,  # with two, the second text of a pair has the second one
        pair_separator: str | None = None,  # a symbol before the second text of a pair
        **kwargs: Any,  # among them the special symbols, such as ``bos_token``
    ) -> None:
        self.pair_separator = pair_separator
        self.roles = {role: str(kwargs[f"{role}_token"]) for role in (*ROLES, "mask") if kwargs.get(f"{role}_token")}
        self.second_type = min(1, token_types - 1)
        options: dict[str, Any] = {"token_types": token_types, "pair_separator": pair_separator}
        super().__init__(vocab_file, tokenization_file, **options, **kwargs)

    def read_vocabulary(self, lines: list[str]) -> tuple[list[str], dict[str, str]]:
        return lines, self.roles

    def special_names(self, roles: dict[str, str]) -> dict[str, object]:
        return {}

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        return PreTrainedTokenizer.convert_ids_to_tokens(self, ids, skip_special_tokens)

    def build_inputs_with_special_tokens(self, first: list[int], second: list[int] | None = None) -> list[int]:
        end = [self.ids[self.line_end]]
        separator = [self.ids[self.pair_separator]] if self.pair_separator else []
        more = [*separator, *second, *end] if second is not None else []
        return [self.ids[self.roles["bos"]], *first, *end, *more]

    def create_token_type_ids_from_sequences(self, first: list[int], second: list[int] | None = None) -> list[int]:
        row, of_first = self.build_inputs_with_special_tokens(first, second), len(first) + 2
        return [0] * of_first + [self.second_type] * (len(row) - of_first)


def split(symbols: Iterable[str], mark: str) -> list[list[str]]:
    """The parts of *symbols* between those that are *mark*."""
    parts: list[list[str]] = [[]]
    for symbol in symbols:
        if symbol == mark:
            parts.append([])
        else:
            parts[-1].append(symbol)
    return parts


def spelled(symbols: dict[int, str], unknown: int | None) -> tuple[dict[int, str], dict[str, str]]:
    """The symbol of each id as ``dict.txt`` has it, without white space; and the way back."""
    written = {index: symbol for index, symbol in symbols.items() if _is_word(symbol)}
    for index in sorted(symbols.keys() - written.keys()):
        letters = (letter if _is_word(letter) else f"<0x{ord(letter):02X}>" for letter in symbols[index])
        word = "".join(letters) or "<0x>"
        while word in written.values():
            word += "_"
        written[index] = word
    plain = {word: symbols[index] for index, word in written.items() if index != unknown}
    return written | ({unknown: UNKNOWN} if unknown is not None else {}), plain


def _is_word(symbol: str) -> bool:
    return symbol.split() == [symbol] and not re.search("[\ud800-\udfff]", symbol)


def aligned(text: str, symbols: Iterable[str], written: Iterable[str], start: int = 0) -> list[Span]:
    """The spans of *symbols*, whose characters *written* stand in *text* from *start* on in this
    order."""
    spans = []
    for symbol, letters in zip(symbols, written, strict=True):
        first = None
        for index in (text.find(letter, start) for letter in letters):
            if index >= 0:
                first, start = (index if first is None else first), index + 1
        spans.append(Span(symbol, start if first is None else first, start))
    return spans


def composed(line: str, words: Sequence[Span], subwords: Iterable[Span]) -> list[Span]:
    """The spans in *line* of *subwords*, which were made of its *words* with single spaces between
    them."""
    origin: list[tuple[int, int]] = []  # of each character of the words as they were put together
    for word in words:
        if origin:
            # The blank between two words stands for what lies between them in the line.
            origin.append((origin[-1][1], word.start))
        if len(word.symbol) == word.end - word.start:
            origin += [(index, index + 1) for index in range(word.start, word.end)]
        else:
            spans = aligned(line[: word.end], word.symbol, word.symbol, word.start)
            origin += [(start, end) for _, start, end in spans]
    starts = [start for start, _ in origin] + [origin[-1][1] if origin else 0]
    ends = [starts[0], *(end for _, end in origin)]
    return [Span(symbol, starts[start], max(starts[start], ends[end])) for symbol, start, end in subwords]
