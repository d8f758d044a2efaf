"""Hugging Face's folders of Transformer-XL (``model_type`` ``transfo-xl``), under the authors' names.

Their names are the authors' behind ``transformer.``; the rows of ``cluster_weight`` stand in natural order, and biases
of attention may be one pair a layer (``untie_r``). Their program begins a text with a memory of zero vectors that are
attended to, unless it is given an empty one; here it begins empty, as in the authors', and ``memory_start`` ``zeros``
(``--model-overrides``) is the other way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq.checkpoint.foreign import inert, pickled_module, transformer_xl
from fairseq.checkpoint.foreign.inert import Inert
from fairseq.checkpoint.foreign.named_tensors import check_tensors, cut
from fairseq.errors import UserError

CONFIG, PICKLE, SAFE = "config.json", "pytorch_model.bin", "model.safetensors"
VOCABULARIES = ("vocab.json", "vocab.txt", "vocab.pkl", "vocab.bin")  # the first that is there
SEGMENT = 128  # tokens, where the configuration does not say
EPSILON = 1e-5  # of layer norms


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A folder's model in our names.

    Returns:
        Parameters by name, and ``args``; see :func:`fairseq.checkpoint.transformer_xl.convert`.

    Raises:
        UserError: the folder lacks a file, holds another kind of model, or contradicts itself.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give one with {CONFIG} and {PICKLE} or {SAFE}")
    given = read_json(folder / CONFIG)
    kind = given.get("model_type")
    if kind != "transfo-xl":
        raise UserError(f"{folder / CONFIG}: model_type is {cut(kind)}; only transfo-xl can be imported from there")
    if given.get("layer_norm_epsilon", EPSILON) != EPSILON:
        raise UserError(
            f"{folder / CONFIG}: layer_norm_epsilon is {cut(given['layer_norm_epsilon'])}; only 1e-05 is known"
        )
    tensors = _tensors(folder)
    check_tensors(tensors, str(folder))
    state = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        if name in state and state[name].dim():
            state[name] = state[name].flip(0)  # the authors' order
    return transformer_xl.convert(state, _config(given), str(folder))


def eos(folder: Path) -> int | None:
    """The id of the end of a line, where the configuration names one."""
    index = read_json(folder / CONFIG).get("eos_token_id")
    return index if type(index) is int else None


def vocabulary(folder: Path) -> list[str] | None:
    """The words in the order of their ids; None where the folder has no vocabulary.

    Raises:
        UserError: the file is damaged, or none that is known.
    """
    for path in (folder / name for name in VOCABULARIES):
        if path.exists():
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


def _config(given: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the authors' keys."""
    config: dict[str, Any] = {"tgt_len": SEGMENT, "tie_weight": True, **given}  # left out where it is true
    if "vocab_size" not in config and "n_token" in config:
        config["vocab_size"] = config["n_token"]
    if "tie_projs" not in config and "proj_share_all_but_first" in config:
        cutoffs = config.get("cutoffs")
        tails = len(cutoffs) if isinstance(cutoffs, list) else 0
        config["tie_projs"] = [False] + [bool(config["proj_share_all_but_first"])] * tails
    return config


def _tensors(folder: Path) -> dict[str, Tensor]:
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
