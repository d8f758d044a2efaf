"""From text to a dictionary and binary corpora; and to symbols only, and back."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from fairseq.config.command_settings import PreprocessConfig, TokenizeConfig
from fairseq.config.fields import format_value
from fairseq.config.registry import BPES
from fairseq.data.binarizer import Binarizer, splitters
from fairseq.data.folders import load_dictionary
from fairseq.errors import UserError, with_flags
from fairseq.notes.spans import mark_texts
from fairseq.notes.words import NoteWords
from fairseq.system import checksums
from fairseq.system.files import atomic_file, atomic_folder, prepare_file
from fairseq.system.opening import read_named
from fairseq.system.terminal import printable
from fairseq.system.workers import Workers
from fairseq.text.counting import count_words
from fairseq.text.dictionary import Dictionary
from fairseq.text.held_out import split_text
from fairseq.text.raw_text import STDIN, TextFormat, check_raw, format_of, lines_of, read_blocks
from fairseq.text.text_corpus import TextReader
from fairseq.text.text_hints import raw_text, wrapped_at
from fairseq.text.tokenization import (
    TokenizeBlock,
    TokenizedText,
    learn_subwords,
    save_counts,
    tokenize_file,
    tokenize_stream,
    tokenized_texts,
    useful_workers,
)
from fairseq.text.tokenizers import TOKENIZATION, Tokenizer, find_tokenizer
from fairseq.text.tokenizers.rules import SubwordMarks
from fairseq.text.tokenizers.tokenizer import chosen_subwords, chosen_words

LOG = "preprocess.log"
TEXTS = "texts: "  # begins the line of the log with the text of each split, as JSON


def preprocess(config: PreprocessConfig) -> None:
    """Write ``dict.txt`` and ``.bin`` and ``.idx`` of each split to ``destdir``: all, or none.

    With ``tokenizer`` or ``bpe`` the text is raw; ``tokenization.json`` then holds what turned it
    into symbols, and ``SPLIT.raw.json`` the size of the raw text. With ``source_lang`` xx the text
    is read from ``PREF.xx``; output names do not change.

    ``preprocess.log`` has the settings and the output of every run that wrote to the folder; the
    last line names it.
    """
    splits = _splits(config)
    _check(config, splits)
    config = dataclasses.replace(config, workers=useful_workers(config.workers, splits.values()))
    texts_line = TEXTS + json.dumps(_sources(config, splits))
    for hint in _hints(config, next(iter(splits.values()), None)):
        print(f"note: {printable(with_flags(hint))}", file=sys.stderr)
    say = _Log(config.source_lang)
    with (
        atomic_folder(config.destdir, flag="`destdir`", last="dict.txt") as folder,
        tempfile.TemporaryDirectory(dir=folder) as parts,
    ):
        splits, sources = _held_out(config, splits, parts, say)
        former = _former_log(Path(config.destdir))
        tokenizer = _tokenizer(config, splits, folder, say)
        # A dictionary is learned from the training text alone.
        read = {name: path for name, path in splits.items() if not config.dict_only or name.startswith("train")}
        with (
            tokenized_texts(read, tokenizer, config, config.workers, folder) as texts,
            splitters(config.workers) as pool,
        ):
            tokens: dict[str, tuple[int, str]] = {}
            if config.srcdict is not None:
                dictionary = Dictionary.load(config.srcdict)
            else:
                counter = count_words(_training_texts(texts), config.workers)
                dictionary = _learn_dictionary(config, counter, tokenizer)
            _check_other_splits(config, dictionary, splits)
            for hint in _other_shards(config, splits):
                say(hint)
            few = ": the text has no more" if config.learn_bpe and len(dictionary) < config.learn_bpe else ""
            say(f"Dictionary: {len(dictionary)} types{few}")
            dictionary.save(folder / "dict.txt")
            if not config.dict_only:
                if config.notes:
                    _write_notes(config, dictionary, tokenizer, texts, folder, say)
                binarizer = Binarizer(dictionary, pool, tokenizer is not None)
                for name, text in texts.items():
                    largest = _binarize(binarizer, text, sources[name], folder / name, dictionary, say)
                    tokens[f"{name}.bin"] = largest, dictionary.digest()
        if tokenizer is not None:
            tokenizer.save(folder, dictionary.symbols)
        checksums.record(folder, Path(config.destdir), tokens)
        end = f"Wrote preprocessed data to {config.destdir}"
        settings = ", ".join(f"{name}={format_value(value)}" for name, value in sorted(vars(config).items()))
        log = "\n".join([f"settings: {settings}", texts_line, *say.lines, end, ""])
        # Names of files, which need not be UTF-8, are written as they are.
        (folder / LOG).write_bytes(former + log.encode(errors="surrogateescape"))
    if tokenizer is None:
        # Only now that the new files are there: a run that fails leaves what it found.
        _remove_former(Path(config.destdir), dictionary, splits)
    print(end)


class _Log:
    """Prints lines, with the language of the text before them, and keeps them as *lines*."""

    def __init__(self, language: str | None) -> None:
        self.lines: list[str] = []
        self._prefix = f"[{language}] " if language else ""

    def __call__(self, text: str) -> None:
        self.lines.append(self._prefix + with_flags(text))
        print(self.lines[-1], flush=True)


def _former_log(folder: Path) -> bytes:
    """The log of earlier runs in *folder*, which fairseq adds to, too."""
    return read_named(folder / LOG, "remove it", "`destdir`") if os.path.exists(folder / LOG) else b""


def _check_former(config: PreprocessConfig, splits: Mapping[str, str]) -> None:
    """Raise UserError if ``destdir`` has a split of another text than this run's: a model may
    have been trained on it.

    The same text is preprocessed again without a question, also with other settings, but not as
    whole words in place of a tokenizer's symbols: then a flag was forgotten.
    """
    folder = Path(config.destdir)
    if config.overwrite:
        return
    former: dict[str, str] = {}
    for line in _former_log(folder).decode(errors="surrogateescape").splitlines():
        if line.startswith(TEXTS):
            with contextlib.suppress(ValueError, TypeError):
                former |= json.loads(line.removeprefix(TEXTS))
    for name, path in _sources(config, splits).items():
        if os.path.exists(folder / f"{name}.idx") and former.get(name) != path:
            there = former.get(name, "an unknown text")
            raise UserError(
                f"`destdir` {folder}: its {name} split is of {there}, not of {path}; give another `destdir`, or "
                "`overwrite` to replace it"
            )
    if config.tokenizer is None and config.bpe is None and config.srcdict is None and (folder / TOKENIZATION).exists():
        raise UserError(
            f"`destdir` {folder}: was made with a tokenizer; give its flags again, such as `learn_bpe`, another "
            "`destdir`, or `overwrite` to replace it by whole words"
        )


def _sources(config: PreprocessConfig, splits: Mapping[str, str]) -> dict[str, str]:
    """The text of each split that is written; a part that is held out is of the training text."""
    if config.dict_only:
        return {}
    sources = dict(splits)
    if shares := _shares(config):
        others = {name: path for name, path in splits.items() if not name.startswith("train")}
        sources = {**others, **dict.fromkeys(("train", *shares), str(config.trainpref))}
    # Other folders may have texts of the same names.
    return {name: ",".join(map(os.path.abspath, texts.split(","))) for name, texts in sources.items()}


def _hints(config: PreprocessConfig, path: str | None) -> Iterator[str]:
    """Hints on the text *path*, from its beginning, that flags are missing."""
    if path is None:
        return
    form = format_of(path, config.text_field, config.join_lines)
    try:
        lines = next((lines_of(block, form) for block in read_blocks(path, form)), [])
    # Reported where the text is read.
    except UserError:
        return
    width = None if config.join_lines or form.field is not None else wrapped_at(lines)
    if width is not None:
        yield f"{path}: looks hard-wrapped at {width} characters; `join_lines` makes paragraphs of its lines"
    if config.tokenizer is None and config.bpe is None and config.srcdict is None and (sign := raw_text(lines)):
        yield f"{path}: looks like raw text ({sign}); `bpe` hf `learn_bpe` 6000 makes subwords of it"


def _check_other_splits(config: PreprocessConfig, dictionary: Dictionary, splits: Iterable[str]) -> None:
    """Raise UserError if ``destdir`` keeps splits with ids of another dictionary."""
    folder = Path(config.destdir)
    others = sorted({path.stem for path in folder.glob("*.idx")} - set([] if config.dict_only else splits))
    # The former ids would silently mean other words: a later run would train on noise.
    if others and os.path.isfile(folder / "dict.txt") and Dictionary.load(folder / "dict.txt") != dictionary:
        raise UserError(
            f"`destdir` {folder}: {', '.join(others)} in it use another dictionary; "
            f"give all texts, `srcdict` {folder}/dict.txt or another folder"
        )


def _other_shards(config: PreprocessConfig, splits: Iterable[str]) -> Iterator[str]:
    """Warnings of shards of an earlier run in ``destdir``,
    which are read as one split with this run's."""
    there = [] if config.dict_only else sorted(path.stem for path in Path(config.destdir).glob("*.idx"))
    for name in set(splits):
        shards = [other for other in there if re.fullmatch(rf"{name}[1-9]\d*", other) and other not in splits]
        if shards:
            yield (
                f"warning: {', '.join(shards)} in {config.destdir} are of an earlier run and are read with {name}; "
                "remove them, or give another `destdir`"
            )


