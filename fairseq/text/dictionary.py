"""Words and their ids, in fairseq's ``dict.txt`` format."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fairseq.errors import UserError
from fairseq.system import checksums
from fairseq.system.files import atomic_file
from fairseq.system.opening import decoded, read_named

ROLES = ("bos", "pad", "eos", "unk")
MASK = "mask"  # the role of the symbol that stands for a token to be predicted; few dictionaries have one
MASK_SYMBOL = "<mask>"
STOP = "stop"  # the role of the symbol that ends texts of a model whose texts begin with another one, as Llama's
# fairseq rejects a file with this line, whose count
# is no number, instead of loading it with shifted ids.
HEADER = "#specials"  # first line of a file that lists all its symbols: "#specials eos=WORD unk=WORD"
OVERWRITE = "#fairseq:overwrite"  # ends the line of a word that gets an id of its own beside an equal symbol
DIGITS = 18  # of a count, at most: it fits into 64 bits
NONE = -1  # the id of a special symbol that a dictionary does not have
FILLER = "madeupword"  # begins the symbols that round up the size of a dictionary


class Dictionary:
    """A two-way mapping between symbols and consecutive ids.

    The four special symbols come first (``<s>`` 0, ``<pad>`` 1, ``</s>`` 2, ``<unk>`` 3) and are
    not written to the file. A special symbol that occurs as a word of the text is that special
    symbol, but for ``<pad>``: no loss counts padding, and no attention reads it, so that the word
    is unknown, see :meth:`text_index`.

    The vocabulary of a model from elsewhere has its own ids: :meth:`of_listed` makes a dictionary
    of just its symbols, some of which are special; the special symbols that it lacks have the id
    -1. Its file begins with a line that names the special ones, ``#specials eos=<eos> unk=<unk>``,
    and lists all symbols in the order of their ids.

    Attributes:
        symbols: the symbol of each id.
        count: how often each occurred.
        indices: the id of each symbol.
        nspecial: number of special symbols at the start; 0 where all symbols are listed.
        path: the file that it was read from; None if it was not.
    """

    def __init__(
        self,
        *,
        bos: str = "<s>",
        pad: str = "<pad>",
        eos: str = "</s>",
        unk: str = "<unk>",
        extra_special_symbols: Iterable[str] = (),
    ) -> None:
        self.bos_word, self.pad_word, self.eos_word, self.unk_word = bos, pad, eos, unk
        self.symbols: list[str] = []
        self.count: list[int] = []
        self.indices: dict[str, int] = {}
        self.bos_index, self.pad_index, self.eos_index, self.unk_index = (
            self.add_symbol(word, 0) for word in (bos, pad, eos, unk)
        )
        for word in extra_special_symbols:
            self.add_symbol(word, 0)
        self.nspecial = len(self.symbols)
        self.mask_index = self.stop_index = NONE
        self.path: str | None = None

    @classmethod
    def of_listed(cls, symbols: Sequence[str], roles: Mapping[str, str]) -> Dictionary:
        """The dictionary of exactly *symbols*, with their indices as ids.

        Args:
            symbols: all different.
            roles: which of them is ``bos``, ``pad``, ``eos``, ``unk``; ``eos`` is needed.
        """
        # The empty word never occurs in text, so that a role without a symbol is never met.
        dictionary = cls(**{role: roles.get(role, "") for role in ROLES})
        dictionary.symbols, dictionary.count, dictionary.nspecial = list(symbols), [0] * len(symbols), 0
        dictionary.indices = {word: index for index, word in enumerate(symbols)}
        dictionary._assign_roles(roles)
        return dictionary

    @classmethod
    def of_special_first(cls, symbols: Sequence[str]) -> Dictionary:
        """The dictionary of exactly *symbols*, of which the first are special as in
        ``fairseq-preprocess``; UserError if they are not."""
        dictionary = cls()
        if list(symbols[: dictionary.nspecial]) != dictionary.symbols:
            raise UserError(f"symbols {' '.join(symbols[:4])[:80]}: expected {' '.join(dictionary.symbols)} first")
        for word in symbols[dictionary.nspecial :]:
            dictionary.add_symbol(word, 0)
        dictionary.mask_index = dictionary.indices.get(MASK_SYMBOL, NONE)
        return dictionary

    def _assign_roles(self, roles: Mapping[str, str]) -> None:
        """Find the ids of the special symbols among those that are listed."""
        self.bos_index, self.pad_index, self.eos_index, self.unk_index = (
            self.indices.get(roles.get(role, ""), NONE) for role in ROLES
        )
        self.mask_index, self.stop_index = (self.indices.get(roles.get(role, ""), NONE) for role in (MASK, STOP))

    def add_mask(self, word: str = MASK_SYMBOL) -> None:
        """Let *word* be the mask symbol; it is added at the end
        unless the dictionary has a mask symbol already."""
        if self.mask_index == NONE:
            self.mask_index = self.add_symbol(word, 0)

    def mask(self) -> int:
        """The id of the mask symbol, or -1."""
        return self.mask_index

    def stop(self) -> int:
        """The id of the symbol at which a generated text ends, or -1."""
        return self.stop_index

    def bos(self) -> int:
        """The id of the begin-of-sentence symbol."""
        return self.bos_index

    def begin(self) -> int:
        """The id of the begin-of-sentence symbol,
        for ``--add-bos-token``; UserError if there is none."""
        if self.bos_index == NONE:
            raise UserError(f"`add_bos_token`: {self.path or 'the dictionary'} has no bos symbol; leave it out")
        return self.bos_index

    def pad(self) -> int:
        """The id of the padding symbol."""
        return self.pad_index

    def eos(self) -> int:
        """The id of the end-of-line symbol."""
        return self.eos_index

    def unk(self) -> int:
        """The id of the unknown symbol."""
        return self.unk_index

    def __len__(self) -> int:
        return len(self.symbols)

    def __getitem__(self, index: int) -> str:
        return self.symbols[index]

    def __contains__(self, word: object) -> bool:
        return word in self.indices

    def __eq__(self, other: object) -> bool:
        """Return whether both give the same id to every symbol; counts do not matter."""
        return isinstance(other, Dictionary) and self.symbols == other.symbols

    def digest(self) -> str:
        """Return the SHA-256 of the symbols in the order of their ids, in hexadecimal digits.

        A mask symbol at the end is left out: tasks of masked
        tokens add it to the dictionary of a data folder.
        """
        last = len(self) - 1
        return checksums.fingerprint(self.symbols[:last] if self.mask_index == last else self.symbols)

    def has_digest(self, digest: str) -> bool:
        """Return whether *digest* is this dictionary's, whoever added a mask symbol to its end."""
        symbols = self.symbols[:-1] if self.symbols[-1:] == [MASK_SYMBOL] else self.symbols
        return digest in (self.digest(), *map(checksums.fingerprint, (symbols, [*symbols, MASK_SYMBOL])))

    def words(self) -> list[str]:
        """Return the symbols that occur in text: no special ones at the start, and none that round
        up the size."""
        return [word for word in self.symbols[self.nspecial :] if not word.startswith(FILLER)]

    def __repr__(self) -> str:
        return f"Dictionary({len(self)} symbols)"

    def index(self, word: str) -> int:
        """The id of *word*, or the unknown symbol's; UserError if the dictionary has neither."""
        index = self.indices.get(word, NONE)
        return self._unknown(word) if index == NONE else index

    def text_index(self, word: str) -> int:
        """The id of *word* of a text, in which the padding
        symbol is a word that is not known; see :meth:`index`."""
        index = self.indices.get(word, self.unk_index)
        # Some models from elsewhere pad with the symbol at the end of a line.
        is_padding = index == self.pad_index != self.eos_index
        return self._unknown(word) if index == NONE or is_padding else index

    def _unknown(self, word: str) -> int:
        if self.unk_index == NONE:
            raise UserError(f"{word[:80]!r}: {self.lack()}")
        return self.unk_index

    def lack(self) -> str:
        """Return the error message for an unknown word
        of a dictionary without an unknown symbol."""
        which = f"the dictionary {self.path}" if self.path else "the dictionary"
        if all(symbol == placeholder(index) for index, symbol in enumerate(self.symbols)):
            return (
                f"{which} has placeholders ({placeholder(0)}, {placeholder(1)}, …) for words, because the model came "
                "without any; score ids with LanguageModel.score_tokens, or put the model's own words into its file, "
                "in the order of their ids"
            )
        return (
            f"{which} has no such word, and no symbol for unknown ones; use its words only, or name the one "
            "that stands for unknown ones in its first line, as unk=WORD"
        )

    def add_symbol(self, word: str, n: int = 1) -> int:
        """Count *n* more occurrences of *word*,
        adding it at the end if it is new; returns its id."""
        index = self.indices.get(word)
        if index is None:
            index = self.indices[word] = len(self.symbols)
            self.symbols.append(word)
            self.count.append(0)
        self.count[index] += n
        return index

    def update(self, counter: Mapping[str, int] | Dictionary) -> None:
        """Count the words of *counter*; new ones are added
        in code-point order, a dictionary's in its order."""
        if isinstance(counter, Dictionary):
            counts = list(zip(counter.symbols, counter.count, strict=True))
        else:
            # The order of a counter depends on the order of reading; sorted, ids are equal for any
            # number of processes.
            counts = [(word, counter[word]) for word in sorted(counter)]
        for word, n in counts:
            self.add_symbol(word, n)

    def finalize(self, threshold: int = -1, nwords: int = -1, padding_factor: int = 8) -> None:
        """Order the words by falling count, ties by code points, and leave out the rare ones.

        Args:
            threshold: words that occur less often than this are left out.
            nwords: most symbols to keep, the special ones counted; 0 or less: no limit.
            padding_factor: the size is rounded up to a multiple of this; 0 and 1: it is not.
        """
        counted = zip(self.symbols[self.nspecial :], self.count[self.nspecial :], strict=True)
        words = sorted((item for item in counted if item[1] >= threshold), key=operator.itemgetter(0))
        # Stable: two sorts by one key each are faster than one by pairs.
        words.sort(key=operator.itemgetter(1), reverse=True)
        if nwords > 0:
            words = words[: max(0, nwords - self.nspecial)]
        self.symbols = self.symbols[: self.nspecial] + [word for word, _ in words]
        self.count = self.count[: self.nspecial] + [n for _, n in words]
        self.indices = {word: index for index, word in enumerate(self.symbols)}
        self.pad_to_multiple_(padding_factor)

    def pad_to_multiple_(self, padding_factor: int) -> None:
        """Add ``madeupword0000``, … (count 0) until the size is a multiple of *padding_factor*."""
        number = 0
        while padding_factor > 1 and len(self) % padding_factor != 0:
            self.add_symbol(f"{FILLER}{number:04d}", 0)
            number += 1

    @classmethod
    def load(cls, path: str | Path) -> Dictionary:
        """Read a ``dict.txt``; UserError if it is missing, or see :meth:`parse`."""
        return cls.parse(read_dictionary(path), path)

    @classmethod
    def parse(cls, content: bytes, path: str | Path) -> Dictionary:
        """Return the dictionary of a ``dict.txt``: a line for each symbol that is not special, or
        each after a header.

        A line is ``word count``. One that ends in ``#fairseq:overwrite``
        gives a word that is already there, such as ``<pad>``,
        a new id as a word of the text; the special symbol keeps its own.

        Raises:
            UserError: the content is empty, not UTF-8 or differs from ``checksums.txt``, a line has
                no count, a word is there twice, or the header names a word that is not there.
        """
        checksums.check(path, content)
        text = decoded(content, path, "make the dictionary again")
        # Not splitlines: words may hold other separators, such as U+2028.
        lines = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
        if lines == [""]:
            raise UserError(f"{path}: the dictionary is empty; make it again with fairseq-preprocess")
        roles = _read_header(lines[0], f"{path}: line 1")
        dictionary = cls() if roles is None else cls.of_listed([], roles)
        dictionary.path = str(path)
        for number, line in enumerate(lines[roles is not None :], 1 + (roles is not None)):
            dictionary._add_line(line, f"{path}: line {number}")
        if roles is not None:
            dictionary._assign_roles(roles)
            absent = [f"{role}={word}" for role, word in roles.items() if word not in dictionary]
            if absent:
                raise UserError(f"{path}: line 1: {absent[0][:80]}: the dictionary has no such word; make it again")
        return dictionary

    def _add_line(self, line: str, where: str) -> None:
        line = line.rstrip()
        overwrite = line.endswith(f" {OVERWRITE}")
        word, _, count = line.removesuffix(f" {OVERWRITE}").rpartition(" ")
        if not word or not (count.isascii() and count.isdigit() and len(count) <= DIGITS):
            raise UserError(f"{where}: expected `word count`, found {line[:80]!r}; make the dictionary again")
        if word in self.indices and not overwrite:
            raise UserError(
                f"{where}: {word[:80]!r} is in the dictionary already; remove one of the two lines, or end this one "
                f"with {OVERWRITE} to give the word of the text an id of its own"
            )
        if overwrite:
            # The special symbol keeps its id, but its text now means the word.
            self.indices.pop(word, None)
        self.add_symbol(word, int(count))

    def save(self, path: str | Path) -> None:
        """Write the symbols that are not special (or all, after a header) as ``word count``, whole
        or not at all."""
        words = zip(self.symbols[self.nspecial :], self.count[self.nspecial :], strict=True)
        before = set(self.symbols[: self.nspecial])
        lines = []
        if not self.nspecial:
            indices = {role: getattr(self, f"{role}_index") for role in (*ROLES, MASK, STOP)}
            roles = [f"{role}={self.symbols[index]}" for role, index in indices.items() if index != NONE]
            lines.append(f"{HEADER} {' '.join(roles)}\n")
        for index, (word, n) in enumerate(words, self.nspecial):
            mark = f" {OVERWRITE}" if word in before and self.indices[word] == index else ""
            lines.append(f"{word} {n}{mark}\n")
            before.add(word)
        with atomic_file(path) as file:
            file.write("".join(lines).encode())

    def encode(self, text: str, append_eos: bool = True) -> np.ndarray:
        """The ids of the words of *text*, split at any white space:
        int32 [words], or [words + 1] with ``</s>``."""
        ids = [self.text_index(word) for word in text.split()]
        if append_eos:
            ids.append(self.eos_index)
        return np.array(ids, dtype=np.int32)

    def string(
        self,
        tensor: Any,
        bpe_symbol: str | None = None,
        escape_unk: bool = False,
        extra_symbols_to_ignore: Iterable[int] | None = None,
        unk_string: str | None = None,
        include_eos: bool = False,
        separator: str = " ",
    ) -> str:
        """The words of ids, without ``<s>``, ``<pad>`` and ``</s>``.

        Args:
            tensor: ids [T], a list, array or tensor; each row of a tensor [B, T] becomes a line.
            bpe_symbol: how subwords are joined, see :func:`post_process`; or a mark at the end of a
                subword that joins it to the next one, such as ``"@@ "``.
            escape_unk: the unknown symbol in brackets, which no text can be confused with.
            extra_symbols_to_ignore: further ids that are left out.
            unk_string: what stands for the unknown symbol.
            include_eos: keep ``</s>``.
            separator: between words.

        Raises:
            NotImplementedError: *bpe_symbol* is neither, nor does a symbol end with it.
        """
        options = (bpe_symbol, escape_unk, extra_symbols_to_ignore, unk_string, include_eos, separator)
        if getattr(tensor, "ndim", 1) == 2:
            return "\n".join(self.string(row, *options) for row in tensor)
        silent = {self.bos_index, self.pad_index, *(extra_symbols_to_ignore or ())}
        if not include_eos:
            silent.add(self.eos_index)
        unknown = self.unk_string(escape_unk) if unk_string is None else unk_string
        ids = (index for index in map(int, tensor) if index not in silent)
        text = separator.join(unknown if index == self.unk_index else self.symbols[index] for index in ids)
        mark = (bpe_symbol or "").strip()
        if mark == "@@" or (mark and mark not in POST_PROCESS and any(word.endswith(mark) for word in self.symbols)):
            # The added blank lets the mark of the last subword match like the others.
            return (text + " ").replace(f"{mark} ", "").rstrip()
        return post_process(text, bpe_symbol)

    def unk_string(self, escape: bool = False) -> str:
        """The unknown symbol, in brackets with *escape*."""
        return f"<{self.unk_word}>" if escape else self.unk_word

    def get_count(self, idx: int) -> int:
        """How often the symbol *idx* was counted."""
        return self.count[idx]

    def encode_line(
        self,
        line: str,
        line_tokenizer: Callable[[str], list[str]] = str.split,
        add_if_not_exist: bool = True,
        consumer: Callable[[str, int], object] | None = None,
        append_eos: bool = True,
        reverse_order: bool = False,
    ) -> Any:
        """The ids of the words of *line*, a tensor, int32 [T]. *consumer* is called with each word
        and its id."""
        import torch  # command lines are parsed with this module

        words = line_tokenizer(line)[:: -1 if reverse_order else 1]
        ids = [self.add_symbol(word) if add_if_not_exist else self.index(word) for word in words]
        for word, index in zip(words, ids, strict=True):
            if consumer is not None:
                consumer(word, index)
        return torch.tensor([*ids, self.eos()] if append_eos else ids, dtype=torch.int32)

    def add_from_file(self, f: Any) -> None:
        """Add the words of a ``dict.txt``, a path or an open file; one that ends in
        ``#fairseq:overwrite`` gets a new id.

        Raises:
            UserError: it cannot be read, or is malformed; a word that is there already is a
                RuntimeError, too.
        """
        is_path = isinstance(f, str | Path)
        text = decoded(read_dictionary(f), f, "make the dictionary again") if is_path else f.read()
        for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
            word = line.rpartition(" ")[0]
            if word in self.indices and not line.rstrip().endswith(OVERWRITE):
                raise DuplicateWord(
                    f"line {number}: Duplicate word {word[:80]!r}; end the line with {OVERWRITE}, or remove it"
                )
            self._add_line(line, f"line {number}")

    @staticmethod
    def add_file_to_dictionary(
        filename: str | Path, dict: Dictionary, tokenize: Callable[[str], list[str]], num_workers: int = 1
    ) -> None:
        """Count the words of the text *filename* into *dict*, and an end for each line, in this
        process."""
        counts: Counter[str] = Counter()
        with open(filename, encoding="utf-8") as lines:
            for line in lines:
                counts.update([*tokenize(line), dict.eos_word])
        dict.update(counts)

    def dummy_sentence(self, length: int) -> Any:
        """*length* random words, the last of them ``</s>``: a tensor, int64 [T]."""
        import torch

        # From the second word on, fairseq's own bound.
        tokens = torch.randint(self.nspecial + 1, len(self), (length,))
        tokens[-1] = self.eos()
        return tokens


