"""Words and their numbers, in fairseq's ``dict.txt`` format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fairseq.data.files import atomic_write
from fairseq.errors import UserError


class Dictionary:
    """A two-way mapping between symbols and consecutive ids.

    The four special symbols come first (``<s>`` 0, ``<pad>`` 1, ``</s>`` 2, ``<unk>`` 3) and are not written to the
    file. A special symbol that occurs as a word of the text is that special symbol.

    Attributes:
        symbols: the symbol of each id.
        count: how often each occurred.
        indices: the id of each symbol.
        nspecial: number of special symbols at the start.
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

    def bos(self) -> int:
        """The id of the begin-of-sentence symbol."""
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
        """Whether both give the same id to every symbol; counts do not matter."""
        return isinstance(other, Dictionary) and self.symbols == other.symbols

    def __repr__(self) -> str:
        return f"Dictionary({len(self)} symbols)"

    def index(self, word: str) -> int:
        """The id of *word*, or that of the unknown symbol."""
        return self.indices.get(word, self.unk_index)

    def add_symbol(self, word: str, n: int = 1) -> int:
        """Count *n* more occurrences of *word*, adding it at the end if it is new; returns its id."""
        index = self.indices.get(word)
        if index is None:
            index = self.indices[word] = len(self.symbols)
            self.symbols.append(word)
            self.count.append(0)
        self.count[index] += n
        return index

    def update(self, counter: Mapping[str, int]) -> None:
        """Count the words of *counter*; new ones are added in code-point order."""
        for word in sorted(counter):
            self.add_symbol(word, counter[word])

    def finalize(self, threshold: int = -1, nwords: int = -1, padding_factor: int = 8) -> None:
        """Order the words by falling count, ties by code points, and leave out the rare ones.

        Args:
            threshold: words that occur less often than this are left out.
            nwords: most symbols to keep, the special ones counted; 0 or less: no limit.
            padding_factor: the size is rounded up to a multiple of this.
        """
        counted = zip(self.symbols[self.nspecial :], self.count[self.nspecial :], strict=True)
        kept = sorted(((word, n) for word, n in counted if n >= threshold), key=lambda item: (-item[1], item[0]))
        if nwords > 0:
            kept = kept[: max(0, nwords - self.nspecial)]
        self.symbols = self.symbols[: self.nspecial] + [word for word, _ in kept]
        self.count = self.count[: self.nspecial] + [n for _, n in kept]
        self.indices = {word: index for index, word in enumerate(self.symbols)}
        self.pad_to_multiple_(padding_factor)

    def pad_to_multiple_(self, padding_factor: int) -> None:
        """Add ``madeupword0000``, … (count 0) until the size is a multiple of *padding_factor*."""
        number = 0
        while len(self) % padding_factor != 0:
            self.add_symbol(f"madeupword{number:04d}", 0)
            number += 1

    @classmethod
    def load(cls, path: str | Path) -> Dictionary:
        """Read a ``dict.txt``: a line ``word count`` for each symbol that is not special.

        Raises:
            UserError: the file is missing, empty or not UTF-8, a line has no count, or a word is there twice.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"{path}: the dictionary cannot be read ({error.strerror})") from None
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            bad = content.count(b"\n", 0, error.start) + 1
            raise UserError(
                f"{path}: line {bad}, byte offset {error.start}: not UTF-8; make the dictionary again"
            ) from None
        lines = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
        if lines == [""]:
            raise UserError(f"{path}: the dictionary is empty; make it again with fairseq-preprocess")
        dictionary = cls()
        for number, line in enumerate(lines, 1):
            dictionary._add_line(line, f"{path}: line {number}")
        return dictionary

    def _add_line(self, line: str, where: str) -> None:
        word, _, count = line.rstrip().rpartition(" ")
        if not word or not (count.isascii() and count.isdigit()):
            raise UserError(f"{where}: expected `word count`, found {line[:80]!r}; make the dictionary again")
        if word in self.indices:
            raise UserError(f"{where}: {word[:80]!r} is in the dictionary already; remove one of the two lines")
        self.add_symbol(word, int(count))

    def save(self, path: str | Path) -> None:
        """Write the symbols that are not special as ``word count`` lines, whole or not at all."""
        words = zip(self.symbols[self.nspecial :], self.count[self.nspecial :], strict=True)
        with atomic_write(path) as file:
            file.writelines(f"{word} {n}\n".encode() for word, n in words)

    def encode_line(self, text: str, append_eos: bool = True) -> np.ndarray:
        """The ids of the words of *text*, split at any white space: int32 [words], or [words + 1] with ``</s>``."""
        ids = [self.index(word) for word in text.split()]
        if append_eos:
            ids.append(self.eos_index)
        return np.array(ids, dtype=np.int32)

    def string(self, ids: Iterable[Any], bpe_symbol: str | None = None) -> str:
        """The words of *ids* (a list, array or tensor of one dimension), without ``<s>``, ``<pad>`` and ``</s>``.

        Args:
            bpe_symbol: mark at the end of a subword that joins it to the next one, as ``"@@ "``.
        """
        silent = {self.bos_index, self.pad_index, self.eos_index}
        text = " ".join(self.symbols[index] for index in map(int, ids) if index not in silent)
        if bpe_symbol is None:
            return text
        return (text + " ").replace(bpe_symbol.rstrip() + " ", "").rstrip()
