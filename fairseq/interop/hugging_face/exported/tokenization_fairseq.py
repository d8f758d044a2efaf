"""Tokenizers of fairseq-short for transformers: ``dict.txt``, and ``tokenization.json`` where there is one.

A text is lines, separated by the end-of-line symbol, which also stands at the beginning of a text; a vocabulary with a
byte-level symbol for line feeds, such as GPT-2's, has them inside the text. Without
``tokenization.json``, symbols are what white space separates. ``moses`` needs sacremoses, ``subword_nmt`` subword-nmt,
``sentencepiece`` the package of that name.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizer

HEADER, OVERWRITE = "#specials", "#fairseq:overwrite"
ROLES = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
FILES = {"vocab_file": "dict.txt", "tokenization_file": "tokenization.json"}
MARK = "@@"
LINE_FEED = "Ċ"  # in byte-level vocabularies

Split = Callable[[str], "list[str]"]
Join = Callable[["Sequence[str]"], str]


class FairseqTokenizer(PreTrainedTokenizer):
    """Text to ids and back.

    Args:
        vocab_file: ``dict.txt``.
        tokenization_file: ``tokenization.json``.
    """

    vocab_files_names = FILES
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str, tokenization_file: str | None = None, **kwargs: Any) -> None:
        self.vocab_file, self.tokenization_file = vocab_file, tokenization_file
        self.symbols, self.ids, roles = read_dictionary(vocab_file)
        self.line_end = roles["eos"]
        self.unknown = roles.get("unk")
        self.split, self.join = steps({})
        if tokenization_file is not None and os.path.exists(tokenization_file):
            with open(tokenization_file, encoding="utf-8") as file:
                self.split, self.join = steps(json.load(file))
        names = {"bos_token": self.line_end, "eos_token": self.line_end, "unk_token": self.unknown}
        names["pad_token"] = roles.get("pad", self.line_end)
        super().__init__(**{"padding_side": "left", **names, **kwargs})

    @property
    def vocab_size(self) -> int:
        return len(self.symbols)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        lines = [self.split(line) for line in ([text] if LINE_FEED in self.ids else re.split(r"\r\n|\r|\n", text))]
        return [symbol for number, line in enumerate(lines) for symbol in [self.line_end] * (number > 0) + line]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.ids.get(token, self.ids.get(self.unknown or ""))

    def _convert_id_to_token(self, index: int) -> str:
        return self.symbols[index]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Return symbols; ends of lines are kept, except at the beginning."""
        if isinstance(ids, int) or not skip_special_tokens:
            return super().convert_ids_to_tokens(ids, skip_special_tokens=skip_special_tokens)
        end, skipped = self.ids[self.line_end], set(self.all_special_ids)
        kept = [int(index) for place, index in enumerate(ids) if int(index) not in skipped or (index == end and place)]
        return super().convert_ids_to_tokens(kept)

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        lines: list[list[str]] = [[]]
        for token in tokens:
            if token == self.line_end:
                lines.append([])
            else:
                lines[-1].append(token)
        return "\n".join(map(self.join, lines))

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [self.ids[self.line_end], *token_ids_0, *(token_ids_1 or [])]

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [0] * (1 + len(token_ids_0) + len(token_ids_1 or []))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        saved = []
        for source, name in ((self.vocab_file, "dict.txt"), (self.tokenization_file, "tokenization.json")):
            if source is not None and os.path.exists(source):
                target = os.path.join(save_directory, name)
                if os.path.abspath(source) != os.path.abspath(target):
                    shutil.copyfile(source, target)
                saved.append(target)
        return tuple(saved)


def read_dictionary(path: str) -> tuple[list[str], dict[str, int], dict[str, str]]:
    """Return the symbols of a ``dict.txt`` in the order of their ids, the id of each, and special symbols by role."""
    with open(path, encoding="utf-8", newline="") as file:
        lines = file.read().replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    roles = dict(field.partition("=")[::2] for field in lines[0].split()[1:]) if _is_header(lines[0]) else {}
    symbols = [] if roles else list(ROLES.values())
    ids = {symbol: index for index, symbol in enumerate(symbols)}
    for line in lines[bool(roles) :]:
        word = line.rstrip().removesuffix(f" {OVERWRITE}").rpartition(" ")[0]
        ids[word] = len(symbols)
        symbols.append(word)
    return symbols, ids, roles or dict(ROLES)