class DuplicateWord(UserError, RuntimeError):
    """A word that a dictionary has already."""


POST_PROCESS = {  # subwords of fairseq: the mark that stands for a blank; blanks between them are dropped
    "sentencepiece": "▁",
    "wordpiece": "_",
    "letter": "|",
    "_EOW": "_EOW",
}


def post_process(sentence: str, symbol: str | None) -> str:
    """*sentence*, symbols between blanks, as text.

    *symbol* names the subwords: one of :data:`POST_PROCESS`, ``subword_nmt`` or its mark ``@@ ``,
    ``silence``; None and ``none`` change nothing.

    Raises:
        NotImplementedError: *symbol* is another.
    """
    if symbol in POST_PROCESS:
        return sentence.replace(" ", "").replace(POST_PROCESS[symbol], " ").strip()
    if symbol == "silence":
        return re.sub(" +", " ", sentence.replace("<SIL>", "")).strip()
    if symbol in ("subword_nmt", "@@ ", "@@"):
        return (sentence + " ").replace("@@" if symbol == "@@" else "@@ ", "").rstrip()
    if symbol not in (None, "none"):
        raise NotImplementedError(
            f"post_process {symbol!r}: use {', '.join(POST_PROCESS)}, silence, subword_nmt, none or the mark '@@ '"
        )
    return sentence


def read_dictionary(path: str | Path) -> bytes:
    """Return the content of a ``dict.txt``; UserError if it cannot be read."""
    return read_named(path, "give a dict.txt made by fairseq-preprocess")


def placeholder(index: int) -> str:
    """Return the symbol of an id whose word is not known, or cannot occur in text."""
    return f"token{index}"


def _read_header(line: str, where: str) -> dict[str, str] | None:
    """The special symbols that a first line names;
    None if it is an ordinary one, which ends in a number.

    Raises:
        UserError: it names something else, or no ``eos``.
    """
    fields = line.split()[1:]
    # A text whose most frequent word is #specials has such a first line, too.
    if not line.startswith(f"{HEADER} ") or not fields or "=" not in fields[-1]:
        return None
    roles = {role: word for role, _, word in (field.partition("=") for field in fields)}
    if not roles.keys() <= {*ROLES, MASK, STOP} or "eos" not in roles:
        raise UserError(
            f"{where}: expected {HEADER} eos=WORD, with bos=, pad=, unk=, mask=, stop= if there; found {line[:80]!r}"
        )
    return roles
