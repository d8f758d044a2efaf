"""The names of ``fairseq.modules`` that plug-ins import, with fairseq's constructors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq.errors import UserError
from fairseq.modules import adaptive_input
from fairseq.modules.dropout import Dropout, dropout
from fairseq.modules.norms import layer_norm
from fairseq.modules.positions import sinusoids
from fairseq.modules.transformer_layer import FUNCTIONS

_ACTIVATIONS = {**FUNCTIONS, "swish": F.silu}


def get_activation_fn(activation: str) -> Callable[[Tensor], Tensor]:
    """The activation called *activation*.

    Raises:
        UserError: there is none.
    """
    if activation not in _ACTIVATIONS:
        raise UserError(f"`activation_fn` {activation}: choose from {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[activation]


def get_available_activation_fns() -> list[str]:
    return sorted(_ACTIVATIONS)


def make_positions(tensor: Tensor, padding_idx: int, onnx_trace: bool = False) -> Tensor:
    """The position of each token, from ``padding_idx`` + 1; padding is at *padding_idx*: [B, T]."""
    mask = tensor.ne(padding_idx).int()
    return (mask.cumsum(1).type_as(mask) * mask).long() + padding_idx


class AdaptiveInput(adaptive_input.AdaptiveInput):
    """Adaptive input embeddings; quantisation noise is not implemented and ignored at 0."""

    def __init__(
        self,
        vocab_size: int,
        padding_idx: int,
        initial_dim: int,
        factor: float,
        output_dim: int,
        cutoff: list[int],
        q_noise: float = 0,
        qn_block_size: int = 8,
    ) -> None:
        if q_noise:
            raise NotImplementedError("AdaptiveInput: quantisation noise is not implemented; use q_noise=0")
        super().__init__(vocab_size, padding_idx, initial_dim, factor, output_dim, cutoff)


class FairseqDropout(Dropout):
    """Dropout in training, or always with *apply_during_inference*."""

    apply_during_inference = False

    def __init__(self, p: float, module_name: str | None = None) -> None:
        super().__init__(p)

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        return dropout(x, self.p, self.training or self.apply_during_inference)


def LayerNorm(
    normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = True, export: bool = False
) -> nn.Module:
    """A layer norm; NVIDIA apex's where it is installed, as in this package's models."""
    # `layer_norm` has these settings only, and apex's kernel cannot be traced for an export.
    if eps == 1e-5 and elementwise_affine and not export:
        return layer_norm(normalized_shape)
    return torch.nn.LayerNorm(normalized_shape, eps, elementwise_affine)


class LearnedPositionalEmbedding(nn.Embedding):
    """A learned embedding for each position, numbered from *padding_idx* + 1; padding not
    counted."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.max_positions = num_embeddings - (0 if padding_idx is None else padding_idx + 1)

    def forward(self, input: Tensor, incremental_state: Any = None, positions: Tensor | None = None) -> Tensor:
        """The positions of the tokens *input*: [B, T] → [B, T, C]."""
        return super().forward(_positions(input, self.padding_idx) if positions is None else positions)


class SinusoidalPositionalEmbedding(nn.Module):
    """Sinusoids of positions, numbered from *padding_idx* + 1; zero for padding, which is not
    counted."""

    # Types are those that TorchScript knows: scripts of fairseq's users compile this module.

    def __init__(self, embedding_dim: int, padding_idx: int, init_size: int = 1024) -> None:
        super().__init__()
        self.embedding_dim, self.padding_idx, self.max_positions = embedding_dim, padding_idx, int(1e5)
        # Decoders copied from fairseq add it to every state that they load.
        self.register_buffer("_float_tensor", torch.zeros(1))

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Replace the table of former versions in *state_dict* by the buffer."""
        state_dict.pop(f"{name}.weights", None)
        state_dict[f"{name}._float_tensor"] = self.get_buffer("_float_tensor")

    def forward(
        self, input: Tensor, incremental_state: Any = None, timestep: Any = None, positions: Tensor | None = None
    ) -> Tensor:
        """The positions of the tokens *input*: [B, T] → [B, T, C]."""
        positions = _positions(input, self.padding_idx) if positions is None else positions
        # Positions reach `padding_idx` + T, and row 0 counts, too.
        table = sinusoids(input.size(1) + max(self.padding_idx, 0) + 2, self.embedding_dim, input.device)
        return table[positions].masked_fill(positions.eq(self.padding_idx)[..., None], 0.0)


def PositionalEmbedding(num_embeddings: int, embedding_dim: int, padding_idx: int, learned: bool = False) -> nn.Module:
    """Learned positions for *num_embeddings* tokens, or sinusoids."""
    if not learned:
        return SinusoidalPositionalEmbedding(embedding_dim, padding_idx)
    padding = padding_idx if padding_idx is not None and padding_idx >= 0 else None
    rows = num_embeddings + (0 if padding is None else padding + 1)
    module = LearnedPositionalEmbedding(rows, embedding_dim, padding)
    nn.init.normal_(module.weight, std=embedding_dim**-0.5)
    if padding is not None:
        nn.init.zeros_(module.weight[padding])
    return module


def _positions(tokens: Tensor, padding_idx: int | None) -> Tensor:
    if padding_idx is None or padding_idx < 0:
        return torch.arange(tokens.size(1), device=tokens.device).expand(tokens.shape)
    return make_positions(tokens, padding_idx)


class LayerDropModuleList(nn.ModuleList):
    """Layers of which an iteration in training skips each with probability *p* (Fan et al.
    2020)."""

    def __init__(self, p: float, modules: Iterable[nn.Module] | None = None) -> None:
        super().__init__(modules)
        self.p = p

    def __iter__(self) -> Iterator[nn.Module]:
        draws = torch.rand(len(self)).tolist() if self.training and self.p else [1.0] * len(self)
        return (layer for layer, draw in zip(super().__iter__(), draws, strict=True) if draw > self.p or not self.p)


def quant_noise(module: nn.Module, p: float, block_size: int) -> nn.Module:
    """*module*: quantisation noise is not implemented.

    Raises:
        NotImplementedError: *p* is not 0.
    """
    if p:
        raise NotImplementedError("quant_noise: not implemented; use 0")
    return module


def checkpoint_wrapper(m: nn.Module, offload_to_cpu: bool = False) -> nn.Module:
    """*m*, whose activations are computed again in the backward pass."""
    forward = m.forward
    # On the instance: the class, and with it the names in checkpoints, stays as it is.
    m.forward = lambda *args, **options: checkpoint(forward, *args, use_reentrant=False, **options)
    return m


def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """The cross entropy of *target* [N] by *logits* [N, V], in float32."""
    return F.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction=reduction)


gelu = F.gelu
gelu_accurate = get_activation_fn("gelu_accurate")