def _remove_former(folder: Path, dictionary: Dictionary, splits: Iterable[str]) -> None:
    """Remove what an earlier run recorded of raw text in *folder*: this run's text was tokens."""
    for split in splits:
        (folder / f"{split}.raw.json").unlink(missing_ok=True)
    try:
        find_tokenizer(folder, dictionary.symbols)
    except UserError:  # of the former dictionary
        (folder / TOKENIZATION).unlink()


def _splits(config: PreprocessConfig) -> dict[str, str]:
    """The text file of each split: train, train1, …, valid, …, test, …"""
    splits: dict[str, str] = {}
    for name in ("train", "valid", "test"):
        given = getattr(config, f"{name}pref")
        paths: list[str] = []
        for prefix in given.split(",") if given is not None else []:
            if not prefix:
                raise UserError(f"`{name}pref` {given}: empty file name; give FILE or FILE,FILE")
            paths += _files(prefix if config.source_lang is None else f"{prefix}.{config.source_lang}")
        splits |= {f"{name}{number or ''}": path for number, path in enumerate(paths)}
    return splits


def _files(path: str) -> list[str]:
    """The texts that *path* names: a file itself, or the files of a folder or a pattern such as
    ``*.txt``, sorted by name."""
    if os.path.isdir(path):
        found = [str(file) for file in Path(path).rglob("*") if not file.name.startswith(".")]
    elif not os.path.lexists(path) and glob.escape(path) != path:
        found = glob.glob(path, recursive=True)
    else:
        return [path]
    files = sorted(file for file in found if os.path.isfile(file))
    if not files:
        raise UserError(f"{path}: no files there; give a text file, a folder of them, or a pattern such as *.txt")
    return files


