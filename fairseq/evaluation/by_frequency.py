"""Losses of whole words by their counts in the training text.

A *word* is a word of the text before it was split into subwords, as with notes: the
:class:`~fairseq.text.tokenizers.rules.WordRule` of the tokenizer groups tokens. Its loss is the sum
of its tokens' losses, by the chain rule −log₂ of its probability, into how many subwords it may be
cut; where only some of its tokens are predicted, as masked ones in a validation, it is their sum.
Ends of lines and other special symbols are no words.

Standard errors take words as independent draws; a difference is paired, word by word.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq.data.dataset import Dataset, Sample
from fairseq.data.folders import data_folders, load_dictionary, open_corpus
from fairseq.data.masking import special_symbols, word_parts, word_rule
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError
from fairseq.system import tables
from fairseq.system.opening import decoded, read_named
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers.rules import ContinuationMarks, SubwordMarks

logger = logging.getLogger(__name__)

UNKNOWN, ALL = "unknown", "all"
PIECE = 1 << 22  # tokens grouped at once


class WordGroups:
    """Groups the tokens of a dictionary into words;
    UserError if the tokenizer next to it cannot be read."""

    def __init__(self, dictionary: Dictionary) -> None:
        self.symbols, self.unknown = dictionary.symbols, dictionary.unk()
        self.rule, self.special = word_rule(dictionary), special_symbols(dictionary)
        # Special symbols may look like parts of words:
        # `<s>` begins with no mark of a word's beginning.
        self.continues, self.joins = (mask & ~self.special for mask in word_parts(dictionary, self.rule))

    def first(self, tokens: np.ndarray, lines: np.ndarray | None = None) -> np.ndarray:
        """Indices of the first token of each word of *tokens*; a special symbol is a word.

        Args:
            lines: indices at which lines begin, where no symbol ends them.
        """
        before, after = tokens[:-1], tokens[1:]
        joined = self.continues[after] & ~self.special[before] | self.joins[before] & ~self.special[after]
        begins = np.append(np.ones(min(1, len(tokens)), bool), ~joined)
        if lines is not None:
            begins[lines[lines < len(tokens)]] = True
        return np.flatnonzero(begins)

    def text(self, ids: Sequence[int]) -> str:
        symbols = [self.symbols[index] for index in ids]
        # Without a rule words have either kind of marks, see `word_parts`.
        if self.rule is None:
            symbols = [symbols[0], *(symbol.removeprefix(ContinuationMarks.mark) for symbol in symbols[1:])]
        return "".join((self.rule or SubwordMarks()).group(symbols)[0])

    def counts(self, tokens: Any) -> Counter[str]:
        """Return the count of each word of *tokens*, an array [N] or a corpus's, of which a piece
        is read at once."""
        # Words of one token, most of all, are counted by their id; only the others as sequences.
        single, several = np.zeros(len(self.symbols), np.int64), Counter[bytes]()
        rest = np.empty(0, np.int32)
        for start in range(0, len(tokens), PIECE):
            piece = np.append(rest, np.asarray(tokens[start : start + PIECE]).astype(np.int32))
            first = self.first(piece)
            ends = np.append(first[1:], len(piece))
            rest = piece[:0]
            if start + PIECE < len(tokens):  # the last word may go on
                rest, first, ends = piece[first[-1] :], first[:-1], ends[:-1]
            alone = ends - first == 1
            single += np.bincount(piece[first[alone]], minlength=len(single))
            # Bytes are hashed at once; tuples of ids would be made one Python integer at a time.
            data, bounds = piece.tobytes(), np.stack([first, ends], 1)[~alone] * piece.itemsize
            several.update(data[begin:end] for begin, end in bounds.tolist())
        counter = Counter[str]()
        for index in np.flatnonzero(single * ~self.special).tolist():
            counter[self.text([index])] += int(single[index])
        for word, count in several.items():
            counter[self.text(np.frombuffer(word, np.int32).tolist())] += count
        return counter


@dataclass(frozen=True)
class WordLosses:
    """The scored words of a text, in its order."""

    words: list[str]  # their text
    is_unknown: np.ndarray  # whether the unknown symbol is part of a word, whose count is not known then; bool [n]
    tokens: np.ndarray  # scored tokens of each, int64 [n]
    losses: np.ndarray  # their sum in bits, float64 [n]

    @classmethod
    def of(
        cls,
        groups: WordGroups,
        tokens: np.ndarray,
        lprobs: np.ndarray,
        positions: np.ndarray | None = None,
        lines: np.ndarray | None = None,
    ) -> WordLosses:
        """Return the words of a text.

        Args:
            tokens: ids of the text, [N].
            lprobs: natural logarithms, of all tokens or those at *positions*.
            positions: indices of the scored tokens, [S]; None: all.
            lines: see :meth:`WordGroups.first`.
        """
        positions = np.arange(len(tokens)) if positions is None else positions
        is_text = ~groups.special[tokens[positions]]
        first = groups.first(tokens, lines)
        # The word of each scored token: the last one that begins at it or before it.
        number = np.searchsorted(first, positions[is_text], side="right") - 1
        losses = np.bincount(number, -lprobs[is_text].astype(np.float64) / math.log(2), minlength=len(first))
        counts = np.bincount(number, minlength=len(first))
        scored = np.flatnonzero(counts)
        ends = np.append(first[1:], len(tokens))
        texts: dict[tuple[int, ...], str] = {}
        words, is_unknown = [], np.zeros(len(scored), bool)
        for index, (begin, end) in enumerate(zip(first[scored].tolist(), ends[scored].tolist(), strict=True)):
            ids = tuple(tokens[begin:end].tolist())
            # Each different word is decoded once: most of a text's words are repetitions.
            words.append(texts[ids] if ids in texts else texts.setdefault(ids, groups.text(ids)))
            is_unknown[index] = groups.unknown in ids
        return cls(words, is_unknown, counts[scored], losses[scored])


def blocks_of(dataset: Dataset, task: str) -> TokenBlocks:
    """Return the blocks of text that *dataset*
    of *task* reads, masked or with notes or as they are.

    Raises:
        UserError: it reads no blocks of text.
    """
    blocks: Any = dataset
    # Datasets of masks and of notes hold the blocks that they change.
    while blocks is not None and not isinstance(blocks, TokenBlocks):
        blocks = getattr(blocks, "blocks", None)
    if blocks is None:
        raise UserError(f"`by_frequency`: `task` {task} does not predict the words of a text; leave the flag out")
    return blocks


def with_positions(samples: Iterable[Sample | None], blocks: TokenBlocks) -> Iterator[Sample | None]:
    """Yield *samples* with the positions of their targets; see
    :mod:`fairseq.criterions.fairseq_criterion`."""
    for sample in samples:
        if sample is not None:
            target = sample["target"]
            positions = blocks.positions(sample["id"].cpu().numpy())[:, 1:]
            begin = target.size(1) - positions.shape[1]  # symbols before the block
            positions = np.pad(positions, ((0, 0), (begin, 0)), constant_values=-1)
            sample = {**sample, "positions": torch.from_numpy(positions).to(target.device)}
        yield sample


def word_counts(path: str | None, data: str | Path, dictionary: Dictionary) -> Counter[str]:
    """Return the counts of words in a file or a data folder,
    *path*, or else in the training split of *data*."""
    if path is None:
        return training_counts(data, dictionary)
    return training_counts(path, load_dictionary(path)) if os.path.isdir(path) else read_counts(path)


def training_counts(data: str | Path, dictionary: Dictionary) -> Counter[str]:
    """Return the count of each word in the training split of *data*, of all its folders.

    Raises:
        UserError: there is no training split, or it is damaged or of another dictionary.
    """
    groups, counter = WordGroups(dictionary), Counter[str]()
    for folder in data_folders(data):
        if not os.path.isfile(folder / "train.idx"):
            raise UserError(f"`by_frequency`: {folder} has no training split to count; give `word_counts`")
        logger.info("counting the words of %s/train", folder)
        counter += groups.counts(open_corpus(folder, "train", dictionary, combine=True).tokens)
    return counter


def read_counts(path: str | Path) -> Counter[str]:
    """Return the counts of a file with a line ``word
    count`` for each word, as ``notes.txt`` has them.

    Raises:
        UserError: it cannot be read, is not UTF-8, or has other lines or none.
    """
    advice = "give a file with lines `word count`"
    text = decoded(read_named(path, advice, "`word_counts`"), f"`word_counts` {path}", advice)
    lines = text.removesuffix("\n").split("\n")
    counter = Counter[str]()
    for number, line in enumerate(lines, 1):
        word, _, count = line.rstrip().replace("\t", " ").rpartition(" ")
        if not word.strip() or not (count.isascii() and count.isdigit()) or len(count) > 18:
            raise UserError(f"`word_counts` {path}: line {number}: expected word and count, found {line[:60]!r}")
        counter[word.strip()] += int(count)
    if not counter:
        raise UserError(f"`word_counts` {path}: no words; {advice}")
    return counter


def by_frequency(losses: Mapping[str, WordLosses], counts: Mapping[str, int], edges: Sequence[int]) -> dict[str, Any]:
    """Return the mean losses of the words of each band of *counts*, and the differences of models
    from the first.

    Args:
        losses: of each model, by its name, over one text.
        counts: of words in the training text; a word without one has 0.
        edges: lowest count of each band, rising, but for the first band, which begins at 0.

    Returns:
        ``models``, their names, and ``bands``, see :func:`_band`; behind the bands of counts come
        one for words with unknown symbols, if there are any, and one for all words.

    Raises:
        UserError: the models split the text into other words or predicted others.
    """
    models = list(losses.values())
    first, *others = models
    for other in others:
        # A paired difference needs the same words in the same order; tokens may differ, since each
        # model has its own subwords.
        if first.words != other.words:
            pairs = enumerate(itertools.zip_longest(first.words, other.words), 1)
            number, (one, two) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
            raise UserError(
                f"`by_frequency`: the models predict other words ({number}: {one!r:.40}, {two!r:.40}); compare models "
                "of one criterion whose tokenizers make the same words of a text"
            )
    band = np.searchsorted(edges, [counts.get(word, 0) for word in first.words], side="right")
    # Unknown to any model: all compare the same words.
    unknown = np.logical_or.reduce([model.is_unknown for model in models])
    band[unknown] = -1
    lows, highs = [0, *edges], [*(edge - 1 for edge in edges), None]
    rows = [_band(_name(low, high), models, band == i) for i, (low, high) in enumerate(zip(lows, highs, strict=True))]
    rows = [{**row, "low": low, "high": high} for row, low, high in zip(rows, lows, highs, strict=True)]
    rows += [_band(UNKNOWN, models, unknown)] if unknown.any() else []
    return {"models": list(losses), "bands": [*rows, _band(ALL, models, np.ones(len(band), bool))]}


def _name(low: int, high: int | None) -> str:
    return f"{low:,}+" if high is None else f"{low:,}-{high:,}" if high > low else f"{low:,}"


def _band(name: str, models: Sequence[WordLosses], mask: np.ndarray) -> dict[str, object]:
    """The number of words in *mask*; of each model their scored tokens, mean loss in bits, its
    standard error; of each but the first the mean difference from it, and its standard error."""
    means = [_mean(model.losses[mask]) for model in models]
    differences = [_mean((model.losses - models[0].losses)[mask]) for model in models[1:]]
    return {
        "band": name,
        "words": int(mask.sum()),
        "tokens": [int(model.tokens[mask].sum()) for model in models],
        "bits_per_word": [mean for mean, _ in means],
        "standard_error": [error for _, error in means],
        # Of pairs: the variance of the words, which both models share, cancels.
        "difference": [mean for mean, _ in differences],
        "difference_standard_error": [error for _, error in differences],
    }


def _mean(values: np.ndarray) -> tuple[float | None, float | None]:
    """The mean and its standard error; None where there are too few values for them."""
    mean = float(values.mean()) if len(values) else None
    return mean, float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines of a report of :func:`by_frequency`: means ± standard errors, in bits a word."""
    names = report["models"]
    differences = ["difference"] if len(names) == 2 else [f"difference: {name}" for name in names[1:]]
    rows = [["count in training", "words", *(["bits per word"] if len(names) == 1 else names), *differences]]
    for band in filter(lambda band: band["words"], report["bands"]):
        cells = [_cell(*pair) for pair in zip(band["bits_per_word"], band["standard_error"], strict=True)]
        pairs = zip(band["difference"], band["difference_standard_error"], strict=True)
        rows.append([band["band"], f"{band['words']:,}", *cells, *(_cell(*pair, "+") for pair in pairs)])
    return tables.table(rows, left=1)


def _cell(mean: float | None, error: float | None, sign: str = "") -> str:
    return "" if mean is None else f"{mean:{sign}.3f}" + ("" if error is None else f" ± {error:.3f}")
