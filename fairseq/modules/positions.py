"""Embeddings of positions and distances, sinusoidal and learned, and of what stands before a position."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fairseq.errors import UserError

# Tables are made a little longer than asked for, so that a row that grows by a token finds its table again.
_TABLE_STEP = 256

F = TypeVar("F", bound=Callable[..., Tensor])


def cached_tensor(function: F) -> F:
    """Decorator that caches tensors, which callers must not modify, of as many calls as there are lengths in training.

    A compiled graph computes the tensor where it is read; tracing a cache would tie it to what is in there.
    """
    # The lengths of segments and memory that alternate in training and validation.
    remember = functools.lru_cache(maxsize=8)(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with torch.inference_mode(False):  # a later caller may need gradients
            return remember(*args, **kwargs)

    return cast(F, call)


@cached_tensor
def sinusoids(count: int, dim: int, device: torch.device, start: int = 0) -> Tensor:
    """Sinusoidal embeddings of the positions start … start + count − 1: [count, dim], float32.

    The first half of the channels holds sines, the second half cosines, with frequencies
    exp(−i · ln 10000 / (dim/2 − 1)); an odd *dim* ends in a zero. A pure function: its results are kept and shared,
    so they must not be changed.
    """
    # fairseq's spacing: half − 1 steps from frequency 1 to 1/10000; a single frequency has no step.
    half = dim // 2
    frequencies = torch.exp(
        torch.arange(half, dtype=torch.float32, device=device) * -(math.log(10000.0) / max(half - 1, 1))
    )
    positions = torch.arange(start, start + count, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies[None, :]  # (count, half)
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    if dim % 2:
        table = torch.cat([table, table.new_zeros(count, 1)], dim=1)
    return table


@cached_tensor
def distance_sinusoids(count: int, dim: int, device: torch.device, clamp: int | None = None) -> Tensor:
    """Transformer-XL's R for the distances count − 1, …, 0: [count, dim], float32 (Dai et al. 2019, §3.3).

    R_n = [sin(n f), cos(n f)] with f = 10000^(−2k/dim), k = 0 … dim/2 − 1; distances above *clamp* count as *clamp*. A
    pure function: its results are kept and shared, so they must not be changed.
    """
    distances = torch.arange(count - 1, -1, -1, dtype=torch.float32, device=device)
    if clamp is not None:
        distances = distances.clamp(max=clamp)
    frequencies = 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    angles = distances[:, None] * frequencies  # (count, dim/2)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class SinusoidalPositions(nn.Module):
    """Sinusoids numbered from ``padding_idx + 1``, as the Baevski & Auli baseline adds them to its embeddings.

    Nothing is learned; ``_float_tensor`` is there because fairseq's checkpoints have it.
    """

    _float_tensor: Tensor

    def __init__(self, dim: int, padding_idx: int) -> None:
        super().__init__()
        self.dim = dim
        self.start = padding_idx + 1
        self.register_buffer("_float_tensor", torch.zeros(1))

    def forward(self, count: int, offset: int = 0) -> Tensor:
        """Embeddings of *count* tokens of which the first is number *offset* of its row: [count, dim]."""
        end = -(-(offset + count) // _TABLE_STEP) * _TABLE_STEP
        return sinusoids(end, self.dim, self._float_tensor.device, self.start)[offset : offset + count]


class LearnedPositions(nn.Embedding):
    """A learned embedding for each position, numbered from ``padding_idx + 1``.

    Args:
        count: the most tokens a row may have.
        padding_idx: id of the padding symbol; -1: there is none.
    """

    def __init__(self, count: int, dim: int, padding_idx: int) -> None:
        # fairseq numbers positions from padding_idx + 1 on, so that its tables begin with rows that no token reads.
        super().__init__(count + padding_idx + 1, dim, padding_idx if padding_idx >= 0 else None)
        self.start = padding_idx + 1
        nn.init.normal_(self.weight, std=dim**-0.5)
        if self.padding_idx is not None:
            nn.init.zeros_(self.weight[padding_idx])

    def forward(self, count: int, offset: int = 0) -> Tensor:  # type: ignore[override]
        """Embeddings of *count* tokens of which the first is number *offset* of its row: [count, dim].

        Raises:
            UserError: the row is longer than the table.
        """
        first, known = self.start + offset, self.num_embeddings - self.start
        if offset + count > known:
            raise UserError(
                f"`max_target_positions`: a row of {offset + count} tokens is longer than the model's {known} learned "
                "positions; train with more, lower `tokens_per_sample` or leave out `add_bos_token`"
            )
        return self.weight[first : first + count]


class TokenShift(nn.Module):
    """A causal convolution of each channel over time: y_t = x_t + Σ w_i ⊙ x_{t−i}, i from 1 to the reach.

    The first layer then has what a head would have to learn first: which word stands before (Olsson et al. 2022,
    "In-context learning and induction heads"; as convolutions So et al. 2021, "Primer", §3, and as time mixing Peng
    et al. 2023, "RWKV").

    Args:
        dim: channels C.
        reach: tokens R before each that are added to it.
    """

    def __init__(self, dim: int, reach: int) -> None:
        super().__init__()
        # 0.5 / i: pairs of words count from the first update on, which reaches a perplexity a little sooner than zeros
        # do. [R, 1, C]: not a matrix that is rounded to int8.
        distances = torch.arange(1, reach + 1)[:, None, None]
        self.weight = nn.Parameter((0.5 / distances).expand(reach, 1, dim).clone())

    def forward(self, x: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return *x* [B, T, C] with the tokens before each, and what the next call needs as *before*: [B, R, C].

        *before* are the inputs that precede *x*; None: *x* begins a segment, before which all inputs are zero.
        """
        reach, tokens = self.weight.size(0), x.size(1)
        if before is None:
            before = x.new_zeros(x.size(0), reach, x.size(2))
        padded = torch.cat([before.to(x.dtype), x], dim=1)  # (B, R + T, C)
        weight = self.weight.to(x.dtype)
        for i in range(1, reach + 1):
            x = torch.addcmul(x, padded[:, reach - i : reach - i + tokens], weight[i - 1])
        return x, padded[:, tokens:]