def _held_out(
    config: PreprocessConfig, splits: dict[str, str], folder: str, say: _Log
) -> tuple[dict[str, str], dict[str, str]]:
    """The text of each split, with the parts that are held out
    as files in *folder*; and what to call each."""
    shares = _shares(config)
    if not shares:
        return splits, splits
    texts = [path for name, path in splits.items() if name.startswith("train")]
    forms = {format_of(path, config.text_field, config.join_lines) for path in texts}
    if len(forms) > 1:
        flags = ", ".join(f"`{name}_fraction`" for name in shares)
        raise UserError(f"{flags}: some texts have rows and others lines; give texts of one kind")
    parts = split_text(texts, forms.pop(), shares, folder)
    names = {name: f"{config.trainpref}, {part.place}" for name, part in parts.items()}
    for name in parts:
        say(f"{name}: {names[name]}")
    others = {name: path for name, path in splits.items() if not name.startswith("train")}
    return {**{name: part.path for name, part in parts.items()}, **others}, {**others, **names}


def _shares(config: PreprocessConfig) -> dict[str, float]:
    """The share of the training text that each other split is made of."""
    shares = {"valid": config.valid_fraction, "test": config.test_fraction}
    return {name: share for name, share in shares.items() if share is not None}


def _check_shares(config: PreprocessConfig) -> None:
    """Raise UserError unless one training text can be cut into what is asked for."""
    shares = _shares(config)
    for name, share in shares.items():
        flag = f"`{name}_fraction` {share:g}"
        if getattr(config, f"{name}pref") is not None:
            raise UserError(f"{flag}: the {name} split has a text of its own; leave this or `{name}pref` out")
        if config.trainpref is None:
            raise UserError(f"{flag}: is cut from the end of the training text; give `trainpref`")
        if config.dict_only:
            raise UserError(f"{flag}: no split is written with `dict_only`; leave one of them out")
    if sum(shares.values()) >= 1:
        raise UserError(f"`valid_fraction` {config.valid_fraction:g}: nothing is left to train on; lower it")


