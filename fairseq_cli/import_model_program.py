"""Import a foreign model as a folder with ``checkpoint.pt`` and ``dict.txt``, which all commands
read."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq import checkpoint
from fairseq.checkpoint.manager import DICTIONARY
from fairseq.errors import UserError
from fairseq.inference.loading import load_models
from fairseq.interop.hugging_face import causal, decoders, encoders, model_folder, transfo_xl
from fairseq.interop.hugging_face.causal_names import EMBEDDINGS
from fairseq.interop.pickles import pickled_module
from fairseq.interop.pickles.named_tensors import cut
from fairseq.interop.transformer_xl import conversion
from fairseq.system.files import atomic_folder, remove_leftovers
from fairseq.system.opening import read_named
from fairseq.tasks import dictionary_digest
from fairseq.text.dictionary import Dictionary, placeholder
from fairseq.text.tokenizers import TOKENIZATION, Tokenizer, find_tokenizer
from fairseq.text.tokenizers.hf import GPT2, HuggingFace

CHECKPOINT = "checkpoint.pt"
FILES = (DICTIONARY, TOKENIZATION, CHECKPOINT)
NAMES = {  # names of special symbols in vocabularies
    "bos": ("<s>", "[CLS]"),
    "pad": ("<pad>", "[PAD]"),
    "eos": ("<eos>", "</s>", "<S>", "[SEP]"),
    "unk": ("<unk>", "<UNK>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
}
NAMES_CAUSAL = {"unk": NAMES["unk"][:2]}
LAYERS = ("n_layer", "encoder_layers", "decoder_layers")  # settings
# Transformer-XL's vocabularies have no `[SEP]` or `[CLS]`: there, these would be words of the text.
NAMES_XL = {"eos": NAMES["eos"][:3], "unk": NAMES["unk"][:2], "pad": NAMES["pad"][:1]}


@dataclass(frozen=True)
class Imported:
    """A foreign model."""

    model: dict[str, Tensor]  # parameters by name
    settings: dict[str, Any]  # ``args`` of the checkpoint
    size: int  # number of words of the model
    words: Sequence[str] | None  # in the order of their ids; None: the source has none
    ids: Mapping[str, int]  # special symbols by role that the source names by their ids
    names: Mapping[str, Sequence[str]]  # the names of special symbols, by role
    tokenizer: Tokenizer | None = None  # text to words and back; None: the source has none
    dictionary: Dictionary | None = None  # the source's own; None: it is made from *words*, *ids* and *names*


def main(args: argparse.Namespace) -> None:
    """Write the model of ``args.source`` to the folder ``args.out``."""
    source, out = Path(args.source), Path(args.out)
    _check(source, out)
    imported = _read(source, args.source_format, args.config_file)
    dictionary = imported.dictionary or _dictionary(imported, source)
    state: dict[str, Any] = {
        "args": imported.settings,
        "model": imported.model,
        "optimizer_history": [],
        "extra_state": {},
    }
    if imported.words is not None:  # placeholders are there to be replaced
        state[dictionary_digest.KEY] = dictionary.digest()
    with atomic_folder(out, FILES, "--out") as folder:
        checkpoint.save(folder / CHECKPOINT, state)
        dictionary.save(folder / DICTIONARY)
        if imported.tokenizer is not None:
            imported.tokenizer.save(folder, dictionary.symbols)
        # Inside, so that a model that cannot be built leaves no folder.
        try:
            load_models([folder / CHECKPOINT], folder / DICTIONARY)
        except UserError as error:
            # The user knows the settings by the file that they come from.
            origin = source / model_folder.CONFIG if os.path.isdir(source) else source
            raise type(error)(error.args[0].replace(str(folder / CHECKPOINT), str(origin))) from None
    kind = "its own words" if imported.words is not None else "placeholder words"
    # Tied parameters share their memory and count once.
    parameters = sum({value.data_ptr(): value.numel() for value in imported.model.values()}.values())
    layers = next(imported.settings[name] for name in LAYERS if name in imported.settings)
    print(f"{source}: {layers} layers, {parameters:,} parameters, {len(dictionary):,} words")
    print(f"Wrote {out / CHECKPOINT} and {out / DICTIONARY} ({kind})")


def _read(source: Path, source_format: str, config_file: str | None) -> Imported:
    if source_format == "transformer-xl":
        state, embedded = pickled_module.read(source)
        if embedded is None and config_file is None:
            raise UserError(f"{source}: is a state dict without the model's settings; give --config FILE.json")
        config = model_folder.read_json(Path(config_file)) if config_file is not None else {}
        model, settings = conversion.convert(state, {**(embedded or {}), **config}, str(source))
        return Imported(model, settings, _vocabulary_size(model), None, {}, NAMES_XL)
    if config_file is not None:
        raise UserError("--config: not used for a Hugging Face folder, which has a config.json; leave it out")
    kind: Any = "transfo-xl"
    if source_format == "hf":
        if not os.path.isdir(source):
            raise UserError(f"{source}: folder not found; give one with config.json and model.safetensors")
        kind = model_folder.read_json(source / model_folder.CONFIG).get("model_type")
    if kind == "transfo-xl":
        model, settings = transfo_xl.read(source)
        eos = transfo_xl.eos(source)
        ids = {} if eos is None else {"eos": eos}
        return Imported(model, settings, _vocabulary_size(model), model_folder.vocabulary(source), ids, NAMES_XL)
    if kind == decoders.MODEL_TYPE:
        return _exported(source)
    if kind in [*causal.FAMILIES]:
        # Of a decoder that `fairseq-export` wrote as a class of transformers.
        if os.path.exists(source / DICTIONARY):
            dictionary = _dictionary_of(source)
            decoder, tokenizer = causal.read(source, dictionary.pad()), find_tokenizer(source, dictionary.symbols)
            arguments = decoder.parameters, decoder.args, len(dictionary), dictionary.symbols
            return Imported(*arguments, {}, {}, tokenizer, dictionary)
        decoder, begin = causal.read(source), model_folder.begin_symbol(source)
        size = decoder.parameters[EMBEDDINGS].size(0)
        words, tokenizer = _filled(model_folder.vocabulary(source, of_tokenizer=True), size), _tokenizer(source)
        # Texts begin with the symbol that ends a line here, in Llama with one of their own, which
        # takes this role.
        ids = decoder.ids if begin is None else {**decoder.ids, "eos": begin}
        return Imported(decoder.parameters, decoder.args, size, words, ids, NAMES_CAUSAL, tokenizer)
    if kind not in [*encoders.FAMILIES]:
        known = ", ".join((*encoders.FAMILIES, *causal.FAMILIES, "transfo-xl", decoders.MODEL_TYPE))
        raise UserError(f"{source / model_folder.CONFIG}: model_type is {cut(kind)}; known: {known}")
    model, settings, ids = encoders.read(source)
    size = model["encoder.sentence_encoder.embed_tokens.weight"].size(0)
    words = _filled(model_folder.vocabulary(source), size)
    # Of an encoder that `fairseq-export` wrote:
    # its tokenizer need not be one that transformers reads.
    tokenizer = find_tokenizer(source, words or []) or _tokenizer(source)
    return Imported(model, settings, size, words, ids, NAMES, tokenizer)


def _exported(source: Path) -> Imported:
    """The model that ``fairseq-export`` wrote to the folder *source*."""
    dictionary = _dictionary_of(source)
    config = model_folder.read_json(source / model_folder.CONFIG)
    settings = config.get("settings")
    if not isinstance(settings, dict):
        raise UserError(f"{source / model_folder.CONFIG}: settings are missing; use a folder that fairseq-export wrote")
    model, settings = decoders.restored(model_folder.read_tensors(source), settings, dictionary, str(source))
    tokenizer = find_tokenizer(source, dictionary.symbols)
    return Imported(model, settings, len(dictionary), dictionary.symbols, {}, {}, tokenizer, dictionary)


def _dictionary_of(source: Path) -> Dictionary:
    """The dictionary that ``fairseq-export`` wrote to the folder
    *source*; UserError if it is another model's."""
    dictionary = Dictionary.load(source / DICTIONARY)
    digest = model_folder.read_json(source / model_folder.CONFIG).get("dictionary")
    dictionary_digest.check_dictionary({dictionary_digest.KEY: digest}, source / model_folder.CONFIG, dictionary)
    return dictionary


