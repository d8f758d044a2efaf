"""``fairseq.data.encoders``: subwords that plug-ins and scripts split text into, and the words that
they begin."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq.config.command_settings import TextConfig
from fairseq.config.registry import BPES, register_bpe, register_tokenizer  # noqa: F401 - names that plug-ins import
from fairseq.data.folders import data_folders
from fairseq.data.masking import word_parts, word_rule
from fairseq.errors import UserError
from fairseq.system.json_files import read_json
from fairseq.system.opening import read_text
from fairseq.text.tokenizers.base import Span, Subwords
from fairseq.text.tokenizers.hf import GPT2
from fairseq.text.tokenizers.sentencepiece import WORD_BEGINS
from fairseq.text.tokenizers.subword_nmt import SubwordNMT
from fairseq.text.tokenizers.tokenizer import Steps, chosen_subwords, chosen_words

FILES = {"gpt2_encoder_json": "encoder.json", "gpt2_vocab_bpe": "vocab.bpe"}
FLAGS = "tokenizer moses-source-lang bpe bpe-codes sentencepiece-model gpt2-encoder-json gpt2-vocab-bpe"
SETTINGS = (  # of words and subwords, in scripts
    *(name.replace("-", "_") for name in FLAGS.split()),
    *("moses_target_lang", "moses_no_escape", "moses_no_dash_splits"),
)
FILE_OF = {"sentencepiece": "sentencepiece_model"}  # instead of bpe_codes
WITHOUT = ("bert", "byte_bpe", "bytes", "hf_byte_bpe")  # subwords of fairseq that are not here


@dataclass(frozen=True)
class Numbered(GPT2):
    """GPT-2's subwords as their numbers in an ``encoder.json``, the words of the dictionaries of
    fairseq's RoBERTa."""

    numbers: Mapping[str, int] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, gpt2_encoder_json: Path, gpt2_vocab_bpe: Path) -> Numbered:
        """Read both files.

        Raises:
            UserError: one is invalid, or they do not belong together.
        """
        advice = "give GPT-2's encoder.json and vocab.bpe"
        numbers = read_json(gpt2_encoder_json, advice)
        subwords = cls(read_text(gpt2_vocab_bpe, advice), str(gpt2_vocab_bpe), numbers)
        subwords.check()
        # Checked when both files are read: a missing number would show only at the first text that
        # has the subword.
        if not isinstance(numbers, dict) or not numbers.keys() >= set(subwords._symbols):
            raise UserError(f"{gpt2_encoder_json}: lacks numbers of subwords in {gpt2_vocab_bpe}; {advice}")
        return subwords

    def encode(self, lines: Sequence[str]) -> list[str]:
        return [" ".join(str(self.numbers[symbol]) for symbol in line.split()) for line in super().encode(lines)]

    def spans(self, line: str) -> list[Span]:
        return [span._replace(symbol=str(self.numbers[span.symbol])) for span in super().spans(line)]

    def decode(self, symbols: Sequence[str]) -> str:
        # Special symbols such as `<mask>` have no number; they stay as they are.
        return super().decode([self._subwords.get(symbol, symbol) for symbol in symbols])

    @functools.cached_property
    def _subwords(self) -> dict[str, str]:
        return {str(number): symbol for symbol, number in self.numbers.items()}


class Encoder:
    """GPT-2's subwords as numbers: the ``encoder.json`` at one path, and the ``vocab.bpe`` at the
    other."""

    def __init__(self, encoder_json_path: str, vocab_bpe_path: str) -> None:
        self.bpe = Numbered.load(Path(encoder_json_path), Path(vocab_bpe_path))

    def encode(self, text: str) -> list[int]:
        return list(map(int, self.bpe.encode([text])[0].split()))

    def decode(self, tokens: Sequence[int]) -> str:
        return self.bpe.decode(list(map(str, tokens)))


get_encoder = Encoder


class LineEncoder:
    """Words or subwords of a line of text, separated by blanks, and back."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def encode(self, x: str) -> str:
        return self.steps.encode(x)

    def decode(self, x: str) -> str:
        return self.steps.decode(x.split())


class NumberedLines(LineEncoder):
    """GPT-2's subwords as numbers; their *files* are read at first use."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    @functools.cached_property
    def steps(self) -> Steps:  # type: ignore[override]
        return Steps(subwords=Numbered.load(**self._files))


class GPT2BPE(LineEncoder):
    """The subwords of :func:`build_bpe` with ``bpe`` gpt2, and the other settings of *args*."""

    kind = "gpt2"

    def __init__(self, args: object) -> None:
        steps = build_bpe(argparse.Namespace(**{**vars(args), "bpe": self.kind}))
        assert isinstance(steps, LineEncoder)
        super().__init__(steps.steps)


class SentencepieceBPE(GPT2BPE):
    """The same with ``bpe`` sentencepiece."""

    kind = "sentencepiece"


class MosesTokenizer:
    """Words of the Moses tokenizer, whose special characters are ``&apos;`` and the like, unless
    ``moses_no_escape`` is set."""

    def __init__(self, args: object) -> None:
        from sacremoses import MosesDetokenizer, MosesTokenizer

        settings = vars(args)
        language = settings.get("moses_source_lang") or "en"
        chosen_words(TextConfig(tokenizer="moses", moses_source_lang=language))  # a language that there is
        self._tokenizer = MosesTokenizer(lang=language)
        self._detokenizer = MosesDetokenizer(lang=settings.get("moses_target_lang") or language)
        self._options = {
            "aggressive_dash_splits": not settings.get("moses_no_dash_splits"),
            "escape": not settings.get("moses_no_escape"),
        }

    def encode(self, x: str) -> str:
        return str(self._tokenizer.tokenize(x, return_str=True, **self._options))

    def decode(self, x: str) -> str:
        return str(self._detokenizer.detokenize(x.split()))


