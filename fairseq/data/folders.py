"""Data folders: one dictionary; splits in one or several files, in one or several folders."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from fairseq.data.dictionary import Dictionary
from fairseq.data.indexed_dataset import IndexedCorpus, JoinedCorpus
from fairseq.errors import UserError


def data_folders(data: str | Path) -> list[Path]:
    """Return the folders of ``DATA`` or ``DATA1:DATA2:…``, one for each epoch of training in turn."""
    names = os.fspath(data)
    return [Path(names)] if Path(names).exists() else [Path(name) for name in names.split(":") if name]


def load_dictionary(data: str | Path) -> Dictionary:
    """Return the common dictionary of all folders of *data*.

    Raises:
        UserError: a folder or its ``dict.txt`` is missing, or the dictionaries differ.
    """
    folders = data_folders(data)
    for folder in folders or [Path(data)]:
        if folder.is_file():
            raise UserError(f"{folder}: is a file; give the folder that fairseq-preprocess wrote")
        if folder.is_dir() and not (folder / "dict.txt").exists():
            raise UserError(f"{folder}/dict.txt: file not found; give the folder that fairseq-preprocess wrote")
        if not folder.is_dir():
            raise UserError(f"{folder}: folder not found; make it with fairseq-preprocess --destdir {folder}")
    first, *others = (Dictionary.load(str(folder / "dict.txt")) for folder in folders)
    for folder, dictionary in zip(folders[1:], others, strict=True):
        if dictionary != first:
            raise UserError(
                f"{dictionary.path}: differs from that of {folders[0]}; preprocess {folder} with --srcdict {first.path}"
            )
    return first


def corpus_prefixes(folder: str | Path, split: str, *, combine: bool) -> list[str]:
    """Return the paths of a split's files without ``.bin`` and ``.idx``.

    Args:
        folder: data folder.
        split: e.g. ``train``.
        combine: also ``train1``, ``train2``, …, up to the first missing number.
    """
    prefix = os.path.join(folder, split)
    if not combine:
        return [prefix]
    further = (f"{prefix}{number}" for number in itertools.count(1))
    return [prefix, *itertools.takewhile(lambda path: os.path.exists(f"{path}.idx"), further)]


def open_corpus(
    folder: str | Path, split: str, dictionary: Dictionary, *, combine: bool = False
) -> IndexedCorpus | JoinedCorpus:
    """Return the tokens of a split, left in their files; see :func:`corpus_prefixes`.

    Raises:
        UserError: files are missing or damaged, or were made with another dictionary.
    """
    there = sorted(path.stem for path in Path(folder).glob("*.idx"))
    if there and split not in there:
        raise UserError(f"{folder}/{split}.idx: file not found; the splits in this folder are {', '.join(there)}")
    parts = [IndexedCorpus(prefix) for prefix in corpus_prefixes(folder, split, combine=combine)]
    for part in parts:
        part.check(dictionary)
    return parts[0] if len(parts) == 1 else JoinedCorpus(parts)
