"""Blocks with some tokens masked, to be predicted (Devlin et al. 2019, §3.1)."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
import torch

from fairseq.data.dataset import Examples, Sample
from fairseq.data.position import EpochLayout
from fairseq.data.token_blocks import TokenBlocks
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import find_tokenizer
from fairseq.text.tokenizers.rules import (
    BeginMarks,
    ByteLevelWords,
    ContinuationMarks,
    EndMarks,
    SubwordMarks,
    WordRule,
)

# Plain text may hold a mark, too: fewer symbols
# with it than this share do not make it the mark of words.
GUESSED_SHARE = 0.05
_WORDS, _ROWS, _ACTIONS, _SYMBOLS, _NOISE = range(5)  # independent random numbers of a token


@dataclass(frozen=True)
class Masking:
    """Settings of masking: the share of chosen tokens and their replacements."""

    seed: int  # of all random choices
    prob: float  # share of the words of a row to choose
    leave_prob: float  # share of the chosen tokens that are left unchanged
    random_prob: float  # share of the chosen tokens that become a random symbol; all others become the mask symbol
    mask: int  # id of the symbol
    special: np.ndarray  # bool [V], symbols that are never chosen and never used as random replacements
    # Symbols that continue the word before them, bool [V]; None: every token is a word.
    continues: np.ndarray | None = None
    joins: np.ndarray | None = None  # bool [V], symbols that the next token continues; None as *continues*
    counts: np.ndarray | None = None  # float64 [V], by which random symbols are drawn; None: all are equally probable

    def apply(
        self, tokens: np.ndarray, positions: np.ndarray, starts: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose tokens of rows and replace them.

        Args:
            tokens: int64 [B, T].
            positions: numbers that identify the tokens, int64 [B, T].
            starts: numbers that identify the rows, int64 [B].
            epoch: each has another choice.

        Returns:
            The tokens with replacements, int64 [B, T], and which are chosen, bool [B, T].
        """
        chosen = self._choose(tokens, positions, starts, epoch)
        return np.where(chosen, self._replace(tokens, positions, epoch), tokens), chosen

    @functools.cached_property
    def _drawn(self) -> np.ndarray:
        """The symbols that may replace others: int64 [n]."""
        return np.flatnonzero(~self.special)

    @functools.cached_property
    def _shares(self) -> np.ndarray | None:
        return None if self.counts is None else np.cumsum(self.counts[self._drawn] / self.counts.sum())

    def _choose(self, tokens: np.ndarray, positions: np.ndarray, starts: np.ndarray, epoch: int) -> np.ndarray:
        """The chosen tokens: bool [B, T].

        Of a row's W words, ⌊prob · W + u⌋ with u uniform on [0, 1) are chosen: prob · W on average.
        """
        real = ~self.special[tokens]
        first = real & ~self._continued(tokens)
        rows = first.nonzero()[0]  # of each word
        words = np.bincount(rows, minlength=len(tokens))
        # Rounded at random: with ⌊prob · W⌉ short rows would always or never be masked.
        count = np.floor(self.prob * words + uniform(starts, self.seed, epoch, _ROWS)).astype(np.int64)
        # A random order of the words inside of each row; the first `count` of them are chosen.
        order = np.lexsort((uniform(positions[first], self.seed, epoch, _WORDS), rows))
        rank = np.empty(len(rows), dtype=np.int64)
        rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(words) - words, words)
        word = np.cumsum(first.ravel()).reshape(first.shape) - 1  # of each token
        # Tokens before the first word have the word −1, which reads the False at the end.
        chosen = np.append(rank < count[rows], False)
        return real & chosen[word]

    def _continued(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens that belong to the word of the token before them: bool [B, T]."""
        continues, joins = self.continues, self.joins
        joined = np.zeros(tokens.shape, dtype=bool)
        if continues is not None and joins is not None:
            joined[:, 1:] = (continues[tokens[:, 1:]] | joins[tokens[:, :-1]]) & ~self.special[tokens[:, :-1]]
        return joined

    def _replace(self, tokens: np.ndarray, positions: np.ndarray, epoch: int) -> np.ndarray:
        """Replacement of each token if it is chosen: int64 [B, T]."""
        action = uniform(positions, self.seed, epoch, _ACTIONS)
        drawn = uniform(positions, self.seed, epoch, _SYMBOLS)
        if self._shares is None:
            symbols = self._drawn[(drawn * len(self._drawn)).astype(np.int64)]
        else:
            at = np.searchsorted(self._shares, drawn * self._shares[-1], side="right")
            symbols = self._drawn[np.minimum(at, len(self._drawn) - 1)]  # rounding may reach the last share
        leave, draw = self.leave_prob, self.random_prob
        # One random number decides: [0, leave) unchanged, [leave, leave + draw) another symbol, the
        # rest the mask.
        return np.where(action < leave, tokens, np.where(action < leave + draw, symbols, self.mask))


def special_symbols(dictionary: Dictionary) -> np.ndarray:
    """Mask of the symbols for begin, padding, end and mask: bool [V]."""
    special = np.zeros(len(dictionary), dtype=bool)
    ids = [dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.mask()]
    special[[index for index in ids if index >= 0]] = True
    return special


def word_rule(dictionary: Dictionary) -> WordRule | None:
    """The rule that groups the symbols of *dictionary* into words: of the tokenizer next to it, or
    guessed by its marks.

    None where no mark is frequent enough; see :func:`word_parts`.

    Raises:
        UserError: the tokenizer cannot be read, or belongs to another dictionary.
    """
    tokenizer = find_tokenizer(dictionary.path, dictionary.symbols) if dictionary.path is not None else None
    if tokenizer is not None and tokenizer.subwords is not None:
        return tokenizer.rule
    symbols = dictionary.symbols
    guesses: list[tuple[WordRule, int]] = [
        (BeginMarks(), sum(symbol.startswith(BeginMarks.mark) for symbol in symbols)),
        (ByteLevelWords(), sum(symbol.startswith(ByteLevelWords.mark) for symbol in symbols)),
        (EndMarks(), sum(symbol.endswith(EndMarks.mark) for symbol in symbols)),
    ]
    rule, marked = max(guesses, key=lambda guess: guess[1])
    return rule if marked >= GUESSED_SHARE * len(symbols) else None


def word_parts(dictionary: Dictionary, rule: WordRule | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Masks of symbols that continue the word before them and of those that the next continues,
    both bool [V].

    Args:
        rule: see :func:`word_rule`; None: ``##…`` continues, and ``…@@`` is continued.
    """
    before, after = (rule, rule) if rule is not None else (ContinuationMarks(), SubwordMarks())
    continues = np.array([before.continues(symbol) for symbol in dictionary.symbols])
    joins = np.array([after.joins(symbol) for symbol in dictionary.symbols])
    return continues, joins


@dataclass(frozen=True, eq=False)
class MaskedBlocks(Examples):
    """Blocks of a corpus, each after a begin symbol, with some tokens chosen for prediction.

    The choice depends on the seed, the epoch and the position of the token in the corpus only.
    """

    blocks: TokenBlocks  # each at least one token shorter than the model's rows
    masking: Masking
    bos: int  # id of the symbol before each block
    fixed: bool = False  # the same choice in every epoch, for validation
    epoch: int = 0  # of the choice

    @property
    def pad(self) -> int:  # type: ignore[override]
        return self.blocks.pad

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each block, the begin symbol counted: int32 [n]."""
        return self.blocks.sizes + 1

    def __len__(self) -> int:
        return len(self.blocks)

    def checksums(self) -> dict[str, int]:
        return self.blocks.checksums()

    def at_epoch(self, epoch: int) -> MaskedBlocks:
        return self if self.fixed else dataclasses.replace(self, blocks=self.blocks.at_epoch(epoch), epoch=epoch)

    def continuing(self, saved: EpochLayout) -> MaskedBlocks:
        return dataclasses.replace(self, blocks=self.blocks.continuing(saved))

    def select(self, keep: np.ndarray) -> MaskedBlocks:
        return dataclasses.replace(self, blocks=self.blocks.select(keep))

    def cut_long(self, longest: int) -> MaskedBlocks:
        """These rows, cut into several of at most *longest* tokens, the begin symbol counted."""
        return dataclasses.replace(self, blocks=self.blocks.cut_long(longest - 1))

    def batch(self, indices: np.ndarray) -> Sample:
        """Blocks *indices* [B] as rows padded on the right.

        Returns:
            ``id`` int64 [B]; ``nsentences`` B; ``ntokens``, tokens except padding;
            ``net_input.src_tokens`` int64 [B, T]; ``target`` int64 [B, T], the original of each
            chosen token, padding elsewhere; ``noise`` float32 [M], a random number for each of the
            M chosen tokens, in the order of rows.
        """
        plain = self.blocks.batch(indices)
        tokens = np.concatenate(
            [np.full((len(indices), 1), self.bos, dtype=np.int64), plain["target"].numpy()], axis=1
        )  # (B, T)
        positions = self.blocks.starts[indices][:, None] + np.arange(-1, tokens.shape[1] - 1)  # of the begin symbol: −1
        source, chosen = self.masking.apply(tokens, positions, self.blocks.starts[indices], self.epoch)
        return {
            "id": plain["id"],
            "nsentences": len(indices),
            "ntokens": int(np.count_nonzero(tokens != self.blocks.pad)),
            "net_input": {"src_tokens": torch.from_numpy(source)},
            "target": torch.from_numpy(np.where(chosen, tokens, self.blocks.pad)),
            "noise": torch.from_numpy(
                uniform(positions[chosen], self.masking.seed, self.epoch, _NOISE).astype(np.float32)
            ),
        }


def uniform(positions: np.ndarray, *key: int) -> np.ndarray:
    """A random number for each of *positions*, uniform on [0, 1), float64: a function of *key* and
    the position alone.

    Counters through the finalizer of SplitMix64 (Steele et al. 2014), so that the number of any
    token can be computed without those before it.
    """
    state = np.zeros(1, dtype=np.uint64)
    for part in key:
        state = _mix(state + _GOLDEN + np.array([part % 2**64], dtype=np.uint64))
    # The upper 53 bits: as many as a float64 in [0, 1) holds.
    return (_mix(positions.astype(np.uint64) * _GOLDEN + state) >> np.uint64(11)) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
