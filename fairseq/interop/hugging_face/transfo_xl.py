"""Import of Transformer-XL from Hugging Face folders (``model_type`` ``transfo-xl``).

Tensor names are the original authors' names after the prefix ``transformer.``; the rows of
``cluster_weight`` are in band order, and each layer may have its own pair of attention biases
(``untie_r``). In transformers, a text begins with a memory of zero vectors that attention reads,
unless the caller passes an empty one. Here the memory begins empty, as in the original code;
``memory_start`` ``zeros`` (``--model-overrides``) selects the other behaviour.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq.errors import UserError
from fairseq.interop.hugging_face.model_folder import CONFIG, PICKLE, SAFE, read_json, read_tensors
from fairseq.interop.pickles.named_tensors import check_tensors, cut
from fairseq.interop.transformer_xl import conversion

SEGMENT = 128  # tokens, the default
EPSILON = 1e-5  # of layer norm


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the model of a folder, under the names of this project.

    Returns:
        Parameters by name, and ``args``; see
        :func:`fairseq.interop.transformer_xl.conversion.convert`.

    Raises:
        UserError: a file is missing, the model is of another type, or tensors and configuration
            disagree.
    """
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: folder not found; give one with {CONFIG} and {PICKLE} or {SAFE}")
    config = read_json(folder / CONFIG)
    kind = config.get("model_type")
    if kind != "transfo-xl":
        raise UserError(f"{folder / CONFIG}: model_type is {cut(kind)}; only transfo-xl is supported")
    if config.get("layer_norm_epsilon", EPSILON) != EPSILON:
        raise UserError(
            f"{folder / CONFIG}: layer_norm_epsilon is {cut(config['layer_norm_epsilon'])}; only 1e-05 is supported"
        )
    tensors = read_tensors(folder)
    check_tensors(tensors, str(folder))
    state = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        if name in state and state[name].dim():
            state[name] = state[name].flip(0)  # the authors' order
    return conversion.convert(state, _config(config), str(folder))


def eos(folder: Path) -> int | None:
    """Return the id of the end-of-line symbol; None if the configuration has none."""
    index = read_json(folder / CONFIG).get("eos_token_id")
    return index if type(index) is int else None


def _config(source: Mapping[str, object]) -> dict[str, object]:
    """The configuration under the original authors' keys."""
    # A configuration may name no segment, since transformers reads texts of any length; evaluation
    # here needs one.
    config: dict[str, Any] = {"tgt_len": SEGMENT, "tie_weight": True, **source}  # omitted from the file where true
    if "vocab_size" not in config and "n_token" in config:
        config["vocab_size"] = config["n_token"]
    if "tie_projs" not in config and "proj_share_all_but_first" in config:
        cutoffs = config.get("cutoffs")
        tails = len(cutoffs) if isinstance(cutoffs, list) else 0
        # As the shorthand's name says: the first band has a projection of its own.
        config["tie_projs"] = [False] + [bool(config["proj_share_all_but_first"])] * tails
    return config
