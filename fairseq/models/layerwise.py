"""What is applied to the layers of a model from outside: recomputed activations, then compilation.

Layers are compiled, not models (``--compile``): all layers of a model share one graph, and an epoch
with validation makes four (first segment, memory; training and validation). What a cache holds is
read without a graph.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.models.decoder import Decoder
from fairseq.modules.attention import CAUSAL, AttentionMask, Bidirectional, Causal
from fairseq.modules.memory import LayerCache
from fairseq.modules.transformer_layer import TransformerLayer

logger = logging.getLogger(__name__)

BACKEND: str | Callable[..., object] = "inductor"
GRAPHS = 16  # most graphs of a layer; another one is an error

EXPENSIVE = {
    *("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"),
    "mkldnn._linear_pointwise.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "flex_attention",
    "fairseq.attention.default",
}
"""Operators that take most of a layer's time: matrix products and attention."""

Forward = Callable[..., Any]
"""What a class of layers computes: a function of the layer and its arguments."""


def layers_of(model: BaseFairseqModel) -> list[TransformerLayer]:
    """The transformer layers of *model*, in order; none where its layers are of another class."""
    return [module for module in model.modules() if isinstance(module, TransformerLayer)]


def separate_embeddings(model: BaseFairseqModel) -> list[nn.Module]:
    """The word embeddings of a decoder, a list of one; none where other parts share parameters with
    them."""
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, Decoder):
        return []
    own = set(decoder.embed_tokens.modules())
    others = {id(p) for part in model.modules() if part not in own for p in part.parameters(recurse=False)}
    shares = any(id(p) in others for p in decoder.embed_tokens.parameters())
    return [] if shares else [decoder.embed_tokens]


def checkpoint_activations(model: BaseFairseqModel, selective: bool = False) -> None:
    """Let *model* keep the inputs of its layers only, and compute the rest again in the backward
    pass; if *selective*, it also keeps the results of :data:`EXPENSIVE`.

    Chen et al. 2016, "Training deep nets with sublinear memory cost"; selective: Korthikanti et al.
    2022, "Reducing activation recomputation in large transformer models", section 5. Dropout draws
    the same masks again.

    Raises:
        UserError: the model has no :class:`TransformerLayer`.
    """
    layers = layers_of(model)
    if not layers:
        raise UserError(f"`checkpoint_activations`: {type(model).__name__} has no TransformerLayer; leave it out")
    contexts: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _keep_expensive)} if selective else {}
    )

    def recomputed(forward: Forward) -> Forward:
        def run(layer: TransformerLayer, *args: Any, **options: Any) -> Any:
            # Not the re-entrant kind: it takes no keyword arguments,
            # and layers are called with some.
            return checkpoint(forward, layer, *args, use_reentrant=False, **contexts, **options)

        return run

    _replace_forward(layers, recomputed)


def _keep_expensive(ctx: object, operator: object, *args: object, **options: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if str(operator) in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def compile_model(model: BaseFairseqModel, device: torch.device | None = None) -> None:
    """Compile the layers of *model*, each whole and all with one graph; its loss and optimizer are
    not compiled.

    A graph is of one shape; only where shapes change is the next graph of any shape. A model
    without a :class:`TransformerLayer` is compiled as a whole. It runs on *device*; None: where it
    is.
    """
    layers = layers_of(model)
    if not layers:
        getattr(model, "decoder", model).compile(backend=BACKEND)
        return
    if (device or next(model.parameters()).device).type == "cpu":
        logger.warning("`compile`: on a CPU this model is faster without it")
    _replace_forward(layers, _compiled)


def _compiled(forward: Forward) -> Forward:
    """*forward* of layers, compiled.

    A batch that has fewer rows than the one before, such as the last of an epoch, is filled up
    with copies of its first row, whose results are left out: the graph stays the same.
    """
    # PyTorch's limit of 8 is too low for training and validation, with and without memory. Older
    # versions have no other one.
    limit: dict[str, Any] = {}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        limit["recompile_limit"] = GRAPHS
    compiled: Any = torch.compile(forward, fullgraph=True, backend=BACKEND, **limit)
    shapes: dict[tuple[bool, int], torch.Size] = {}  # of the last batch, in training or not and of each width

    def run(
        layer: TransformerLayer,
        x: Tensor,
        memory: Tensor | None = None,
        positions: object = None,
        visible: AttentionMask = CAUSAL,
        cache: LayerCache | None = None,
        past_length: int = 0,
        skip: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if skip or cache is not None:
            # Steps of one token are faster so, and offsets that change would make many graphs.
            return forward(layer, x, memory, positions, visible, cache, past_length, skip)
        rows, kind = x.size(0), (torch.is_grad_enabled(), x.size(2))
        last = shapes.get(kind, x.shape)
        # A plug-in's visibility may hold something for each row.
        if rows < last[0] and x.size(1) == last[1] and type(visible) in (Causal, Bidirectional):
            x, memory = _fill(x, last[0]), None if memory is None else _fill(memory, last[0])
            if isinstance(visible, Bidirectional) and visible.padding is not None:
                padding = _fill(visible.padding, last[0])
                attention: Any = layer.self_attn
                visible = attention.prepare(Bidirectional(padding), x.size(1), x.size(1), x.device)
        else:
            shapes[kind] = x.shape
        x, remembered = compiled(layer, x, memory=memory, positions=positions, visible=visible)
        return x[:rows], remembered[:rows]

    return run


def _fill(x: Tensor, rows: int) -> Tensor:
    """*x* with copies of its first row behind its last, *rows* in all."""
    return torch.cat([x, x[:1].detach().expand(rows - x.size(0), *x.shape[1:])])


def _replace_forward(layers: Sequence[TransformerLayer], change: Callable[[Forward], Forward]) -> None:
    """Let *change* make another function of each that *layers* compute by."""
    made: dict[Forward, Forward] = {}
    for layer in layers:
        forward = layer.forward.__func__  # type: ignore[attr-defined]
        # One for all layers, which then share graphs; a method, so that copies of layers work.
        made[forward] = made.get(forward) or change(forward)
        layer.forward = types.MethodType(made[forward], layer)  # type: ignore[method-assign]
