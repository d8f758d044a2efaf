"""Build a dictionary from text and write binary corpora."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq.command_settings import PreprocessConfig
from fairseq.config import typed
from fairseq.data.binarizer import Binarizer, check_text, count_whole_words, count_words
from fairseq.data.dictionary import Dictionary
from fairseq.data.note_words import NoteWords
from fairseq.errors import UserError
from fairseq.files import atomic_folder
from fairseq.limits import check_processes


def main(args: argparse.Namespace) -> None:
    """Write ``dict.txt`` and ``.bin`` and ``.idx`` of each split to ``--destdir``: all files, or none.

    With ``--source-lang xx`` the text is read from ``PREF.xx``; output names do not change.

    Raises:
        UserError: a text or dictionary is invalid, flags are incompatible, or the folder cannot be written.
    """
    config = typed(PreprocessConfig, args)
    splits = _splits(config)
    _check(config, splits)
    dictionary = _dictionary(config, splits)
    print(f"{_language(config)}Dictionary: {len(dictionary)} types")
    with atomic_folder(config.destdir, flag="--destdir") as folder:
        dictionary.save(folder / "dict.txt")
        if not config.dict_only:
            _binarize(config, dictionary, splits, folder)
    print(f"Wrote preprocessed data to {config.destdir}")


def _splits(config: PreprocessConfig) -> dict[str, str]:
    """The text file of each split: train, train1, …, valid, …, test, …"""
    splits = {}
    for name in ("train", "valid", "test"):
        given = getattr(config, f"{name}pref")
        for number, prefix in enumerate(given.split(",") if given is not None else []):
            if not prefix:
                raise UserError(f"--{name}pref {given}: empty file name; give FILE or FILE,FILE")
            path = prefix if config.source_lang is None else f"{prefix}.{config.source_lang}"
            splits[f"{name}{number or ''}"] = path
    return splits


def _check(config: PreprocessConfig, splits: dict[str, str]) -> None:
    """Raise UserError for invalid settings before any work is done."""
    check_processes("--workers", config.workers)
    if config.srcdict is not None and (config.thresholdsrc > 0 or config.nwordssrc > 0):
        raise UserError("--srcdict: the dictionary is not changed; leave out --thresholdsrc and --nwordssrc")
    if config.srcdict is None and config.trainpref is None:
        raise UserError("--trainpref or --srcdict: give one of them, a training text or a dictionary")
    if config.notes:
        _check_notes(config)
    if not splits and not config.dict_only:
        raise UserError("--trainpref, --validpref, --testpref: give at least one text")
    for path in splits.values():
        check_text(path)


def _check_notes(config: PreprocessConfig) -> None:
    if config.trainpref is None or config.dict_only:
        raise UserError("--notes: rare words are counted in the training text; give --trainpref, without --dict-only")
    if config.note_min_count > config.note_max_count:
        raise UserError(
            f"--note-min-count {config.note_min_count}: is above --note-max-count {config.note_max_count}; "
            "lower one or raise the other"
        )


def _training_texts(splits: dict[str, str]) -> list[str]:
    return [path for name, path in splits.items() if name.startswith("train")]


def _dictionary(config: PreprocessConfig, splits: dict[str, str]) -> Dictionary:
    """The dictionary ``--srcdict``, or a new one from all training texts."""
    if config.srcdict is not None:
        return Dictionary.load(config.srcdict)
    counter = count_words(_training_texts(splits), config.workers)
    if not counter:
        raise UserError(f"--trainpref {config.trainpref}: the text is empty; give a file with at least one word")
    dictionary = Dictionary()
    dictionary.update(counter)
    dictionary.finalize(config.thresholdsrc, config.nwordssrc, config.padding_factor)
    return dictionary


def _binarize(config: PreprocessConfig, dictionary: Dictionary, splits: dict[str, str], folder: Path) -> None:
    notes = None
    if config.notes:
        counter = count_whole_words(_training_texts(splits), workers=config.workers)
        notes = NoteWords.choose(counter, config.note_min_count, config.note_max_count, dictionary)
        notes.save(folder)
        print(f"{_language(config)}Notes: {len(notes)} words, {sum(notes.counts)} occurrences in the training text")
    with Binarizer(dictionary, config.workers, notes) as binarizer:
        for name, path in splits.items():
            summary = binarizer.binarize(path, str(folder / name))
            share = float(f"{100 * summary.replaced / summary.tokens:.3g}")
            print(
                f"{_language(config)}{path}: {summary.sentences} sents, {summary.tokens} tokens, "
                f"{share}% replaced by {dictionary.unk_word}"
            )


def _language(config: PreprocessConfig) -> str:
    """Prefix of log lines: the language, if given."""
    return f"[{config.source_lang}] " if config.source_lang else ""


def cli_main() -> None:
    """``fairseq-preprocess``."""
    from fairseq import options

    options.run_command(main, options.get_preprocessing_parser)


if __name__ == "__main__":
    cli_main()
