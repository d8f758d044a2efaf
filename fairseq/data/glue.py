"""Sentences and labels in TSV files: the nine GLUE tasks (Wang et al.
2019), MR, and files with the same columns."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq.errors import UserError, nearest
from fairseq.system.opening import decoded, read_named

logger = logging.getLogger(__name__)

MOST_CLASSES = 1000  # that are taken from a table

Label = float | tuple[float, ...]
"""The number of a class, a score, or several scores."""


@dataclass(frozen=True)
class TableLayout:
    """Columns, labels and metrics of a task."""

    sentences: tuple[str, ...]  # columns, one or two
    label: str = "label"  # column
    labels: tuple[str, ...] = ("0", "1")  # the classes by number; empty for regression
    metrics: tuple[str, ...] = ("accuracy",)  # figures that GLUE reports; their mean is the score
    header: tuple[str, ...] = ()  # columns of the files that have no header line; empty where all have one
    dev: str = "dev"  # name of the development file, without ``.tsv``
    scores: int = 1  # numbers that a label of regression consists of
    ragged: bool = False  # whether the published files have incomplete lines, which are left out

    @property
    def is_regression(self) -> bool:
        """True if labels are scores."""
        return not self.labels

    @property
    def outputs(self) -> int:
        """Numbers that a model computes for an example."""
        return len(self.labels) or self.scores


_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("not_entailment", "entailment")

GLUE = {
    "CoLA": TableLayout(("sentence",), metrics=("mcc",), header=("source", "label", "mark", "sentence")),
    "SST-2": TableLayout(("sentence",)),
    "MR": TableLayout(("sentence",)),
    "MRPC": TableLayout(("#1 String", "#2 String"), "Quality", metrics=("accuracy", "f1")),
    "STS-B": TableLayout(_PAIR, "score", labels=(), metrics=("pearson", "spearman")),
    "QQP": TableLayout(("question1", "question2"), "is_duplicate", metrics=("accuracy", "f1"), ragged=True),
    "MNLI": TableLayout(_PAIR, "gold_label", labels=("contradiction", "neutral", "entailment"), dev="dev_matched"),
    "QNLI": TableLayout(("question", "sentence"), labels=_ENTAILMENT),
    "RTE": TableLayout(_PAIR, labels=_ENTAILMENT),
    "WNLI": TableLayout(_PAIR),
}


def layout_of(name: str) -> TableLayout:
    """The layout of a GLUE task, or UserError; upper and lower case are the same."""
    for known, layout in GLUE.items():
        if known.lower() == name.lower():
            return layout
    raise UserError(f"`glue_task` {name}: no such task; {nearest(name, GLUE)}")


@dataclass(frozen=True)
class Example:
    """A row of a file, *line* from 1: one or two sentences, and a label where the file has one."""

    line: int
    sentences: tuple[str, ...]
    label: Label | None


def split_file(folder: str | Path, split: str, layout: TableLayout) -> Path:
    """The file of *split*: ``valid`` is GLUE's development file, other names are files'."""
    return Path(folder) / f"{layout.dev if split == 'valid' else split}.tsv"


def read_examples(path: Path, layout: TableLayout, labelled: bool = True) -> list[Example]:
    """The rows of a TSV file; tabs divide columns, quotes have no meaning.

    Args:
        labelled: whether every row must have a label; otherwise the column may be missing.

    Raises:
        UserError: the file is missing, empty or not UTF-8, or lacks a column; a row lacks a field,
            has an empty sentence or an unknown label.
    """
    header, rows = _table(path, layout)
    sentence_columns = [_column(path, header, name) for name in layout.sentences]
    label = _column(path, header, layout.label) if labelled or layout.label in header else None
    last = max(*sentence_columns, -1 if label is None else label)
    examples, incomplete = [], 0
    for number, fields in rows:
        problem = None
        if len(fields) <= last:
            problem = f"{len(fields)} columns where the header has {len(header)}"
        elif empty := [header[column] for column in sentence_columns if not fields[column].strip()]:
            problem = f"empty {empty[0]}"
        if problem is None:
            value = None if label is None else label_of(f"{path}: line {number}", fields[label].strip(), layout)
            examples.append(Example(number, tuple(fields[column].strip() for column in sentence_columns), value))
        elif layout.ragged:
            incomplete += 1
        else:
            raise UserError(f"{path}: line {number}: {problem}; correct or remove the line")
    if incomplete:
        logger.warning("%s: left out %d incomplete lines", path, incomplete)
    if not examples:
        raise UserError(f"{path}: no examples; the file needs lines after its header")
    return examples


def check_labels(path: Path, labels: Sequence[Label | None]) -> None:
    """Raise UserError if all *labels* are the same, so that there is nothing to learn."""
    if len(set(labels)) < 2:
        raise UserError(
            f"{path}: all {len(labels)} examples have the same label; training needs at least two different ones"
        )


def labels_of(path: Path, layout: TableLayout) -> list[str]:
    """The different labels of a table, numbers by their value, other text by its characters.

    Raises:
        UserError: the table cannot be read, has fewer than two classes or more than
            :data:`MOST_CLASSES`, or a label is empty or has a comma, which separates ``--labels``.
    """
    header, rows = _table(path, layout)
    column = _column(path, header, layout.label)
    labels: set[str] = set()
    for number, fields in rows:
        label = fields[column].strip() if len(fields) > column else ""
        if not label or "," in label:
            problem = f"label {label[:80]!r} has a comma" if label else "no label"
            raise UserError(f"{path}: line {number}: {problem}; correct or remove the line")
        labels.add(label)
        if len(labels) > MOST_CLASSES:
            raise UserError(
                f"{path}: more than {MOST_CLASSES} different labels; numbers are learned with `regression_target`"
            )
    if len(labels) < 2:
        fault = f"all examples have the label {next(iter(labels))!r}" if labels else "no examples"
        raise UserError(f"{path}: {fault}; training needs at least two different ones")
    try:
        # By value: as text "10" would come before "2", and a scale would lose its order. Equal
        # values, as "1" and "1.0", by their text: the order of a set differs between processes.
        return sorted(sorted(labels), key=float)
    except ValueError:
        return sorted(labels)


def read_lines(path: Path) -> list[str]:
    """The lines of a file; UserError if it cannot be read, is empty or not UTF-8."""
    text = decoded(read_named(path, "check DATA and the name of the split"), path, "convert the file")
    if not text.strip():
        raise UserError(f"{path}: empty file; make or download it again")
    # Not splitlines, which would also divide at separators that sentences contain.
    return text.replace("\r\n", "\n").rstrip("\n").split("\n")


def _table(path: Path, layout: TableLayout) -> tuple[Sequence[str], list[tuple[int, list[str]]]]:
    """The names of the columns, and the number of the line, from 1, and the fields of each row."""
    rows = [(number, line.split("\t")) for number, line in enumerate(read_lines(path), 1)]
    first = [field.strip() for field in rows[0][1]]
    # CoLA is published without a header line; copies of it may have one.
    if not layout.header or set(layout.sentences) <= set(first):
        return first, rows[1:]
    if len(first) < len(layout.header):
        raise UserError(
            f"{path}: line 1: {len(first)} columns; expected {len(layout.header)} ({', '.join(layout.header)})"
        )
    return layout.header, rows


def _column(path: Path, header: Sequence[str], name: str) -> int:
    if name in header:
        return header.index(name)
    raise UserError(f"{path}: no column {name!r}; the columns are {', '.join(header)[:200]}")


def label_of(where: str, text: str, layout: TableLayout) -> Label:
    """The number of the class *text*, or the scores;
    UserError, which begins with *where*, if it is neither."""
    if not layout.is_regression:
        if text not in layout.labels:
            raise UserError(f"{where}: label {text[:80]!r}: not one of {', '.join(layout.labels)}")
        return float(layout.labels.index(text))
    # `float` reads "nan" and "inf", too.
    with contextlib.suppress(ValueError):
        values = tuple(map(float, text.split()))
        if len(values) == layout.scores and all(map(math.isfinite, values)):
            return values if layout.scores > 1 else values[0]
    expected = "a number" if layout.scores == 1 else f"{layout.scores} numbers"
    raise UserError(f"{where}: label {text[:80]!r}: expected {expected}")