def _tokenizer(source: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder: byte-level
    encoding from its merges, or its ``tokenizer.json``."""
    # Merges alone are read as GPT-2's, whose rules of what is merged other models change.
    for name, kind in ((model_folder.TOKENIZER, HuggingFace), ("merges.txt", GPT2)):
        path = source / name
        if os.path.exists(path):
            subwords = kind(read_named(path, "check its permissions"), str(path))
            subwords.check()
            return Tokenizer(subwords=subwords)
    return None


def _filled(words: list[str] | None, size: int) -> list[str] | None:
    """*words* padded to *size* with empty words:
    embedding tables are often longer than vocabularies."""
    return words if words is None else words + [""] * (size - len(words))


def _check(source: Path, out: Path) -> None:
    """Reject invalid paths before any work is done."""
    if not os.path.exists(source):
        raise UserError(f"{source}: file or folder not found; check the path")
    if os.path.exists(out) and not os.path.isdir(out):
        raise UserError(f"--out {out}: is not a folder; give a new folder")
    # Of an import that was killed, which may be repeated.
    remove_leftovers(out)
    # An earlier import may be replaced; a folder with other files is probably a mistake.
    there = [path.name for path in (sorted(out.iterdir()) if os.path.exists(out) else ()) if path.name not in FILES]
    if there:
        raise UserError(f"--out {out}: contains other files ({there[0]}); give a new folder")


def _vocabulary_size(model: dict[str, Tensor]) -> int:
    tables = (value for name, value in model.items() if "embed_tokens" in name and name.endswith(".0.weight"))
    return sum(table.size(0) for table in tables)


def _dictionary(imported: Imported, source: Path) -> Dictionary:
    """The dictionary with the ids of the source; ``token0``, ``token1``, … replace words that
    cannot occur in text.

    The padding of an encoder is the id in its configuration. Other special symbols are words with
    the usual names, else the ids of the configuration; the end of a line defaults to id 0.
    """
    words, size = imported.words, imported.size
    if words is None:
        words = [""] * size
    if len(words) != size:
        raise UserError(f"{source}: has {len(words)} words, but its model {size}; use the model's vocabulary")
    for role, index in imported.ids.items():
        if not 0 <= index < size:
            raise UserError(
                f"{source}: {role}_token_id is {cut(index)}, but there are {size} words; correct config.json"
            )
    symbols_in_use = set(words)
    symbols: list[str] = []
    duplicates: set[str] = set()
    for index, word in enumerate(words):
        if not _is_word(word) or word in duplicates:
            word = placeholder(index)
            # A true word may look like a placeholder.
            while word in symbols_in_use:
                word += "_"
        duplicates.add(word)
        symbols.append(word)
    roles = {role: symbols[index] for role, index in imported.ids.items()}
    # Reversed: of several names that there are, the first one counts.
    names_by_role = {
        role: name for role, names in imported.names.items() for name in reversed(names) if name in duplicates
    }
    roles |= {role: name for role, name in names_by_role.items() if not (role == "pad" and "pad" in roles)}
    roles.setdefault("eos", symbols[0])
    return Dictionary.of_listed(symbols, roles)


def _is_word(word: str) -> bool:
    """Return whether splitting text at white space can give *word*."""
    return word.split() == [word] and not any("\ud800" <= letter <= "\udfff" for letter in word)
