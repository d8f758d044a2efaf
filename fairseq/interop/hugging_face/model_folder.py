"""Readers for Hugging Face model folders: configuration, tensors by name, vocabulary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq.errors import UserError, read_failure
from fairseq.interop.pickles import inert, pickled_module
from fairseq.interop.pickles.inert import Inert
from fairseq.system import json_files
from fairseq.system.opening import decoded, read_named

CONFIG, PICKLE, SAFE = "config.json", "pytorch_model.bin", "model.safetensors"
INDEX = f"{SAFE}.index.json"
TOKENIZER = "tokenizer.json"
VOCABULARIES = ("vocab.json", "vocab.txt", "vocab.pkl", "vocab.bin", TOKENIZER)  # the first that exists is read


def vocabulary(folder: Path, of_tokenizer: bool = False) -> list[str] | None:
    """Return the words in the order of their ids, None if the folder has none; UserError for an
    unknown format.

    *of_tokenizer*: from ``tokenizer.json`` if there is one, which has symbols that were added to
    the vocabulary.
    """
    for path in (folder / name for name in ((TOKENIZER,) * of_tokenizer + VOCABULARIES)):
        if os.path.exists(path):
            if path.name == TOKENIZER:
                return _tokenizer_words(read_json(path), path)
            if path.suffix == ".txt":
                return _lines(path)
            content = _any_json(path) if path.suffix == ".json" else _unpickled(path)
            return _words(content, path)
    return None


def begin_symbol(folder: Path) -> int | None:
    """Return the id of the symbol that ``tokenizer.json`` puts before a text; None if it puts none
    there."""
    # Not what `config.json` names: there is a default in transformers' classes, also where no text
    # begins with it.
    path = folder / TOKENIZER
    todo = [read_json(path).get("post_processor")] if os.path.exists(path) else []
    for processor in todo:
        if not isinstance(processor, dict):
            continue
        more = processor.get("processors")
        todo += more if isinstance(more, list) else []
        template, symbols = processor.get("single"), processor.get("special_tokens")
        first = template[0] if isinstance(template, list) and template else None
        symbol = first.get("SpecialToken") if isinstance(first, dict) else None
        name = symbol.get("id") if isinstance(symbol, dict) else None
        entry = symbols.get(name) if isinstance(symbols, dict) and isinstance(name, str) else None
        ids = entry.get("ids") if isinstance(entry, dict) else None
        if isinstance(ids, list) and ids and type(ids[0]) is int:
            return ids[0]
    return None


def tokenizer_setting(folder: Path, name: str) -> object:
    """Return a setting of ``tokenizer_config.json``, or None."""
    path = folder / "tokenizer_config.json"
    return read_json(path).get(name) if path.exists() else None


def read_json(path: Path) -> dict[str, Any]:
    """Read a configuration; UserError if the file is missing, or not a JSON object."""
    content = _any_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}; use another file")
    return content


def _any_json(path: Path) -> Any:
    return json_files.read_json(path, f"give a folder with {path.name}")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a folder by name, from safetensors if it has them, otherwise from a
    pickle.

    Raises:
        UserError: both files are missing, or the file is damaged.
    """
    # First, as in transformers: a folder with both formats has the same model twice, and
    # safetensors needs no interpreter.
    if os.path.exists(folder / SAFE):
        return _safetensors(folder / SAFE)
    if os.path.exists(folder / INDEX):
        return _sharded(folder)
    if not os.path.exists(folder / PICKLE):
        if os.path.exists(folder / f"{PICKLE}.index.json"):
            raise UserError(f"{folder}: the model is sharded ({PICKLE}.index.json); save it as {SAFE}")
        raise UserError(f"{folder / SAFE}: file not found; give a folder with {SAFE} or {PICKLE}")
    state, settings = pickled_module.read(folder / PICKLE)
    if settings is not None:
        raise UserError(f"{folder / PICKLE}: holds a saved module; save its state dict instead")
    return state


def _sharded(folder: Path) -> dict[str, Tensor]:
    """The tensors of all files that the index of *folder* names."""
    shards = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{folder / INDEX}: expected a weight_map of tensors and their files; use another file")
    state: dict[str, Tensor] = {}
    for name in sorted(set(shards.values())):
        # Beside the index: its names must not lead to other folders.
        if Path(name).name != name or not os.path.exists(folder / name):
            raise UserError(f"{folder / INDEX}: names {name[:80]!r}, which is not in its folder; give the whole folder")
        state |= {key: value for key, value in _safetensors(folder / name).items() if shards.get(key) == name}
    if missing := sorted(shards.keys() - state.keys()):
        raise UserError(f"{folder / INDEX}: names {missing[0][:80]!r}, which its file lacks; give the whole folder")
    return state


def _safetensors(path: Path) -> dict[str, Tensor]:
    # Imported here, so that other commands start without it.
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except OSError as error:
        raise UserError(f"{path}: {read_failure(error)}; check its permissions") from None
    # The package raises its own error types for damaged files.
    except Exception as error:
        reason = " ".join(str(error).split())[:80]
        raise UserError(f"{path}: truncated, damaged or in another format ({reason}); use another file") from None


def _lines(path: Path) -> list[str]:
    """Read one word a line; the rest of the line, such as a count, is ignored."""
    text = decoded(read_named(path, "check its permissions"), path, "convert it, as with iconv")
    lines = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    # Empty lines count: the number of the line is the id of its word.
    return [(line.split() or [""])[0] for line in lines]


def _unpickled(path: Path) -> Any:
    root = inert.load(path).root
    content = root.state if isinstance(root, Inert) else root
    if isinstance(content, dict):
        # The vocabulary of Transformer-XL's authors: `idx2sym` is a list, and `sym2idx` the mapping
        # that can be inverted.
        return content.get("idx2sym") or content.get("sym2idx") or content
    return content


def _words(content: object, path: Path) -> list[str]:
    """The words of a list, or of a mapping of words to ids."""
    if isinstance(content, list) and all(isinstance(word, str) for word in content):
        return content
    if isinstance(content, dict) and content and all(isinstance(word, str) for word in content):
        indices = {index for index in content.values() if type(index) is int}
        # A gap would shift the ids of all words after it.
        if indices == set(range(len(content))):
            return sorted(content, key=content.__getitem__)
    raise UserError(f"{path}: unknown vocabulary format; expected a list of words, or words and their ids")


def _tokenizer_words(content: dict[str, object], path: Path) -> list[str]:
    """The words of a file of the tokenizers package, including added tokens."""
    model = content.get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    # A unigram model lists [piece, score], and the position is the id.
    pairs: list[tuple[object, object]] = list(words.items()) if isinstance(words, dict) else []
    if isinstance(words, list):  # pieces and their scores
        pairs = [(piece[0], index) for index, piece in enumerate(words) if isinstance(piece, list) and piece]
    added = content.get("added_tokens")
    if pairs and isinstance(added, list):
        pairs += [(token.get("content"), token.get("id")) for token in added if isinstance(token, dict)]
    # Before they become keys: lists and objects cannot.
    if not all(isinstance(word, str) for word, _ in pairs):
        raise UserError(f"{path}: unknown vocabulary format; expected words that are text, and their ids")
    return _words(dict(pairs), path)
