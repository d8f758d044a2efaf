"""Models for inference: weights cast once, single tokens computed by kernels in C.

At one token a step, calling a hundred small operators costs several times what reading the weights
does: on CPUs kernels in C read one token through the whole model in one call. They are compiled at
first use and cached; without a compiler torch's operators run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from fairseq.inference.packed import decoding_kernels, dequantized
from fairseq.inference.stack import PackedStack, packable
from fairseq.inference.words import PackedEmbedding, PackedOutput, packable_embedding, packable_output
from fairseq.models.base import BaseFairseqModel
from fairseq.models.decoder import DecoderModel
from fairseq.models.language_model import language_model
from fairseq.models.transformer_lm import TransformerDecoder, TransformerLanguageModel
from fairseq.models.transformer_xl import TransformerXL, TransformerXLDecoder
from fairseq.models.transformer_xl_settings import BY_DISTANCE
from fairseq.modules.memory import KeyValueCache
from fairseq.modules.relative_attention import AttentionBiases

M = TypeVar("M", bound=BaseFairseqModel)


class Reader:
    """A model for inference; its weights must not change meanwhile.

    On CPUs, compiled kernels compute single tokens of supported models; everything else runs the
    modules of the model. Both share one cache.

    Args:
        model: in evaluation mode, on its device.
        dtype: type of matrices and caches, bfloat16 or float16; None: unchanged. Norms, softmax and
            log-probabilities are always float32.
        int8: round matrices to int8 with one scale an output; the kernels read int8.
        kernels: use the compiled kernels.
        begin: id that stands before every row of text in training (``--add-bos-token``), for
            predictors to put there; None: nothing does.

    Attributes:
        module: the model with cast weights; *model* itself if nothing was cast.
        model: *module* as what is used of it.
    """

    def __init__(
        self,
        model: BaseFairseqModel,
        dtype: torch.dtype | None = None,
        *,
        int8: bool = False,
        kernels: bool = True,
        begin: int | None = None,
    ) -> None:
        self.dtype, self.int8, self.kernels, self.begin = dtype, int8, kernels, begin
        self.module: BaseFairseqModel = inference_copy(model, dtype, int8) if dtype is not None or int8 else model
        self.model = language_model(self.module)
        self.device = next(model.parameters(), torch.empty(0)).device
        if int8:
            # From the original, which is not kept: values rounded twice would differ.
            self.packed = self._packed_with(model)

    @functools.cached_property
    def packed(self) -> _Packed | None:
        """The model packed for the kernels; None if they do not support it."""
        return self._packed_with(self.module)

    def _packed_with(self, matrices: BaseFairseqModel) -> _Packed | None:
        """The model packed for the kernels, with the matrices of *matrices*."""
        if not self.kernels or self.device.type != "cpu" or not _packable(self.module):
            return None
        compiled = decoding_kernels()
        if compiled is None:
            return None
        # The packed weights serve later calls, too, which need not be in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            assert isinstance(matrices, DecoderModel)
            return _pack(compiled, matrices, self.module, self.int8)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which :attr:`model` is called."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def new_cache(self, rows: int, longest: int | None = None) -> KeyValueCache:
        """Return an empty cache; see ``new_cache`` of the models."""
        with self.autocast():
            return self.model.new_cache(rows, longest)

    def read(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Hidden states of *tokens* [B, T], which continue *cache* and are appended to it:
        [B, T, C]."""
        # Several tokens at once fill the matrix products of torch, which are then faster.
        if tokens.size(1) == 1 and self.packed is not None:
            return self.packed.stack.read(self.packed.embed(tokens, cache), cache, self.packed.window)
        with self.autocast():
            return self.model(tokens, cache=cache)[0]

    def read_each(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Like :meth:`read`, one token at a time, with one embedding lookup for all."""
        with self.autocast():
            embedded = self.model.embed(tokens, cache)
            if self.packed is not None:
                states = self.packed.stack.read(embedded.float(), cache, self.packed.window)
                return states if self.dtype is not None else states.to(embedded.dtype)
            hidden = [
                self.model(tokens[:, i : i + 1], cache=cache, embedded=embedded[:, i : i + 1])[0]
                for i in range(tokens.size(1))
            ]
        return torch.cat(hidden, dim=1)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words after hidden states [B, C]: [B, V], float32."""
        if self.packed is not None:
            return self.packed.output.log_probs(hidden)
        with self.autocast():
            return self.model.output_layer.log_probs(hidden)

    def best(self, hidden: Tensor, count: int, forbidden: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """The *count* most probable words that are not *forbidden*, in falling order.

        Returns:
            Log-probabilities up to a constant a row, float32, and words: both [B, count].
        """
        if self.packed is not None:
            return self.packed.output.best(hidden, count, forbidden)
        lprobs = self.log_probs(hidden)
        lprobs[:, list(forbidden)] = -torch.inf
        return lprobs.topk(min(count, lprobs.size(-1)))


@dataclass(frozen=True)
class _Packed:
    """A model packed for the kernels."""

    model: DecoderModel
    lookup: PackedEmbedding | None  # None: the modules of the model compute embeddings
    stack: PackedStack
    output: PackedOutput
    window: int | None  # most keys that a token attends to

    def embed(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Input of the first layer for *tokens* [B, 1]: [B, 1, C]."""
        if self.lookup is None:
            return self.model.embed(tokens, cache).float()
        decoder, added = self.model.decoder, None
        if isinstance(decoder, TransformerDecoder) and decoder.embed_positions is not None and not decoder.infused:
            added = decoder.embed_positions(1, cache.length).float()
        return self.lookup(tokens[:, 0].contiguous(), added)[:, None]


def inference_copy(model: M, dtype: torch.dtype | None, int8: bool = False) -> M:
    """*model* with matrices rounded to int8 and then cast to *dtype*;
    norms are kept, *model* is not modified."""
    # By name as well: apex's layer norm is no subclass of torch's.
    normed = {
        id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) or "Norm" in type(m).__name__
        for p in m.parameters(recurse=False)
    }  # fmt: skip
    biases = ("r_w_bias", "r_r_bias", "r_bias")  # two-dimensional: one row for each head
    linear = {id(p) for name, p in model.named_parameters() if p.dim() == 2 and name.rsplit(".", 1)[-1] not in biases}
    # Parameters that deepcopy takes from its memo:
    # tied ones stay tied, and the originals are not copied first.
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        value = parameter.detach()
        if int8 and id(parameter) in linear:
            value = dequantized(value)
        if dtype is not None and id(parameter) not in normed:
            value = value.to(dtype)
        memo[id(parameter)] = nn.Parameter(value, requires_grad=False)
    return copy.deepcopy(model, memo).eval()


def _packable(model: BaseFairseqModel) -> TypeGuard[DecoderModel]:
    """Return whether the kernels cover all of *model*, and no hooks are registered on it."""
    # A subclass may compute something else.
    if not isinstance(model, DecoderModel) or type(model) not in (TransformerLanguageModel, TransformerXL):
        return False
    # A hook wants to see its module run, which kernels leave out.
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return False
    decoder, norm = model.decoder, None
    if type(decoder) is TransformerDecoder:
        norm = decoder.layer_norm
    elif type(decoder) is not TransformerXLDecoder or decoder.cfg.position_encoding not in BY_DISTANCE:
        return False
    floating = next(model.parameters()).dtype in (torch.float32, torch.bfloat16, torch.float16)
    return floating and packable(list(decoder.layers), norm) and packable_output(model.output_layer)


def _pack(compiled: Any, matrices: DecoderModel, model: DecoderModel, int8: bool) -> _Packed:
    """Pack *model*; matrices of layers and output come
    from *matrices*, the source of int8 values."""
    source, decoder = matrices.decoder, model.decoder
    norm: nn.Module | None = None
    project: nn.Linear | None = None
    widen: nn.Linear | None = None
    biases: AttentionBiases | None = None
    window: int | None = None
    looks_up = packable_embedding(decoder.embed_tokens)
    if isinstance(decoder, TransformerDecoder) and isinstance(source, TransformerDecoder):
        norm, project, widen = source.layer_norm, source.project_out_dim, decoder.project_in_dim
        window = decoder.cfg.attention_window
        looks_up = looks_up and decoder.layernorm_embedding is None and decoder.token_shift is None
    elif isinstance(decoder, TransformerXLDecoder):
        biases = decoder.attention_biases
        # `same_length`: every token attends to as many keys,
        # so that the kernel leaves out the farther ones.
        window = decoder.memory_length if decoder.cfg.same_length else None
    lookup = None
    if looks_up:
        lookup = PackedEmbedding(compiled, decoder.embed_tokens, widen, scale=decoder.embed_scale)
    return _Packed(
        model,
        lookup,
        PackedStack(compiled, list(source.layers), norm, project, biases=biases, int8=int8),
        PackedOutput(compiled, source.output_distribution, int8=int8),
        window,
    )
