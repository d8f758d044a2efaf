"""Classify new text with a fine-tuned model: lines of stdin or of a file, or the rows of a
table."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from typing import BinaryIO

from fairseq.errors import UserError
from fairseq.evaluation.classifier import Prediction, SentenceClassifier
from fairseq.system.opening import read_errors
from fairseq.text.raw_text import STDIN, lines_as_they_arrive, no_words, text_line

DIGITS = 6  # of probabilities and scores, after the point


def classify_lines(
    checkpoint: str,
    path: str,
    data: str | None = None,
    form: str = "json",
    batch_size: int = 32,
    device: str = "auto",
) -> None:
    """Print a prediction for each line of the file *path*, or of stdin if it is ``-``.

    Args:
        checkpoint: of fairseq-finetune.
        data: data folder or ``dict.txt``; None: next to the checkpoint.
        form: ``json``, or ``tsv`` for a table with a column for each class.
    """
    with _opened(path) as file:
        classifier = SentenceClassifier.from_pretrained(checkpoint, data, device=device)
        # A terminal is answered line by line.
        together = 1 if file.isatty() else batch_size
        write = _write_json if form == "json" else _write_row
        if form == "tsv":
            names = ["text", "text_pair"][: 1 + classifier.takes_pairs]
            print(*names, *(["label", *classifier.labels] if classifier.labels else ["score"]), sep="\t")
        # Batches are taken as they arrive: a pipe may never end,
        # and a file may be larger than memory.
        texts = _texts(file, path, classifier.task.layout.sentences)
        while chunk := list(itertools.islice(texts, together)):
            inputs = [text if len(text) == 2 else text[0] for text in chunk]
            for text, prediction in zip(chunk, classifier.classify(inputs, batch_size), strict=True):
                write(text, prediction)
            sys.stdout.flush()


def _opened(path: str) -> contextlib.AbstractContextManager[BinaryIO]:
    if path == STDIN:
        return contextlib.nullcontext(sys.stdin.buffer)
    with read_errors(path, "give another file"):
        return open(path, "rb")


def _texts(file: BinaryIO, path: str, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The sentences of each line; a first line
    with the columns *names* is the header of a table."""
    where = "stdin" if path == STDIN else path
    # Without columns a line is one text, in which a tab is white space.
    columns = [0, 1] if len(names) == 2 else []
    number = 0
    for number, line in enumerate(lines_as_they_arrive(where, file), 1):
        text = text_line(line, number, where).rstrip("\r\n")
        fields = [field.strip() for field in text.split("\t")]
        if number == 1 and set(names) <= set(fields):
            # Other columns of a table, such as the index of GLUE, are skipped.
            columns = [fields.index(name) for name in names]
        elif not columns:
            yield (text.replace("\t", " "),)
        elif len(fields) <= max(columns):
            expected = " and ".join(names)
            raise UserError(f"{where}: line {number}: {len(fields)} columns; expected {expected}, separated by a tab")
        else:
            yield tuple(fields[column] for column in columns)
    # A pipe may have nothing to say; a file without a line is a mistake.
    if not number and path != STDIN:
        raise no_words(path)


def _write_json(text: tuple[str, ...], prediction: Prediction) -> None:
    values = dict(zip(("text", "text_pair"), text, strict=False))
    if prediction.label is None:
        entry: dict[str, object] = {"score": round(prediction.score, DIGITS)}
    else:
        entry = {"label": prediction.label, "probability": round(prediction.score, DIGITS)}
        entry["probabilities"] = {name: round(value, DIGITS) for name, value in prediction.probabilities.items()}
    print(json.dumps({**values, **entry}, ensure_ascii=False))


def _write_row(text: tuple[str, ...], prediction: Prediction) -> None:
    # A tab or a line feed inside of a text would shift the columns.
    cells = [" ".join(sentence.split()) for sentence in text]
    if prediction.label is None:
        cells.append(f"{prediction.score:.{DIGITS}f}")
    else:
        cells += [prediction.label, *(f"{value:.{DIGITS}f}" for value in prediction.probabilities.values())]
    print(*cells, sep="\t")
