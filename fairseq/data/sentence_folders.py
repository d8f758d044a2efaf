"""Sentences and labels in fairseq's layout: folders ``input0``, for pairs ``input1``, and ``label``
of binarised text.

Scores are text instead: ``label/SPLIT.label``, a number a line.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from fairseq.data.folders import open_corpus
from fairseq.data.glue import Label, TableLayout, label_of, read_lines
from fairseq.errors import UserError
from fairseq.text.dictionary import Dictionary

INPUTS = ("input0", "input1")


def input_folders(data: str | Path) -> list[Path]:
    """The folders of the first and the second sentences
    in *data*; empty if it has tables instead."""
    first, second = (Path(data) / name for name in INPUTS)
    return [first, second] if os.path.isdir(second) else [first] if os.path.isdir(first) else []


def check_sentences(data: str | Path) -> None:
    """Raise UserError unless *data* is a folder that has tables, or folders of sentences."""
    if not os.path.isdir(data):
        raise UserError(f"{data}: folder not found; check DATA")
    if not input_folders(data) and not any(Path(data).glob("*.tsv")):
        raise UserError(
            f"{data}: neither train.tsv nor {INPUTS[0]}; DATA has tables, or binarised {INPUTS[0]} and label"
        )


def classes_of(data: str | Path) -> list[str]:
    """The classes in the dictionary of the labels, by number.

    Raises:
        UserError: the dictionary cannot be read, or a class has a comma, which separates `labels`.
    """
    path = Path(data) / "label" / "dict.txt"
    classes = Dictionary.load(path).words()
    if commas := [name for name in classes if "," in name]:
        raise UserError(f"{path}: label {commas[0][:80]!r} has a comma; give it another name")
    return classes


def read_sentences(data: str | Path, split: str, dictionary: Dictionary) -> list[tuple[np.ndarray, ...]]:
    """The ids of each example's sentences, without the ends of their lines: int [tokens].

    Raises:
        UserError: a file is missing or damaged, or the folders differ in their number of lines.
    """
    columns = [_lines(folder, split, dictionary) for folder in input_folders(data)]
    _check_rows(f"{data}/{INPUTS[-1]}/{split}", len(columns[-1]), len(columns[0]))
    return list(zip(*columns, strict=True))


def read_labels(
    data: str | Path, split: str, layout: TableLayout, rows: int, labelled: bool = True
) -> list[Label | None]:
    """The number of the class, or the score, of each of *rows* examples.

    Args:
        labelled: whether there must be labels; otherwise all are None where there are none.

    Raises:
        UserError: a file is missing or damaged, or a label is invalid.
    """
    folder = Path(data) / "label"
    scores = folder / f"{split}.label"
    if not labelled and not os.path.exists(scores if layout.is_regression else folder / f"{split}.idx"):
        return [None] * rows
    if layout.is_regression:
        path, names = str(scores), read_lines(scores)
    else:
        path, dictionary = str(folder / split), Dictionary.load(folder / "dict.txt")
        names = [dictionary.string(line) for line in _lines(folder, split, dictionary)]
    _check_rows(path, len(names), rows)
    return [label_of(f"{path}: line {number}", name.strip(), layout) for number, name in enumerate(names, 1)]


def _lines(folder: Path, split: str, dictionary: Dictionary) -> list[np.ndarray]:
    corpus: Any = open_corpus(folder, split, dictionary)
    lines = np.split(corpus.tokens[:], corpus.offsets[1:-1])
    # Rows get their own `</s>`, one for each sentence; fairseq's files have one already.
    return [line[:-1] if len(line) and line[-1] == dictionary.eos() else line for line in lines]


def _check_rows(path: str, lines: int, rows: int) -> None:
    if lines != rows:
        raise UserError(f"{path}: {lines} lines where {INPUTS[0]} has {rows}; preprocess both from the same examples")
