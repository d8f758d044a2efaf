"""Classify new text with a fine-tuned encoder: lines of stdin or of a file, or the rows of a table."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from fairseq.config import options
from fairseq.config.command_settings import ClassifyConfig
from fairseq.config.fields import typed
from fairseq.errors import UserError, read_failure
from fairseq.evaluation.classifier import Prediction, SentenceClassifier
from fairseq.system.opening import open_input
from fairseq.system.terminal import log_to_stderr
from fairseq_cli.common import escape_what_stdout_lacks

DIGITS = 6  # of probabilities and scores, after the point


@dataclass(frozen=True)
class Columns:
    """The columns of a text's sentences; None: the line is a text without columns."""

    numbers: tuple[int, ...] | None
    names: tuple[str, ...]


def main(args: argparse.Namespace) -> None:
    """Print a prediction for each line of ``args.text``.

    Raises:
        UserError: the checkpoint, its dictionary or the text cannot be used.
    """
    cfg = typed(ClassifyConfig, args)
    device = "cpu" if cfg.cpu else "auto"
    with _opened(args.text) as file:
        classifier = SentenceClassifier.from_pretrained(args.checkpoint, cfg.data, device=device)
        together = 1 if file.isatty() else cfg.batch_size  # a terminal is answered line by line
        write = _json_writer() if cfg.format == "json" else _tsv_writer(classifier)
        texts = _texts(file, args.text, classifier.task.layout.sentences)
        while chunk := list(itertools.islice(texts, together)):
            inputs = [text if len(text) == 2 else text[0] for text in chunk]
            for text, prediction in zip(chunk, classifier.classify(inputs, cfg.batch_size), strict=True):
                write(text, prediction)
            sys.stdout.flush()


def _opened(path: str) -> contextlib.AbstractContextManager[BinaryIO]:
    if path == "-":
        if sys.stdin is None:
            raise UserError("stdin: is closed; give a file")
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        return open_input(path)
    except OSError as error:
        raise UserError(f"{path}: {read_failure(error)}; give another file") from None


def _texts(file: Iterable[bytes], path: str, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The sentences of each line; a first line with the columns *names* is the header of a table."""
    where = "stdin" if path == "-" else path
    columns: Columns | None = None
    for number, line in enumerate(file, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise UserError(f"{where}: line {number}: not UTF-8; convert it") from None
        fields = [field.strip() for field in text.split("\t")]
        if columns is None:
            columns = _columns(fields, names)
            if columns.numbers is not None and set(names) <= set(fields):
                continue
        yield _sentences(f"{where}: line {number}", text, fields, columns)


def _columns(first: list[str], names: tuple[str, ...]) -> Columns:
    """The columns of a file by its *first* line."""
    if set(names) <= set(first):
        return Columns(tuple(first.index(name) for name in names), names)
    return Columns((0, 1) if len(names) == 2 else None, names)


def _sentences(where: str, text: str, fields: list[str], columns: Columns) -> tuple[str, ...]:
    if columns.numbers is None:
        return (" ".join(text.split("\t")),)
    if len(fields) <= max(columns.numbers):
        expected = " and ".join(columns.names)
        raise UserError(f"{where}: {len(fields)} columns; expected {expected}, separated by a tab")
    return tuple(fields[number] for number in columns.numbers)


Write = Callable[[tuple[str, ...], Prediction], None]


def _json_writer() -> Write:
    def write(text: tuple[str, ...], prediction: Prediction) -> None:
        values = dict(zip(("text", "text_pair"), text, strict=False))
        if prediction.label is None:
            found: dict[str, object] = {"score": round(prediction.score, DIGITS)}
        else:
            found = {"label": prediction.label, "probability": round(prediction.score, DIGITS)}
            found["probabilities"] = {name: round(value, DIGITS) for name, value in prediction.probabilities.items()}
        print(json.dumps({**values, **found}, ensure_ascii=False))

    return write


def _tsv_writer(classifier: SentenceClassifier) -> Write:
    """A writer that has printed the names of the columns."""
    names = ["text", "text_pair"][: 1 + classifier.takes_pairs]
    print(*names, *(["label", *classifier.labels] if classifier.labels else ["score"]), sep="\t")

    def write(text: tuple[str, ...], prediction: Prediction) -> None:
        cells = [" ".join(sentence.split()) for sentence in text]
        if prediction.label is None:
            cells.append(f"{prediction.score:.{DIGITS}f}")
        else:
            cells += [prediction.label, *(f"{value:.{DIGITS}f}" for value in prediction.probabilities.values())]
        print(*cells, sep="\t")

    return write


def cli_main() -> None:
    """``fairseq-classify``."""
    log_to_stderr()
    escape_what_stdout_lacks()
    options.run_command(main, options.get_classify_parser)


if __name__ == "__main__":
    cli_main()