class Characters:
    """Characters as symbols; ``▁`` stands for a space."""

    def encode(self, x: str) -> str:
        return " ".join(x.replace(" ", WORD_BEGINS))

    def decode(self, x: str) -> str:
        return x.replace(" ", "").replace(WORD_BEGINS, " ")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the settings of :func:`build_bpe` and :func:`build_tokenizer` that *parser* lacks; every
    task takes them."""
    # A command's parser knows more: flags of parts that are not chosen.
    known = {flag for _, action in getattr(parser, "arguments", ()) for flag in action.option_strings}
    for flag in (f"--{name}" for name in FLAGS.split()):
        if flag not in known:
            parser.add_argument(flag, help=argparse.SUPPRESS)


def build_bpe(args: object) -> LineEncoder | Characters | None:
    """The subwords that ``args.bpe`` names, of fairseq's group of that name ``_name``, or the text
    *args* itself; None without it.

    Their files are ``bpe_codes`` (of SentencePiece ``sentencepiece_model``, too); of ``gpt2``
    ``gpt2_encoder_json`` and ``gpt2_vocab_bpe``, by default *encoder.json* and *vocab.bpe* in the
    data folder.

    Raises:
        UserError: there are no subwords of that name, or a file is missing or invalid.
    """
    kind, settings = _chosen(args, "bpe")
    if kind is None:
        return None
    if kind == "characters":
        return Characters()
    if kind == "gpt2":
        folder = data_folders(settings.get("data", "."))[0]
        files = {name: Path(settings.get(name, folder / file)) for name, file in FILES.items()}
        encoder = NumberedLines(files)
        if not isinstance(args, str):
            encoder.steps  # noqa: B018 - an invalid file is an error here, not at the first text
        return encoder
    return LineEncoder(Steps(subwords=subwords_of(kind, settings)))


def subwords_of(kind: str, settings: Mapping[str, Any]) -> Subwords:
    """The subwords *kind* of the file that *settings* name; see :func:`build_bpe`.

    Raises:
        UserError: there are none of that name, or the file is missing or invalid.
    """
    if kind in WITHOUT:
        raise UserError(f"`bpe` {kind}: is not implemented; split the text before, and leave it out")
    if kind not in (known := sorted({*BPES, "fastbpe"})):
        raise UserError(f"`bpe` {kind}: unknown; choose from {', '.join(known)}")
    codes = settings.get(FILE_OF.get(kind, "bpe_codes"), settings.get("bpe_codes"))
    if codes is None:
        raise UserError(f"`bpe` {kind}: needs its file; give it with `bpe_codes`")
    if kind == "fastbpe":
        content = read_text(codes, "give the codes of fastBPE", "`bpe_codes`")
        source = f"`bpe_codes` {codes}"
        merges = SubwordNMT(_of_subword_nmt(content, source), source)
        merges.check()
        return merges
    subwords = chosen_subwords(TextConfig(bpe=kind, bpe_codes=str(codes)))
    assert subwords is not None, "it has its file"
    return subwords


def _of_subword_nmt(codes: bytes, source: str) -> bytes:
    """Codes of fastBPE as subword-nmt's, which lack counts and begin with the version that marks
    the ends of words in the same way; codes that begin so are left as they are."""
    if codes.startswith(b"#version:"):
        return codes
    columns = [line.split() for line in codes.decode("utf-8", "surrogateescape").split("\n") if line.strip()]
    if any(len(line) != 3 for line in columns):
        raise UserError(f"{source}: a line is not two symbols and a count; give codes of fastBPE")
    pairs = [" ".join(line[:2]) for line in columns]
    return "\n".join(["#version: 0.2", *pairs, ""]).encode("utf-8", "surrogateescape")


def build_tokenizer(args: object) -> LineEncoder | MosesTokenizer | None:
    """The word tokenizer that ``args.tokenizer`` names, ``moses`` or ``space``; None without it.

    Raises:
        UserError: there is none of that name, or none of the language ``args.moses_source_lang``.
    """
    kind, settings = _chosen(args, "tokenizer")
    if kind is None:
        return None
    if kind == "moses":
        return MosesTokenizer(argparse.Namespace(**settings))
    return LineEncoder(Steps(words=chosen_words(TextConfig(tokenizer=kind))))


def _chosen(args: object, name: str) -> tuple[str | None, dict[str, Any]]:
    """The name of an encoder in *args*, a namespace, a group of settings, the name itself or None,
    and the settings that are set."""
    settings = {"_name": args} if isinstance(args, str | None) else vars(args)
    kind = settings.get(name, settings.get("_name"))
    return kind or None, {key: value for key, value in settings.items() if value is not None}


def get_whole_word_mask(args: object, dictionary: Any) -> Tensor:
    """Which symbols of *dictionary* begin a word, uint8 [V]; as ``--mask-whole-words`` finds them,
    whatever *args*."""
    continues, joins = word_parts(dictionary, word_rule(dictionary))
    if joins.any():
        raise UserError("get_whole_word_mask: marks at the end of symbols; use `mask_whole_words` of `task` masked_lm")
    return torch.from_numpy(~continues).to(torch.uint8)
