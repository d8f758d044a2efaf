"""What all folders of Hugging Face have in common: a configuration, tensors by name, a vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq.checkpoint.foreign import inert, pickled_module
from fairseq.checkpoint.foreign.inert import Inert
from fairseq.errors import UserError

CONFIG, PICKLE, SAFE = "config.json", "pytorch_model.bin", "model.safetensors"
TOKENIZER = "tokenizer.json"
VOCABULARIES = ("vocab.json", "vocab.txt", "vocab.pkl", "vocab.bin", TOKENIZER)  # the first that is there


def vocabulary(folder: Path) -> list[str] | None:
    """The words in the order of their ids; None where the folder has no vocabulary.

    Raises:
        UserError: the file is damaged, or none that is known.
    """
    for path in (folder / name for name in VOCABULARIES):
        if path.exists():
            if path.name == TOKENIZER:
                return _tokenizer_words(read_json(path), path)
            if path.suffix == ".txt":
                return _lines(path)
            content = _any_json(path) if path.suffix == ".json" else _unpickled(path)
            return _words(content, path)
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A configuration.

    Raises:
        UserError: the file is missing, no JSON, or no mapping.
    """
    content = _any_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected names and values, found {type(content).__name__}; use another file")
    return content


def _any_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); the file is needed") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not valid JSON; use another file") from None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by name, from safetensors where they are there, otherwise from a pickle.

    Raises:
        UserError: there is neither, or it is damaged.
    """
    if (folder / SAFE).exists():
        return _safetensors(folder / SAFE)
    if not (folder / PICKLE).exists():
        for name in (SAFE, PICKLE):
            if (folder / f"{name}.index.json").exists():
                raise UserError(f"{folder}: the model is in several files ({name}.index.json); save it as one {SAFE}")
        raise UserError(f"{folder}: neither {SAFE} nor {PICKLE} is there; give a folder that holds the model")
    state, settings = pickled_module.read(folder / PICKLE)
    if settings is not None:
        raise UserError(f"{folder / PICKLE}: a saved module, not tensors by name; use another file")
    return state


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise UserError(f"{path}: needs the safetensors package; install the [hub] extra") from None
    try:
        return load_file(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except Exception as error:  # the package has errors of its own for each kind of damage
        reason = " ".join(str(error).split())[:80]
        raise UserError(f"{path}: truncated, damaged or of another kind ({reason}); use another file") from None


def _lines(path: Path) -> list[str]:
    """A word a line; what follows it on the line, such as a count, is left aside."""
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; convert it, as with iconv") from None
    return [(line.split() or [""])[0] for line in lines]


def _unpickled(path: Path) -> Any:
    root = inert.load(path).root
    content = root.state if isinstance(root, Inert) else root
    if isinstance(content, dict):
        return content.get("idx2sym") or content.get("sym2idx") or content
    return content


def _words(content: Any, path: Path) -> list[str]:
    """The words of a list, or of a mapping of words to ids."""
    if isinstance(content, list) and all(isinstance(word, str) for word in content):
        return content
    if isinstance(content, dict) and content and all(isinstance(word, str) for word in content):
        indices = {index for index in content.values() if type(index) is int}
        if indices == set(range(len(content))):
            return sorted(content, key=content.__getitem__)
    raise UserError(f"{path}: no vocabulary that is known here (a list of words, or words and their ids); remove it")


def _tokenizer_words(content: dict[str, Any], path: Path) -> list[str]:
    """The words of a file of the tokenizers package, with those that were added to its model's."""
    model = content.get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(words, list):  # pieces and their scores
        words = {piece[0]: index for index, piece in enumerate(words) if isinstance(piece, list) and piece}
    added = content.get("added_tokens")
    if isinstance(words, dict) and isinstance(added, list):
        words = words | {token.get("content"): token.get("id") for token in added if isinstance(token, dict)}
    return _words(words, path)