def steps(values: Mapping[str, Any]) -> tuple[Split, Join]:
    """Return the functions of a ``tokenization.json``: a line to symbols, and back."""
    words, subwords = values.get("tokenizer"), values.get("bpe")
    split, join = _moses(words["language"]) if words and words["name"] == "moses" else (_split, " ".join)
    if subwords is None:
        return split, join
    known = {"subword_nmt": _subword_nmt, "sentencepiece": _sentencepiece, "gpt2": _gpt2, "hf": _hf}
    content = subwords["text"].encode() if "text" in subwords else base64.b64decode(subwords["base64"])
    encode, decode = known[subwords["name"]](content)
    decode = _around_unknown(decode, "" if subwords["name"] == "gpt2" else " ")
    if words is None:
        return encode, decode
    return (lambda line: encode(" ".join(split(line)))), (lambda symbols: join(decode(symbols).split()))


def _around_unknown(decode: Join, glue: str) -> Join:
    """*decode* for symbols of which unknown ones stand for themselves."""

    def join(symbols: Sequence[str]) -> str:
        parts: list[list[str]] = [[]]
        for symbol in symbols:
            if symbol == ROLES["unk"]:
                parts.append([])
            else:
                parts[-1].append(symbol)
        text = f"{glue}{ROLES['unk']}{glue}".join(decode(part) if part else "" for part in parts)
        return text.strip(glue) if glue else text

    return join


def _split(line: str) -> list[str]:
    return line.split()


def _is_header(line: str) -> bool:
    fields = line.split()
    return line.startswith(f"{HEADER} ") and "=" in fields[-1]


def _moses(language: str) -> tuple[Split, Join]:
    package = importlib.import_module("sacremoses")
    tokenizer, detokenizer = package.MosesTokenizer(lang=language), package.MosesDetokenizer(lang=language)

    def split(line: str) -> list[str]:
        return list(tokenizer.tokenize(line, aggressive_dash_splits=True, escape=False))

    return split, lambda words: str(detokenizer.detokenize(words, unescape=False)) if words else ""


def _subword_nmt(content: bytes) -> tuple[Split, Join]:
    package = importlib.import_module("subword_nmt.apply_bpe")
    bpe = package.BPE(io.StringIO(content.decode()), separator=MARK)
    return (
        lambda line: list(bpe.segment_tokens(line.split())),
        lambda symbols: (" ".join(symbols) + " ").replace(f"{MARK} ", "").rstrip(),
    )


def _sentencepiece(content: bytes) -> tuple[Split, Join]:
    model = importlib.import_module("sentencepiece").SentencePieceProcessor(model_proto=content)
    written = _written({index: model.id_to_piece(index) for index in range(len(model))}, model.unk_id())
    plain = {name: model.id_to_piece(index) for index, name in written.items()}
    return (
        lambda line: [written[index] for index in model.encode(line, out_type=int)],
        lambda symbols: str(model.decode_pieces([plain.get(symbol, symbol) for symbol in symbols])),
    )


def _hf(content: bytes) -> tuple[Split, Join]:
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.get_vocab()
    symbols = {index: symbol for symbol, index in ids.items()}
    written = _written(symbols, ids.get(getattr(tokenizer.model, "unk_token", None)))
    plain = {name: symbols[index] for index, name in written.items()}

    def join(names: Sequence[str]) -> str:
        pieces = [plain.get(name, name) for name in names]
        return str(tokenizer.decoder.decode(pieces)) if tokenizer.decoder is not None else " ".join(pieces)

    return (lambda line: [written[index] for index in tokenizer.encode(line, add_special_tokens=False).ids]), join


def _gpt2(content: bytes) -> tuple[Split, Join]:
    library = importlib.import_module("tokenizers")
    lines = [line.rstrip("\r") for line in content.decode().split("\n")]
    merges = [tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")]
    letters = _byte_letters()
    symbols = list(dict.fromkeys([*letters, *(left + right for left, right in merges)]))
    ids = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = library.Tokenizer(library.models.BPE(ids, merges))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)

    def join(names: Sequence[str]) -> str:
        data = (bytes([letters[letter]]) if letter in letters else letter.encode() for letter in "".join(names))
        return b"".join(data).decode("utf-8", "replace")

    return (lambda line: [symbols[index] for index in tokenizer.encode(line, add_special_tokens=False).ids]), join


def _byte_letters() -> dict[str, int]:
    """The letter of each byte in byte-level encodings (Radford et al. 2019): printable ones stand for themselves."""
    plain = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _written(symbols: Mapping[int, str], unknown: int | None) -> dict[int, str]:
    """Symbols as ``dict.txt`` has them: ``<0x20>`` for a space in one, ``<unk>`` for the unknown one."""
    written = {index: symbol if symbol.split() == [symbol] else _escaped(symbol) for index, symbol in symbols.items()}
    return written | ({unknown: ROLES["unk"]} if unknown is not None else {})


def _escaped(symbol: str) -> str:
    return "".join(f"<0x{ord(letter):02X}>" if letter.isspace() else letter for letter in symbol) or "<0x>"
