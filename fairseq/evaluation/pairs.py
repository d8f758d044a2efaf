"""Minimal pairs in BLiMP's format (Warstadt et al.
2020): the share whose good sentence is more probable."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq.errors import UserError
from fairseq.system.opening import read_text
from fairseq.system.tables import table

SENTENCES = ("sentence_good", "sentence_bad")
PHENOMENA = ("linguistics_term", "field", "UID")
ALL = "all"


@dataclass(frozen=True)
class Pair:
    """An acceptable sentence, an unacceptable one, and their phenomenon."""

    good: str
    bad: str
    phenomenon: str


def read_pairs(path: str | Path, limit: int | None = None) -> list[Pair]:
    """Read JSON lines with ``sentence_good``, ``sentence_bad``,
    and the first of :data:`PHENOMENA` there is.

    Args:
        path: a file, or a folder of files ``*.jsonl`` such as BLiMP's own.
        limit: the most pairs of each file, its first ones; None: all.

    Raises:
        UserError: a file cannot be read, there are no pairs, or a line lacks a sentence.
    """
    files = sorted(Path(path).glob("*.jsonl")) if os.path.isdir(path) else [path]
    pairs: list[Pair] = []
    for file in files:
        lines = read_text(file, "give a file of JSON lines").splitlines()
        of_file = (_pair(line, f"{file}: line {number}") for number, line in enumerate(lines, 1) if line.strip())
        pairs += itertools.islice(of_file, limit)
    if not pairs:
        expected = "JSON lines" if files else "a file, or a folder of files *.jsonl,"
        raise UserError(f"{path}: no pairs; give {expected} with {' and '.join(SENTENCES)}")
    return pairs


def _pair(line: bytes, where: str) -> Pair:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON in UTF-8 ({error})") from None
    sentences = [values.get(name) for name in SENTENCES] if isinstance(values, dict) else []
    texts = [text for text in sentences if isinstance(text, str) and text.strip()]
    if len(texts) < len(SENTENCES):
        raise UserError(f"{where}: expected {' and '.join(SENTENCES)}, found {json.dumps(values)[:80]}")
    phenomenon = next((str(values[name]) for name in PHENOMENA if values.get(name)), "")
    return Pair(texts[0], texts[1], phenomenon)


def accuracies(pairs: Sequence[Pair], good: Sequence[float], bad: Sequence[float]) -> dict[str, tuple[int, float]]:
    """The number of pairs and the accuracy of each phenomenon, and of all, by the log-probabilities
    of the sentences.

    A tie is an error.
    """
    groups: dict[str, list[bool]] = {}
    for pair, first, second in zip(pairs, good, bad, strict=True):
        # Strictly: a model that gives all sentences one probability must not be right.
        groups.setdefault(pair.phenomenon, []).append(first > second)
    groups = {**dict(sorted(groups.items())), ALL: [right for group in groups.values() for right in group]}
    return {name: (len(group), sum(group) / len(group)) for name, group in groups.items()}


def accuracy_table(accuracies: dict[str, tuple[int, float]]) -> Iterator[str]:
    """A table of :func:`accuracies`, in percent."""
    rows = [[name, str(count), f"{100 * share:.1f}"] for name, (count, share) in accuracies.items()]
    yield from table([["phenomenon", "pairs", "accuracy (%)"], *rows], left=1)
