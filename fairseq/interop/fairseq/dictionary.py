"""Methods of fairseq's dictionary, and its arguments for methods of this package's."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq.interop.fairseq.utils import tokenize_line
from fairseq.text.dictionary import Dictionary


def encode_line(
    self: Dictionary,
    line: str,
    line_tokenizer: Callable[[str], list[str]] = tokenize_line,
    add_if_not_exist: bool = True,
    consumer: Callable[[str, int], Any] | None = None,
    append_eos: bool = True,
    reverse_order: bool = False,
) -> Tensor:
    """The ids of the words of *line*: int32 [T]. *consumer* is called with each word and its id."""
    words = line_tokenizer(line)[:: -1 if reverse_order else 1]
    ids = [self.add_symbol(word) if add_if_not_exist else self.index(word) for word in words]
    for word, index in zip(words, ids, strict=True):
        if consumer is not None:
            consumer(word, index)
    return torch.tensor([*ids, self.eos()] if append_eos else ids, dtype=torch.int32)


def string(
    self: Dictionary,
    tensor: Any,
    bpe_symbol: str | None = None,
    escape_unk: bool = False,
    extra_symbols_to_ignore: Collection[int] = (),
    unk_string: str | None = None,
    include_eos: bool = False,
    separator: str = " ",
) -> str:
    """The words of *tensor* [T], or of each row of [B, T] in a line."""
    if torch.is_tensor(tensor) and tensor.dim() == 2:
        rest = (bpe_symbol, escape_unk, extra_symbols_to_ignore, unk_string, include_eos, separator)
        return "\n".join(string(self, row, *rest) for row in tensor)
    silent = {self.bos(), self.pad(), *extra_symbols_to_ignore} | (set() if include_eos else {self.eos()})
    unknown = self.unk_string(escape_unk) if unk_string is None else unk_string  # type: ignore[attr-defined]
    words = [unknown if index == self.unk() else self[index] for index in map(int, tensor) if index not in silent]
    text = separator.join(words)
    # The blank at the end lets the mark of the last word match like the others, as when a text ends within a word.
    return text if bpe_symbol is None else (text + " ").replace(bpe_symbol.rstrip() + " ", "").rstrip()


def unk_string(self: Dictionary, escape: bool = False) -> str:
    """The unknown symbol, in brackets with *escape*."""
    return f"<{self.unk_word}>" if escape else self.unk_word


def add_from_file(self: Dictionary, f: Any) -> None:
    """Add the words of a ``dict.txt``, a path or an open file.

    Raises:
        UserError: it cannot be read, or is malformed.
    """
    if isinstance(f, str | Path):
        self.update(Dictionary.load(f))
    else:
        self.update(Dictionary.parse(f.read().encode(), getattr(f, "name", "")))


def dummy_sentence(self: Dictionary, length: int) -> Tensor:
    """*length* random words, the last of them ``</s>``: int64 [T]."""
    # From the second word on, fairseq's own bound.
    tokens = torch.randint(self.nspecial + 1, len(self), (length,))
    tokens[-1] = self.eos()
    return tokens
