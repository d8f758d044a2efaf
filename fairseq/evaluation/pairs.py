"""Minimal pairs in BLiMP's format (Warstadt et al. 2020): the share whose good sentence is more
probable, averaged over pairs, paradigms and phenomena."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq.errors import UserError
from fairseq.system.opening import decoded, read_text
from fairseq.system.tables import table

logger = logging.getLogger(__name__)

SENTENCES = ("sentence_good", "sentence_bad")
PHENOMENA = ("linguistics_term", "field", "UID")
ALL = "all"
# Lists of words divide as the Penn Treebank: "isn't" is "is" and "n't", "Ann's" "ann" and "'s".
WORD = re.compile(r"\w+(?=n't\b)|'\w+|[\w-]+")


@dataclass(frozen=True)
class Pair:
    """An acceptable sentence and an unacceptable one; pairs of a paradigm test the same thing."""

    good: str
    bad: str
    phenomenon: str
    paradigm: str


@dataclass(frozen=True)
class Accuracy:
    """The share of pairs that are right, or a mean of such shares, and its standard error.

    The pairs are taken for a random sample: the error of another training run is not in it.
    """

    pairs: int
    share: float
    error: float

    def __str__(self) -> str:
        # One pair tells nothing about others.
        return f"{100 * self.share:.1f}" + (f" ± {100 * self.error:.1f}" if self.pairs > 1 else "")

    def metrics(self) -> dict[str, float]:
        """What ``results.json`` has."""
        return {"pairs": float(self.pairs), "acc": self.share, "stderr": self.error}


@dataclass(frozen=True)
class Accuracies:
    """Accuracies by phenomenon, with :data:`ALL`, and by paradigm."""

    phenomena: dict[str, Accuracy]
    paradigms: dict[str, Accuracy]

    @property
    def averages(self) -> dict[str, Accuracy]:
        """Means over pairs, over paradigms as BabyLM reports them, and over phenomena."""
        phenomena = [accuracy for name, accuracy in self.phenomena.items() if name != ALL]
        return {
            "pairs": self.phenomena[ALL],
            "paradigms": _mean(list(self.paradigms.values())),
            "phenomena": _mean(phenomena),
        }

    def metrics(self) -> dict[str, dict[str, dict[str, float]]]:
        """What ``results.json`` has."""
        groups = {"phenomena": self.phenomena, "paradigms": self.paradigms, "averages": self.averages}
        return {name: {key: accuracy.metrics() for key, accuracy in group.items()} for name, group in groups.items()}


def read_pairs(path: str | Path, limit: int | None = None) -> list[Pair]:
    """Read JSON lines with ``sentence_good``, ``sentence_bad``, the first of :data:`PHENOMENA`
    there is, and ``UID``, the paradigm; without these the name of the file.

    Args:
        path: a file, or a folder of files ``*.jsonl`` such as BLiMP's own.
        limit: the most pairs of each file, its first ones; None: all.

    Raises:
        UserError: a file cannot be read, there are no pairs, or a line lacks a sentence.
    """
    files = sorted(Path(path).glob("*.jsonl")) if os.path.isdir(path) else [Path(path)]
    pairs: list[Pair] = []
    for file in files:
        lines = read_text(file, "give a file of JSON lines").splitlines()
        of_file = (_pair(line, file, number) for number, line in enumerate(lines, 1) if line.strip())
        pairs += itertools.islice(of_file, limit)
    if not pairs:
        expected = "JSON lines" if files else "a file, or a folder of files *.jsonl,"
        raise UserError(f"{path}: no pairs; give {expected} with {' and '.join(SENTENCES)}")
    return pairs


def _pair(line: bytes, file: Path, number: int) -> Pair:
    where = f"{file}: line {number}"
    try:
        values = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON in UTF-8 ({error})") from None
    sentences = [values.get(name) for name in SENTENCES] if isinstance(values, dict) else []
    texts = [text for text in sentences if isinstance(text, str) and text.strip()]
    if len(texts) < len(SENTENCES):
        raise UserError(f"{where}: expected {' and '.join(SENTENCES)}, found {json.dumps(values)[:80]}")
    phenomenon = next((str(values[name]) for name in PHENOMENA if values.get(name)), file.stem)
    return Pair(texts[0], texts[1], phenomenon, str(values.get("UID") or file.stem))


def have_known_words(pairs: Sequence[Pair], path: str | Path) -> list[bool]:
    """Say of each pair whether all its words occur in a text, or a list of words, in any case.

    With the list of BabyLM's evaluation pipeline, this is how its filtered BLiMP is made.

    Raises:
        UserError: the file cannot be read.
    """
    advice = "give a text, or a list of words, in UTF-8"
    text = decoded(read_text(path, advice), path, advice)
    known = {match[0] for match in WORD.finditer(_plain(text))}
    words = [WORD.findall(_plain(f"{pair.good} {pair.bad}")) for pair in pairs]
    kept = [known.issuperset(each) for each in words]
    if not any(kept):
        lacking = next(word for word in words[0] if word not in known)
        logger.warning("`known_words` %s: every pair has a word that it lacks, such as %r", path, lacking)
    return kept


def _plain(text: str) -> str:
    return text.lower().replace("’", "'")


def accuracies(pairs: Sequence[Pair], good: Sequence[float], bad: Sequence[float]) -> Accuracies:
    """Return the accuracies by the log-probabilities of the sentences.

    A tie is an error.
    """
    phenomena: dict[str, list[bool]] = {}
    paradigms: dict[str, list[bool]] = {}
    for pair, first, second in zip(pairs, good, bad, strict=True):
        # Strictly: a model that gives all sentences one probability must not be right.
        right = first > second
        phenomena.setdefault(pair.phenomenon, []).append(right)
        paradigms.setdefault(pair.paradigm, []).append(right)
    everything = {ALL: [right for group in phenomena.values() for right in group]}
    return Accuracies(
        {name: _accuracy(group) for name, group in [*sorted(phenomena.items()), *everything.items()]},
        {name: _accuracy(group) for name, group in sorted(paradigms.items())},
    )


def _accuracy(right: Sequence[bool]) -> Accuracy:
    share = sum(right) / len(right)
    return Accuracy(len(right), share, math.sqrt(share * (1 - share) / len(right)))


def _mean(groups: Sequence[Accuracy]) -> Accuracy:
    """The mean of the shares of groups, each of which counts the same."""
    error = math.sqrt(sum(group.error**2 for group in groups)) / len(groups)
    return Accuracy(sum(group.pairs for group in groups), sum(group.share for group in groups) / len(groups), error)


def accuracy_table(whole: Accuracies, known: Accuracies | None = None) -> Iterator[str]:
    """A table in percent, with standard errors, of all pairs and of those with *known* words."""
    columns = [whole] if known is None else [whole, known]
    head = ["phenomenon", "pairs", "accuracy (%)", "known words", "accuracy (%)"]
    rows = [[name, *_cells([column.phenomena.get(name) for column in columns])] for name in whole.phenomena]
    # Of one paradigm or phenomenon, the mean is itself; "all" is no phenomenon.
    for kind, count in (("paradigms", len(whole.paradigms)), ("phenomena", len(whole.phenomena) - 1)):
        if count > 1:
            rows.append([f"mean of {kind}", *_cells([column.averages[kind] for column in columns])])
    yield from table([head[: 1 + 2 * len(columns)], *rows], left=1)


def _cells(accuracies: Sequence[Accuracy | None]) -> Iterator[str]:
    for accuracy in accuracies:
        yield from ("0", "–") if accuracy is None else (str(accuracy.pairs), str(accuracy))
