"""Conversion between raw text and dictionary tokens by the tokenizer of the data."""

from __future__ import annotations

from collections.abc import Iterable

from fairseq.inference.text import Detokenizer, Stream
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import Tokenizer

LONGEST = 512  # symbols of a line that are decoded again for each token


class RawText(Detokenizer):
    """Tokens are the symbols of a tokenizer, text is raw.

    Args:
        dictionary: of the tokens.
        tokenizer: of the data.
    """

    def __init__(self, dictionary: Dictionary, tokenizer: Tokenizer) -> None:
        super().__init__(dictionary)
        self.tokenizer = tokenizer

    def split(self, text: str) -> list[str]:
        return self.tokenizer.encode(text).split()

    def stream(self) -> Stream:
        return LineStream(self.dictionary, self.tokenizer)


class LineStream(Stream):
    """Decoder that decodes the line so far with each token; its last word is returned once it is complete.

    After :data:`LONGEST` symbols without an end of line, text goes on after a whole word as if a line began.
    """

    def __init__(self, dictionary: Dictionary, tokenizer: Tokenizer) -> None:
        super().__init__(dictionary)
        self.tokenizer = tokenizer
        self._begin("")

    def add(self, tokens: Iterable[int]) -> str:
        pieces = []
        for token in tokens:
            if token == self.dictionary.eos():
                pieces.append(self.pause() + "\n")
                self._begin("")
            else:
                self.symbols.append(self.dictionary[token])
                if len(self.symbols) > LONGEST:
                    pieces.append(self._restart())
        # The last word is held back: a further subword may join it, and a detokeniser attaches punctuation to it.
        return "".join(pieces) + self._new(self._text().rstrip().rpartition(" ")[0])

    def pause(self) -> str:
        return self._new(self._text())

    def _begin(self, lead: str) -> None:
        self.symbols: list[str] = []
        self.lead = lead  # text before the line's own
        self.shown = 0

    def _text(self) -> str:
        return self.lead + self.tokenizer.decode(self.symbols)

    def _new(self, text: str) -> str:
        """The part of the line's *text* that was not returned yet."""
        new = text[self.shown :]
        # What was returned is not taken back if the line, decoded anew, is shorter.
        self.shown = max(self.shown, len(text))
        return new

    def _restart(self) -> str:
        """Return the text of all words but the last, which begins a line, if that is a word with a space before it."""
        # Before a word that begins with a letter or digit: the text of what is left does not depend on what is cut off.
        words, sizes = self.tokenizer.rule.group(self.symbols)
        if len(words) < 2 or not words[-1][:1].isalnum():
            return ""
        last, before = self.symbols[-sizes[-1] :], self.symbols[: -sizes[-1]]
        self.symbols = before
        done = self.pause()
        self._begin(self.tokenizer.glue)
        self.symbols = last
        return done
