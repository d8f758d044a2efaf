"""Data folders: one dictionary; splits in one or several files, in one or several folders.

Training reads ``train``, ``train1``, ``train2``, … as one corpus, mapped into memory.
``DATA1:DATA2`` reads folder (epoch − 1) mod n (:class:`fairseq.data.iterator.EpochDatasets`);
validation and evaluation read the first.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fairseq.data.indexed_dataset import IndexedCorpus, JoinedCorpus, token_count
from fairseq.errors import UserError
from fairseq.system import checksums
from fairseq.text.dictionary import Dictionary, read_dictionary
from fairseq.text.tokenizers import TOKENIZATION, read_tokenization


def data_folders(data: str | Path) -> list[Path]:
    """Return the folders of ``DATA`` or ``DATA1:DATA2:…``,
    one or more, for each epoch of training in turn."""
    names = os.fspath(data)
    if os.path.exists(names):
        return [Path(names)]
    return [Path(name) for name in names.split(":") if name] or [Path(names)]


def load_dictionary(data: str | Path, further: Iterable[Path] = ()) -> Dictionary:
    """Return the common dictionary of all folders of *data*, and of *further* ones.

    Raises:
        UserError: a folder or its ``dict.txt`` is missing, or the dictionaries or tokenizers
            differ, or a ``tokenization.json`` is damaged or was made for another dictionary.
    """
    folders = [*data_folders(data), *further]
    for folder in folders:
        if os.path.isfile(folder):
            raise UserError(f"{folder}: is a file; give the folder that fairseq-preprocess wrote")
        if os.path.isdir(folder) and not os.path.exists(folder / "dict.txt"):
            raise UserError(f"{folder}/dict.txt: file not found; give the folder that fairseq-preprocess wrote")
        if not os.path.isdir(folder):
            raise UserError(f"{folder}: folder not found; make it with fairseq-preprocess --destdir {folder}")
    first, *others = (folder / "dict.txt" for folder in folders)
    content = read_dictionary(first)
    dictionary = Dictionary.parse(content, first)
    tokenization = None
    # A link that leads nowhere is an error, not a missing tokenizer.
    if os.path.lexists(path := first.with_name(TOKENIZATION)):
        tokenization = read_tokenization(path, dictionary.symbols)[1]
    for path in others:
        other, again = read_dictionary(path), f"preprocess {path.parent} with `srcdict` {first}"
        # Most are copies: parsing each of thirty large
        # dictionaries would take longer than opening the data.
        if other != content and Dictionary.parse(other, path) != dictionary:
            raise UserError(f"{path}: differs from {first.parent}'s; {again}")
        # Symbols of text that was cut otherwise. A folder without the file was made from symbols.
        beside = path.with_name(TOKENIZATION)
        if tokenization and os.path.lexists(beside) and read_tokenization(beside)[1] != tokenization:
            raise UserError(f"{beside}: differs from {first.parent}'s; {again}")
    return dictionary


def corpus_prefixes(folder: str | Path, split: str, *, combine: bool) -> list[str]:
    """Return the paths of a split's files without ``.bin`` and ``.idx``.

    With *combine*, of ``train`` also ``train1``, ``train2``, …, up to the first missing number.
    """
    prefix = os.path.join(folder, split)
    if not combine:
        return [prefix]
    further = (f"{prefix}{number}" for number in itertools.count(1))
    return [prefix, *itertools.takewhile(lambda path: os.path.exists(f"{path}.idx"), further)]


def _splits(folder: str | Path) -> list[str]:
    """The splits of a folder; ``train.notes.idx`` belongs to ``train``."""
    return sorted(path.stem for path in Path(folder).glob("*.idx") if not path.stem.endswith(".notes"))


def check_split(folder: str | Path, split: str) -> None:
    """Raise UserError if a folder has no such split
    or its index is not one; the tokens are not read."""
    there = _splits(folder)
    if there and not os.path.exists(Path(folder, f"{split}.idx")):
        raise UserError(f"{folder}/{split}.idx: file not found; the splits in this folder are {', '.join(there)}")
    token_count(os.path.join(folder, split))


def check_validation(data: str | Path, valid_subset: str, leaves_out: bool) -> None:
    """Raise UserError, which says what to do, unless *data*
    from fairseq-preprocess has the splits of *valid_subset*.

    A split such as ``valid1`` that is in the folder must be named as well, unless *leaves_out*.
    Folders in which splits are not at the top, as tables of sentences, are left to their tasks.
    """
    folder = data_folders(data)[0]
    there = _splits(folder)
    splits = [split for name in valid_subset.split(",") if (split := name.strip())]
    missing = [split for split in splits if split not in there]
    if there and missing:
        raise UserError(
            f"{folder}/{missing[0]}.idx: file not found; the splits in this folder are {', '.join(there)}: hold out a "
            "part with fairseq-preprocess --valid-fraction 0.05, name a split with `valid_subset`, or give "
            "`disable_validation`"
        )
    if not leaves_out and (unread := unread_splits(folder, splits)):
        raise UserError(
            f"`valid_subset` {valid_subset}: leaves out {', '.join(unread)} of {folder}; name them, join them by "
            "`combine_valid_subsets`, or give `ignore_unused_valid_subsets`"
        )


def unread_splits(folder: str | Path, splits: Sequence[str]) -> list[str]:
    """The splits ``valid1``, ``valid2``, … of *folder* that are not among *splits*."""
    numbered = (path.stem for path in Path(folder).glob("valid*.bin") if re.fullmatch(r"valid\d+", path.stem))
    return sorted(set(numbered) - set(splits))


def open_corpus(
    folder: str | Path, split: str, dictionary: Dictionary | None, *, combine: bool = False
) -> IndexedCorpus | JoinedCorpus:
    """Return the tokens of a split, left in their files;
    see :func:`corpus_prefixes` and :meth:`IndexedCorpus.check`.

    Raises:
        UserError: files are missing or of another size than
            they were written with, or were made with another dictionary.
    """
    check_split(folder, split)
    recorded = checksums.recorded(folder)
    parts = [IndexedCorpus(prefix) for prefix in corpus_prefixes(folder, split, combine=combine)]
    for part in parts:
        part.check(dictionary, recorded)
    return parts[0] if len(parts) == 1 else JoinedCorpus(parts)


def check_data(folder: str | Path) -> list[str]:
    """Read every file of a data folder: compare its checksum, each token with the dictionary, and
    each line with the one before it.

    Returns:
        The names of the files with checksums, and of the splits.

    Raises:
        UserError: a file is damaged, missing or of another dictionary.
    """
    dictionary, recorded = load_dictionary(folder), checksums.recorded(folder)
    for name in recorded:
        checksums.check(os.path.join(folder, name))
    for split in _splits(folder):
        corpus = IndexedCorpus(os.path.join(folder, split))
        corpus.check(dictionary, recorded)
        corpus.check_tokens(dictionary)
        corpus.check_lines()
    return [*recorded, *_splits(folder)]
