"""Subwords of SentencePiece models (Kudo and Richardson 2018)."""

from __future__ import annotations

import functools
import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from fairseq.errors import UserError
from fairseq.text.tokenizers.base import EXTRA, Span, Subwords, Vocabulary, import_package
from fairseq.text.tokenizers.rules import BeginMarks, WordRule

WORD_BEGINS = "▁"
# Letters of a word from which pieces are learned. In text without spaces a word is a paragraph:
# the library skips those over 4,192 bytes, and its sums are not finite for 100,000 letters.
LONGEST_WORD = 1000
RESERVED = "▅"  # never a piece: the library writes it for unknown letters


@dataclass(frozen=True)
class SentencePiece(Subwords):
    """Pieces of a SentencePiece model; ``▁`` stands for a space."""

    rule: ClassVar[WordRule] = BeginMarks(WORD_BEGINS)
    reads_lines: ClassVar[bool] = True

    @property
    def pieces(self) -> list[str]:
        """The pieces in the order of their ids."""
        with self.library():  # a piece need not be UTF-8
            return [self._model.id_to_piece(index) for index in range(len(self._model))]

    @property
    def begin(self) -> int | None:
        """The id of the symbol for the beginning of a text; None if there is none."""
        index: int = self._model.bos_id()
        return index if index >= 0 else None

    @classmethod
    def learn(cls, counts: Mapping[str, int], size: int) -> bytes:
        library, model = _library(), io.BytesIO()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "words.tsv")
            with open(path, "w", encoding="utf-8") as file:
                # A table of counts: the text was counted already, and is not read once more.
                for word in sorted(counts):
                    # The library skips words that hold it: without spaces, paragraphs.
                    for part in word.split(RESERVED):
                        cuts = range(0, len(part), LONGEST_WORD)
                        file.writelines(f"{part[at : at + LONGEST_WORD]}\t{counts[word]}\n" for at in cuts)
            try:
                # One thread and sorted words: the model does not depend on the machine.
                library.SentencePieceTrainer.train(
                    input=path, input_format="tsv", model_writer=model, vocab_size=size, num_threads=1,
                    character_coverage=1.0, minloglevel=2,
                )  # fmt: skip
            except (RuntimeError, OSError) as error:
                reason = " ".join(str(error).split())[-200:]
                raise UserError(f"`learn_bpe` {size}: sentencepiece: {reason}; give another number") from None
        return model.getvalue()

    def check(self) -> None:
        self.decode(self.encode(["The cat  sat, ż 語 🙂"])[0].split())

    def encode(self, lines: Sequence[str]) -> list[str]:
        with self.library():
            return [self._vocabulary.line(ids) for ids in self._model.encode(list(lines), out_type=int)]

    def spans(self, line: str) -> list[Span]:
        with self.library():
            ids, pieces = self._model.encode(line, out_type=int), self._model.encode(line, out_type=str)
            normal, origin = self._model.normalize(line, with_offsets=True)
        at = [number for number, letter in enumerate(normal) for _ in letter.encode()] + [len(normal)]  # of each byte
        offsets, byte = [], 0
        for index, piece in zip(ids, pieces, strict=True):
            first = byte
            # A byte piece is written `<0x41>`, six letters for one byte.
            byte += 1 if self._model.is_byte(index) else len(piece.encode())
            start, end = origin[at[first]], origin[at[byte - 1] + 1]
            # Several letters of one, as the f and the i of a ligature: all of them stand for it.
            if start == end and piece != WORD_BEGINS:
                end = next((position for position in origin[at[byte - 1] :] if position > start), start)
            offsets.append((start, end))
        return self._vocabulary.spans(ids, offsets)

    def decode(self, symbols: Sequence[str]) -> str:
        with self.library():
            return str(self._model.decode_pieces(self._vocabulary.plain(symbols)))

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        pieces = dict(enumerate(self.pieces))
        return Vocabulary(pieces, self._model.unk_id(), self.source)

    @functools.cached_property
    def _model(self) -> Any:
        try:
            model = _library().SentencePieceProcessor(model_proto=self.content)
        except (RuntimeError, TypeError):
            raise self.invalid("not a SentencePiece model") from None
        if not len(model):
            raise self.invalid("a SentencePiece model without symbols")
        return model


def _library() -> ModuleType:
    return import_package("sentencepiece", f"`bpe` sentencepiece: the package is missing; {EXTRA}")