def _check(config: PreprocessConfig, splits: dict[str, str]) -> None:
    """Raise UserError for invalid settings before any work is done."""
    if config.srcdict is not None and (config.thresholdsrc > 0 or config.nwordssrc > 0):
        raise UserError("`srcdict`: the dictionary is not changed; leave out `thresholdsrc` and `nwordssrc`")
    if config.srcdict is None and config.trainpref is None:
        raise UserError("`trainpref` or `srcdict`: give one of them, a training text or a dictionary")
    _check_notes(config)
    _check_subwords(config)
    _check_shares(config)
    if not splits and not config.dict_only:
        raise UserError("`trainpref`, `validpref`, `testpref`: give at least one text")
    for path in splits.values():
        check_raw(path)
    _check_former(config, splits)


def _check_notes(config: PreprocessConfig) -> None:
    if not config.notes:
        for name in ("note_min_count", "note_max_count"):
            if getattr(config, name) != getattr(PreprocessConfig, name):
                raise UserError(f"`{name}`: only `notes` counts rare words; add it, or leave this out")
        return
    if config.trainpref is None or config.dict_only:
        raise UserError("`notes`: rare words are counted in the training text; give `trainpref`, without `dict_only`")
    if config.note_min_count > config.note_max_count:
        raise UserError(
            f"`note_min_count` {config.note_min_count}: is above `note_max_count` {config.note_max_count}; "
            "lower one or raise the other"
        )


def _check_subwords(config: PreprocessConfig) -> None:
    """Raise UserError unless exactly one flag says where the codes of ``bpe`` come from."""
    if config.bpe is None:
        return
    if (config.bpe_codes is None) == (config.learn_bpe is None):
        raise UserError(f"`bpe` {config.bpe}: give either `bpe_codes` FILE, or `learn_bpe` N to learn its codes")
    if config.learn_bpe is not None and (config.trainpref is None or config.srcdict is not None):
        raise UserError("`learn_bpe`: codes and dictionary are of the training text; give `trainpref`, not `srcdict`")


def _tokenizer(config: PreprocessConfig, splits: Mapping[str, str], folder: Path, say: _Log) -> Tokenizer | None:
    """The tokenizer of the flags, its codes learned if need be,
    or ``srcdict``'s; None: the text is tokens."""
    words, subwords = chosen_words(config), chosen_subwords(config)
    if config.bpe is not None and config.learn_bpe is not None:
        training = [path for name, path in splits.items() if name.startswith("train")]
        say(f"Learning {config.learn_bpe} subwords")
        kind = BPES[config.bpe]
        subwords = learn_subwords(kind, config.learn_bpe, words, training, config, config.workers, folder)
        subwords.check()
    chosen = Tokenizer(words, subwords) if words is not None or subwords is not None else None
    if config.srcdict is None:
        return chosen
    dictionary = Dictionary.load(config.srcdict)
    stored = find_tokenizer(config.srcdict, dictionary.symbols)
    if stored is not None and chosen not in (None, stored):
        raise UserError(
            f"`srcdict` {config.srcdict}: has a tokenizer ({stored}), which the flags differ from; leave them out"
        )
    found = stored or chosen
    # The tokenizer of a model from elsewhere reads `<unk>` as its library does.
    if found is not None and TextReader(dictionary, found).keeps_lines:
        return dataclasses.replace(found, reads_unknown=False)
    return found


def _training_texts(texts: Mapping[str, TokenizedText]) -> list[str]:
    return [text.path for name, text in texts.items() if name.startswith("train")]


def _learn_dictionary(config: PreprocessConfig, counter: Counter[str], tokenizer: Tokenizer | None) -> Dictionary:
    """A dictionary of all counted words and the symbols that were learned."""
    if not counter:
        raise UserError(f"`trainpref` {config.trainpref}: the text is empty; give a file with at least one word")
    if config.learn_bpe is not None and tokenizer is not None and tokenizer.subwords is not None:
        # Other texts may have symbols that the training text lacks.
        counter.update(dict.fromkeys(tokenizer.subwords.symbols, 0))
    dictionary = Dictionary()
    dictionary.update(counter)
    dictionary.finalize(config.thresholdsrc, config.nwordssrc, config.padding_factor)
    if not any(dictionary.count[dictionary.nspecial :]):
        most, rarest = max(counter.values()), config.thresholdsrc
        if rarest > most:
            raise UserError(f"`thresholdsrc` {rarest}: leaves no words; the most frequent occurs {most} times")
        raise UserError(f"`nwordssrc` {config.nwordssrc}: leaves no words; {dictionary.nspecial} symbols are special")
    return dictionary


