"""Parameters of a checkpoint into a model: checked, and strict."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fairseq import config
from fairseq.checkpoint import describe_mismatch
from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.models.notes import check_words
from fairseq.models.unsupported import check_supported
from fairseq.modules.transformer_layer import TransformerLayer
from fairseq.registry import is_plugin
from fairseq.settings import Settings

logger = logging.getLogger(__name__)

BACKEND: str | Callable[..., Any] = "inductor"
GRAPHS = 16  # limit of torch.compile's graphs of a layer, above which it would go on uncompiled


def compile_model(model: BaseFairseqModel) -> None:
    """Compile the layers of *model*, one graph for all of them; loss and optimizer are fused already.

    Batch rows, tokens and the length of the memory are dynamic. torch.compile makes a graph of its own for a size of 0
    or 1, so training and evaluation have up to four each: with an empty memory or a filled one, with several rows or
    one. A model of a plug-in without a :class:`TransformerLayer` is compiled as a whole. *model* is on the device it
    runs on.
    """
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    if not layers:
        getattr(model, "decoder", model).compile(backend=BACKEND)
        return
    if next(model.parameters()).device.type == "cpu":
        logger.warning("--compile: on a CPU this model is faster without it")
    import torch._dynamo.config
    import torch.fx.experimental._config

    # Sizes that are equal by chance, such as a segment and its memory, would become one size of the graph.
    torch.fx.experimental._config.use_duck_shape = False
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    for layer in layers:
        layer.compile(dynamic=True, backend=BACKEND)


def load_parameters(model: BaseFairseqModel, parameters: Mapping[str, Tensor], source: str) -> None:
    """Load a checkpoint's *parameters* strictly.

    Raises:
        UserError: they are not the model's, or its notes are for other words; the message says which differ.
    """
    check_words(model, parameters)
    upgraded = model.upgrade_state_dict(dict(parameters))
    problem = describe_mismatch(upgraded, model.state_dict(), source)
    if problem:
        raise UserError(problem)
    model.load_state_dict(upgraded)


def load_fitting(model: BaseFairseqModel, parameters: Mapping[str, Tensor], source: str) -> None:
    """Load those of a checkpoint's *parameters* that *model* has with the same shape; log which were left out.

    Raises:
        UserError: none of them fits.
    """
    upgraded, wanted = model.upgrade_state_dict(dict(parameters)), model.state_dict()
    fitting = {name: value for name, value in upgraded.items() if name in wanted and value.shape == wanted[name].shape}
    if not any(name in fitting for name, _ in model.named_parameters()):
        raise UserError(f"{source}: none of its parameters fits this model; check --arch and its sizes")
    model.load_state_dict(fitting, strict=False)
    left_out = {
        "with another shape": [name for name in upgraded if name in wanted and name not in fitting],
        "unused": [name for name in upgraded if name not in wanted],
        "initialized": [name for name in wanted if name not in upgraded],
    }
    parts = [f"{len(names)} {kind} ({', '.join(names)})" for kind, names in left_out.items() if names]
    logger.info("%s: %d of %d parameters loaded%s", source, len(fitting), len(wanted), "".join(f"; {p}" for p in parts))


def check_settings(model: BaseFairseqModel, stored: Mapping[str, Any], settings: Any, source: str) -> None:
    """See that *settings*, the model's typed ones, make of a checkpoint's parameters what the *stored* settings did.

    Raises:
        UserError: they would compute something else with them, or the stored ones are not implemented here; the
            message names the flag.
    """
    if not is_plugin(type(model)):
        check_supported(stored, source)
    if model.config_class is None:
        return
    known = {name: value for name, value in stored.items() if value is not None}
    before: Any = config.typed(model.config_class, known)
    for name in model.decisive_settings:
        if name in known and getattr(before, name) != getattr(settings, name):
            now = getattr(settings, name)
            raise UserError(
                f"{config.flag_name(name)} {now}: {source} was trained with {getattr(before, name)}, "
                "and its parameters mean nothing otherwise; leave the setting as it was"
            )


def stored_settings(settings: Settings, model: BaseFairseqModel) -> dict[str, Any]:
    """The settings a checkpoint stores: a flat dict of plain values, as fairseq's, and what *model* was built with."""
    cfg: Any = getattr(model, "cfg", None)
    built: dict[str, Any] = dataclasses.asdict(cfg) if model.config_class is not None and cfg is not None else {}
    return {name: value for name, value in {**vars(settings.namespace), **built}.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return value is None or isinstance(value, bool | int | float | str)
