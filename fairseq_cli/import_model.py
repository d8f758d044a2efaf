"""Bring a Transformer-XL from elsewhere: a folder with ``checkpoint.pt`` and ``dict.txt`` that all commands read."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq import checkpoint, options
from fairseq.checkpoint.foreign import hf_transfo_xl, pickled_module, transformer_xl
from fairseq.checkpoint.foreign.named_tensors import cut
from fairseq.data.dictionary import Dictionary, placeholder
from fairseq.errors import UserError
from fairseq.files import atomic_folder
from fairseq.tasks.loading import load_models

CHECKPOINT, DICTIONARY = "checkpoint.pt", "dict.txt"
ROLES = {"eos": ("<eos>", "</s>", "<S>"), "unk": ("<unk>", "<UNK>"), "pad": ("<pad>",)}  # what vocabularies call them


def main(args: argparse.Namespace) -> None:
    """Write the model of ``args.source`` to the folder ``args.out``.

    Raises:
        UserError: the source is no such model or cannot be read, or the folder cannot be written; it stays as it was.
    """
    source, out = Path(args.source), Path(args.out)
    _check(source, out)
    words: list[str] | None = None
    eos: int | None = None
    if args.source_format == "hf-transfo-xl":
        if args.config_file is not None:
            raise UserError("--config: a Hugging Face folder has its own config.json; leave it out")
        model, settings = hf_transfo_xl.read(source)
        words, eos = hf_transfo_xl.vocabulary(source), hf_transfo_xl.eos(source)
    else:
        model, settings = _authors_model(source, args.config_file)
    dictionary = _dictionary(_vocabulary_size(model), words, eos, source)
    state = {"args": settings, "model": model, "optimizer_history": [], "extra_state": {}}
    with atomic_folder(out, (DICTIONARY, CHECKPOINT), "--out") as folder:
        checkpoint.save(folder / CHECKPOINT, state)
        dictionary.save(folder / DICTIONARY)
        load_models([folder / CHECKPOINT], folder / DICTIONARY)
    kind = "its own words" if words is not None else "placeholder words"
    parameters = sum({value.data_ptr(): value.numel() for value in model.values()}.values())
    print(f"{source}: {settings['n_layer']} layers, {parameters:,} parameters, {len(dictionary):,} words")
    print(f"Wrote {out / CHECKPOINT} and {out / DICTIONARY} ({kind})")


def _check(source: Path, out: Path) -> None:
    """Refuse what cannot work before any work is done."""
    if not source.exists():
        raise UserError(f"{source}: no such file or folder; check the path")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; give a new folder")
    try:
        there = sorted(set(os.listdir(out)) - {CHECKPOINT, DICTIONARY}) if out.exists() else []
    except OSError as error:
        raise UserError(f"--out {out}: cannot be read ({error.strerror}); give another folder") from None
    if there:
        raise UserError(f"--out {out}: has other files in it ({there[0]}); give a new folder")


def _authors_model(source: Path, config_file: str | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The authors' model at *source*; settings in *config_file* win over those that the file has."""
    state, own = pickled_module.read(source)
    if own is None and config_file is None:
        raise UserError(f"{source}: is a state dict, which does not tell the model's settings; give --config FILE.json")
    given = hf_transfo_xl.read_json(Path(config_file)) if config_file is not None else {}
    return transformer_xl.convert(state, {**(own or {}), **given}, str(source))


def _vocabulary_size(model: dict[str, Tensor]) -> int:
    tables = (value for name, value in model.items() if "embed_tokens" in name and name.endswith(".0.weight"))
    return sum(table.size(0) for table in tables)


def _dictionary(size: int, words: Sequence[str] | None, eos: int | None, source: Path) -> Dictionary:
    """Words with the ids of the source; ``token0``, ``token1``, … where it has none that text could hold.

    The end of a line is the word that is usually called so, else id *eos*, else id 0, as in the authors' vocabularies.
    """
    if words is None:
        words = [""] * size
    if len(words) != size:
        raise UserError(f"{source}: its vocabulary has {len(words)} words, its model {size}; use the model's own")
    if eos is not None and not 0 <= eos < size:
        raise UserError(f"{source}: eos_token_id is {cut(eos)}, but there are {size} words; correct config.json")
    taken = set(words)
    symbols: list[str] = []
    seen: set[str] = set()
    for index, word in enumerate(words):
        if not _is_word(word) or word in seen:
            word = placeholder(index)
            while word in taken:
                word += "_"
        seen.add(word)
        symbols.append(word)
    roles = {role: name for role, names in ROLES.items() for name in reversed(names) if name in seen}
    roles.setdefault("eos", symbols[eos or 0])
    return Dictionary.of_listed(symbols, roles)


def _is_word(word: str) -> bool:
    """Whether splitting a text at white space can give *word*."""
    return word.split() == [word] and not any("\ud800" <= letter <= "\udfff" for letter in word)


def cli_main() -> None:
    """``fairseq-import``."""
    options.run_command(main, options.get_import_parser)


if __name__ == "__main__":
    cli_main()