def _write_notes(
    config: PreprocessConfig,
    dictionary: Dictionary,
    tokenizer: Tokenizer | None,
    texts: Mapping[str, TokenizedText],
    folder: Path,
    say: _Log,
) -> None:
    """Write the words that have notes, and where they are in each text."""
    rule = tokenizer.rule if tokenizer is not None else SubwordMarks()
    # Counted again, in words: the dictionary counts subwords, and a rare word is several of these.
    counter = count_words(_training_texts(texts), config.workers, rule)
    notes = NoteWords.choose(counter, config.note_min_count, config.note_max_count, dictionary)
    notes.save(folder)
    say(f"Notes: {len(notes)} words, {sum(notes.counts)} occurrences in the training text")
    mark_texts({folder / name: text.path for name, text in texts.items()}, notes, dictionary, rule, config.workers)


def _binarize(
    binarizer: Binarizer, text: TokenizedText, source: str, prefix: Path, dictionary: Dictionary, say: _Log
) -> int:
    """Write the ids of a text, whose name is *source*, and say how many of its words *dictionary*
    does not know; return the largest id."""
    summary = binarizer.binarize(text.path, prefix)
    share = float(f"{100 * summary.replaced / summary.tokens:.3g}")
    sizes = f"{summary.sentences} sents, {summary.tokens} tokens"
    say(f"{source}: {sizes}, {share}% replaced by {dictionary.unk_word}")
    if text.counts is not None:
        save_counts(prefix, text.counts)
        say(f"{source}: {text.counts.words} words, {text.counts.bytes} bytes of raw text")
    if summary.padding:
        say(
            f"{source}: {summary.padding} of these words are {dictionary.pad_word}, which stands for padding in rows "
            "and not for a word of the text"
        )
    return summary.largest


# ---- text to symbols, and back -----------------------------------------------------------------


def tokenize(text: str, config: TokenizeConfig) -> None:
    """Write a line of symbols for each line of the file *text* (``-``: stdin), or with ``undo`` of
    text for each line of symbols."""
    if config.output is not None:
        prepare_file("`output`", config.output, {"TEXT": text, "`bpe_codes`": config.bpe_codes})
    tokenizer = _tokenizer_of(config)
    count = useful_workers(config.workers, None if text == STDIN else [text])
    with Workers(TokenizeBlock(tokenizer, config.undo), count) as workers, _output(config) as out:
        if text == STDIN:
            tokenize_stream(sys.stdin.buffer, TextFormat(join_lines=config.join_lines), workers, out)
        else:
            form = TextFormat() if config.undo else format_of(text, config.text_field, config.join_lines)
            tokenize_file(text, form, workers, out)


def _tokenizer_of(config: TokenizeConfig) -> Tokenizer:
    """The tokenizer of ``data``, or of the other settings."""
    words, subwords = chosen_words(config), chosen_subwords(config)
    if config.bpe is not None and subwords is None:
        raise UserError(f"`bpe` {config.bpe}: needs its codes; add `bpe_codes` FILE")
    if config.data is None:
        if words is None and subwords is None:
            raise UserError("`data` or `tokenizer`, `bpe`: give a data folder with a tokenizer, or the kind of one")
        return Tokenizer(words, subwords)
    if words is not None or subwords is not None:
        raise UserError(f"`data` {config.data}: has a tokenizer of its own; leave out `tokenizer` and `bpe`")
    dictionary = load_dictionary(config.data)
    tokenizer = find_tokenizer(dictionary.path or config.data, dictionary.symbols)
    if tokenizer is None:
        raise UserError(f"`data` {config.data}: has no tokenizer; give `tokenizer` or `bpe`")
    return tokenizer


@contextlib.contextmanager
def _output(config: TokenizeConfig) -> Iterator[BinaryIO]:
    if config.output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    else:
        with atomic_file(Path(config.output), "`output`") as file:
            yield file
