"""Tokenizers of fairseq-short for transformers: the dictionary, and ``tokenization.json`` where
there is one.

A text is lines, separated by the end-of-line symbol; the tokenizer of a model from elsewhere, such
as GPT-2, reads a text with its line feeds. Without ``tokenization.json``,
symbols are what white space separates.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Sequence
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizer
from transformers.utils import PaddingStrategy

from fairseq.interop.hugging_face.exported.tokenizer_parts import PARTS
from fairseq.text.tokenizers.base import Space, Span
from fairseq.text.tokenizers.rules import LINE_END
from fairseq.text.tokenizers.tokenizer import Steps

HEADER, OVERWRITE = "#specials", "#fairseq:overwrite"
ROLES = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"}


class FairseqTokenizer(PreTrainedTokenizer):
    """Text to ids and back, for language models: no symbol is added, and ``bos_token`` is the
    end-of-line symbol."""

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
        with open(vocab_file, encoding="utf-8", newline="") as file:
            lines = file.read().replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
        self.symbols, roles = self.read_vocabulary(lines)
        self.ids = {symbol: index for index, symbol in enumerate(self.symbols)}
        self.line_end, self.unknown, self.padding = roles["eos"], roles.get("unk"), self._padding(roles)
        self.coder: Any = Steps(Space())
        if tokenization_file is not None and os.path.exists(tokenization_file):
            with open(tokenization_file, encoding="utf-8") as file:
                whole = steps(json.load(file))
            self.coder = whole.subwords if keeps_lines else whole
        super().__init__(**{**self.special_names(roles), "keeps_lines": keeps_lines, **kwargs})

    def read_vocabulary(self, lines: list[str]) -> tuple[list[str], dict[str, str]]:
        """Return the symbols in the order of their ids, and the special ones by role."""
        return read_dictionary(lines)

    def special_names(self, roles: dict[str, str]) -> dict[str, object]:
        """Return the arguments of transformers for the special symbols *roles*."""
        end = roles.get("stop", roles["eos"])
        names = {"bos_token": roles["eos"], "eos_token": end, "unk_token": roles.get("unk")}
        return {**names, "pad_token": roles.get("pad", roles["eos"])}

    @property
    def vocab_size(self) -> int:
        return len(self.symbols)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)

    def tokenize(
        self, text: str, pair: str | None = None, add_special_tokens: bool = False, **kwargs: object
    ) -> list[str]:
        return [span.symbol for span in self.spans(text)]

    def spans(self, text: str) -> list[Span]:
        """Return the symbols of *text*, without those that stand around it, with what each stands
        for."""
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
        # Padding stands around texts and not in them: no loss counts it, and no attention reads it.
        unknown = self.unknown or ""
        return [span._replace(symbol=unknown) if span.symbol == self.padding else span for span in result]

    def _padding(self, roles: dict[str, str]) -> str | None:
        """The padding symbol; None without one, or where it is another's, or its text a word with
        an id of its own."""
        symbol = roles.get("pad", "")
        is_own = symbol in self.ids and self.symbols.index(symbol) == self.ids[symbol] and symbol != roles["eos"]
        return symbol if is_own and "unk" in roles else None

    def _parts(self, text: str) -> list[str]:
        """Cut *text* at special symbols; padding is left in the text around it."""
        parts = [""]
        cut = False
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
            if kwargs.get("is_split_into_words") or not all(isinstance(one, str | tuple | list) for one in text):
                raise ValueError("return_offsets_mapping: give texts, or pairs of texts")
            # Which comes back here for every single text.
            return super()._encode_plus(text, text_pair, **kwargs)
        # Taken out and done at the end: offsets must be padded with the ids.
        padding, tensors = (
            kwargs.pop("padding_strategy", PaddingStrategy.DO_NOT_PAD),
            kwargs.pop("return_tensors", None),
        )
        kwargs["return_offsets_mapping"] = False
        encoding = super()._encode_plus(text, text_pair, **{**kwargs, "return_attention_mask": False})
        encoding["offset_mapping"] = self._offsets(text, text_pair, kwargs)
        names = ("max_length", "pad_to_multiple_of", "padding_side", "return_attention_mask")
        padded = self.pad(encoding, padding.value, **{name: kwargs[name] for name in names if name in kwargs})
        return BatchEncoding(padded.data, tensor_type=tensors, prepend_batch_axis=True)

    def _offsets(self, text: str, pair: str | None, kwargs: dict[str, Any]) -> list[tuple[int, int]]:
        """The offsets of what is left of *text* and *pair* after truncation; (0, 0) for symbols
        around them."""
        first, second = self.spans(text), self.spans(pair) if pair is not None else []
        # Truncation is asked to cut numbers of the spans, in place of ids: what it leaves are the
        # offsets that are left.
        ends = {len(self) + number: (span.start, span.end) for number, span in enumerate([*first, *second])}
        numbers = list(ends)  # in the field of ids, which truncation does not look at
        truncation = kwargs.get("truncation_strategy")
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
            missing = [(0, 0)] * (len(padded["input_ids"]) - before)
            offsets = padded["offset_mapping"]
            # transformers pads the fields that it knows; offsets are none of them in slow
            # tokenizers.
            on_the_left = (kwargs.get("padding_side") or self.padding_side) == "left"
            padded["offset_mapping"] = missing + offsets if on_the_left else offsets + missing
        return padded

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.ids.get(token, self.ids.get(self.unknown or ""))

    def _convert_id_to_token(self, index: int) -> str:
        return self.symbols[index]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Return symbols; ends of lines are kept, except at the beginning."""
        if isinstance(ids, int) or not skip_special_tokens:
            return super().convert_ids_to_tokens(ids, skip_special_tokens=skip_special_tokens)
        end, skipped = self.ids[self.line_end], set(self.all_special_ids)
        # A line end inside of a text is a special symbol, but not one to skip: it is a line feed.
        visible = [
            int(index) for position, index in enumerate(ids) if int(index) not in skipped or (index == end and position)
        ]
        return super().convert_ids_to_tokens(visible)

    def _decode(self, token_ids: object, skip_special_tokens: bool = False, **kwargs: object) -> str:
        # Up to transformers 4, special symbols inside of a text would be left out, and with them
        # the ends of lines.
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.convert_tokens_to_string(self.convert_ids_to_tokens(ids, skip_special_tokens))

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        lines: list[list[str]] = [[]]
        for token in tokens:
            if token == self.line_end:
                lines.append([])
            else:
                lines[-1].append(token)
        return "\n".join(map(self.coder.decode, lines))

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [*token_ids_0, *(token_ids_1 or [])]

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [0] * len(self.build_inputs_with_special_tokens(token_ids_0, token_ids_1))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        saved = []
        for source, name in zip(
            (self.vocab_file, self.tokenization_file), self.vocab_files_names.values(), strict=True
        ):
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
        """Return symbols."""
        return PreTrainedTokenizer.convert_ids_to_tokens(self, ids, skip_special_tokens)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        end = [self.ids[self.line_end]]
        separator = [self.ids[self.pair_separator]] if self.pair_separator else []
        second = [*separator, *token_ids_1, *end] if token_ids_1 is not None else []
        return [self.ids[self.roles["bos"]], *token_ids_0, *end, *second]

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        rows = self.build_inputs_with_special_tokens(token_ids_0, token_ids_1)
        first = len(token_ids_0) + 2
        return [0] * first + [self.second_type] * (len(rows) - first)


def read_dictionary(lines: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the symbols of the *lines* of a ``dict.txt`` in the order of their ids, and special
    ones by role."""
    fields = lines[0].split()
    header = fields[0] == HEADER and "=" in fields[-1]
    words = [
        line.rstrip().removesuffix(f" {OVERWRITE}").rpartition(" ")[0] for line in lines[1 if header else 0 :]
    ]  # each before its count
    if header:
        return words, dict(field.partition("=")[::2] for field in fields[1:])
    return [*ROLES.values(), *words], dict(ROLES)


def steps(values: dict[str, Any]) -> Steps:
    """Return the tokenizer of the values of a ``tokenization.json``."""
    words, subwords = values.get("tokenizer"), values.get("bpe")
    if subwords is not None:
        content = subwords["text"].encode() if "text" in subwords else base64.b64decode(subwords["base64"])
        subwords = PARTS[subwords["name"]](content)
    if words is not None:
        settings = {key: value for key, value in words.items() if key != "name"}
        words = PARTS[words["name"]](**settings)
    return Steps(words, subwords)
