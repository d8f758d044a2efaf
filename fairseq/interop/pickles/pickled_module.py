"""Files of Transformer-XL's authors: a state dict, or the module as their training code saves it;
their vocabulary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq.errors import UserError
from fairseq.interop.pickles import inert
from fairseq.interop.pickles.inert import Inert
from fairseq.interop.pickles.named_tensors import Stored
from fairseq.system.opening import decoded, read_errors, read_named

ADVICE = "give the authors' cache.pt, or a text with a word on each line"
MODEL = "model.pt"  # in the folder of a training run
ATTRIBUTES = {  # setting: (path of the submodule, attribute)
    **{key: ("", key) for key in ("n_layer", "n_head", "d_model", "d_head", "d_embed", "tgt_len", "mem_len")},
    **{key: ("", key) for key in ("attn_type", "same_length", "clamp_len")},
    "vocab_size": ("", "n_token"),
    "div_val": ("word_emb", "div_val"),
    "cutoffs": ("word_emb", "cutoffs"),
    "d_inner": ("layers.0.pos_ff", "d_inner"),
    "pre_lnorm": ("layers.0.dec_attn", "pre_lnorm"),
    "dropout": ("layers.0.dec_attn.drop", "p"),
    "dropatt": ("layers.0.dec_attn.dropatt", "p"),
}


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Read a model's tensors under the authors' names, and its settings if the file has them.

    *path* is a file written by ``torch.save``, or a folder with a ``model.pt``.

    Raises:
        UserError: the file is missing, holds neither a module
            nor tensors by name, or is a fairseq checkpoint.
    """
    if os.path.isdir(path):
        if not os.path.exists(path / MODEL):
            raise UserError(f"{path / MODEL}: file not found; give a state dict or a saved module")
        path = path / MODEL
    loaded = inert.load(path)
    root = loaded.root
    if isinstance(root, dict) and root and all(isinstance(value, Stored) for value in root.values()):
        if not all(isinstance(name, str) for name in root):
            raise UserError(f"{path}: has tensor names that are not text; use another file")
        return {name: loaded.tensor(value) for name, value in root.items()}, None
    if isinstance(root, dict) and "model" in root and not root.keys().isdisjoint(("args", "cfg")):
        raise UserError(f"{path}: is already a checkpoint of this project or of fairseq; use it directly with `path`")
    if not isinstance(root, Inert) or not isinstance(root.state.get("_modules"), dict):
        raise UserError(f"{path}: holds neither tensors by name nor a saved module; use another file")
    if "module" in root.state["_modules"]:  # wrapper for several devices
        root = root.state["_modules"]["module"]
    stored = dict(_parameters(root, path))
    return {name: loaded.tensor(value) for name, value in stored.items()}, _settings(root, stored)


def read_vocabulary(path: Path) -> list[str]:
    """Read the words of a model in the order of their ids: the vocabulary in the authors'
    ``cache.pt``, or the first word of each line of a text.

    Raises:
        UserError: the file is missing or has no vocabulary; see :func:`inert.load`.
    """
    with read_errors(path, ADVICE), open(path, "rb") as file:
        start = file.read(2)
    # What a version of torch writes: an archive, or a pickle of protocol 2 or later.
    if start == b"PK" or start[:1] == b"\x80":
        root = inert.load(path).root
        # The corpus that the authors store, or its vocabulary alone.
        vocabulary = root.state.get("vocab", root) if isinstance(root, Inert) else None
        words = vocabulary.state.get("idx2sym") if isinstance(vocabulary, Inert) else None
    else:
        lines = decoded(read_named(path, ADVICE), path, ADVICE).replace("\r", "\n").split("\n")
        # A word that is listed again keeps its first id, as in the authors' code.
        words = list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise UserError(f"{path}: has no list of words; {ADVICE}")
    return words


def _parameters(root: object, path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield every parameter and buffer of a module with its name
    in a state dict; each submodule is visited once."""
    # A stack and not recursion: the depth is the file's choice, and a cycle would not end.
    waiting, visited = [("", root)], set()
    while waiting:
        prefix, module = waiting.pop()
        if module is None:
            continue
        if not isinstance(module, Inert) or id(module) in visited:
            raise UserError(f"{path}: {prefix.rstrip('.') or 'the model'} is not a module; the file is damaged")
        visited.add(id(module))
        for kind in ("_parameters", "_buffers", "_modules"):
            members = module.state.get(kind)
            for name, value in members.items() if isinstance(members, dict) else ():
                if not isinstance(name, str) or id(members) in visited:
                    raise UserError(f"{path}: the {kind} of a module are damaged; use another file")
                if kind == "_modules":
                    waiting.append((f"{prefix}{name}.", value))
                elif isinstance(value, Stored):
                    yield f"{prefix}{name}", value
            visited.add(id(members))


def _settings(root: Inert, stored: dict[str, Stored]) -> dict[str, Any]:
    """The settings found in the attributes and the shared
    tensors of the module; the others are absent."""
    config: dict[str, Any] = {}
    for key, (module_name, attribute) in ATTRIBUTES.items():
        module: Any = root
        for name in module_name.split(".") if module_name else ():
            inside = module.state.get("_modules") if isinstance(module, Inert) else None
            module = inside.get(name) if isinstance(inside, dict) else None
        if isinstance(module, Inert) and attribute in module.state:
            config[key] = module.state[attribute]
    # The module does not store whether it was tied: tied tensors are one storage with one view,
    # which equal descriptions show.
    embeddings, output = "word_emb.emb_layers.0.weight", "crit.out_layers.0.weight"
    config["tie_weight"] = embeddings in stored and stored.get(output) == stored[embeddings]
    inputs = [
        # With `div_val` 1 all bands have one projection at the input,
        # which each output band may be tied to.
        stored.get(f"word_emb.emb_projs.{0 if config.get('div_val') == 1 else band}")
        for band in range(_bands(config))
    ]
    outputs = [stored.get(f"crit.out_projs.{band}") for band in range(_bands(config))]
    config["tie_projs"] = [one is not None and one == other for one, other in zip(inputs, outputs, strict=True)]
    return config


def _bands(config: dict[str, object]) -> int:
    """Number of bands of the softmax: the cutoffs of the module include the vocabulary size."""
    cutoffs = config.get("cutoffs")
    return len(cutoffs) if isinstance(cutoffs, list) else 0
