"""Hugging Face's folders of Transformer-XL (``model_type`` ``transfo-xl``), under the authors' names.

Their names are the authors' behind ``transformer.``; the rows of ``cluster_weight`` stand in natural order, and biases
of attention may be one pair a layer (``untie_r``). Their program begins a text with a memory of zero vectors that are
attended to, unless it is given an empty one; here it begins empty, as in the authors', and ``memory_start`` ``zeros``
(``--model-overrides``) is the other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq.checkpoint.foreign import transformer_xl
from fairseq.checkpoint.foreign.hf_folder import CONFIG, PICKLE, SAFE, read_json, read_tensors
from fairseq.checkpoint.foreign.named_tensors import check_tensors, cut
from fairseq.errors import UserError

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
    tensors = read_tensors(folder)
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
