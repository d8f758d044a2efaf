"""Positions and distances: sinusoids, learned embeddings,
rotations; and what stands before a position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq.errors import UserError
from fairseq.modules.devices import exact_device
from fairseq.modules.dispatch import kernels

_MORE_ROWS = 256  # of a table of sinusoids


def sinusoids(count: int, dim: int, device: torch.device, start: int = 0) -> Tensor:
    """Sinusoidal embeddings of the positions start … start + count − 1: [count, dim], float32.

    The first half of the channels holds sines, the second half cosines, with frequencies
    exp(−i · ln 10000 / (dim/2 − 1)); an odd *dim* ends in a zero.
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


def distance_sinusoids(count: int, dim: int, device: torch.device, clamp: int | None = None) -> Tensor:
    """Transformer-XL's R for the distances count − 1, …, 0:
    [count, dim], float32 (Dai et al. 2019, §3.3).

    R_n = [sin(n f), cos(n f)] with f = 10000^(−2k/dim), k = 0 … dim/2 − 1; distances above *clamp*
    count as *clamp*.
    """
    distances = torch.arange(count - 1, -1, -1, dtype=torch.float32, device=device)
    if clamp is not None:
        distances = distances.clamp(max=clamp)
    frequencies = 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    angles = distances[:, None] * frequencies  # (count, dim/2)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


@dataclass(frozen=True)
class Rotation:
    """Angles by which the channels of a head turn
    with the position (Su et al. 2021, "RoFormer", §3.4).

    Attributes:
        dim: channels R that turn, an even number;
            of the first half and the second each makes a pair.
        base: ratio of the fastest frequency to the slowest, nearly.
        scaling: by which positions are divided (Chen et al. 2023, "Extending context window … via
            positional interpolation").
        trained: where it is not 0, only frequencies that make few turns
            in so many tokens are divided, as in Llama 3 (Grattafiori et al.
            2024, §3.4.1, after Peng et al. 2023, "YaRN").
    """

    dim: int
    base: float = 10000.0
    scaling: float = 1.0
    trained: int = 0

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians per position: [R/2], float32."""
        channels = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)
        frequencies = 1.0 / self.base ** (channels / self.dim)
        if not self.trained:
            return frequencies / self.scaling
        turns = self.trained * frequencies / (2 * math.pi)
        share = ((turns - FEW_TURNS) / (MANY_TURNS - FEW_TURNS)).clamp(0, 1)
        return frequencies * (share + (1 - share) / self.scaling)

    def table(self, count: int, device: torch.device) -> Tensor:
        """Cosines and sines of the positions 0 … count − 1: [count, 2, R/2], float32."""
        # In float64: the angle of position 2,000 has an error of 1e-4 in float32, and turning back
        # must give the same key.
        exact = exact_device(device)
        positions = torch.arange(count, dtype=torch.float64, device=exact)
        angles = positions[:, None] * self.frequencies(exact)  # (count, R/2)
        return torch.stack([angles.cos(), angles.sin()], dim=1).float().to(device)


FEW_TURNS, MANY_TURNS = 1.0, 4.0
"""Frequencies of fewer turns are divided, and of more are not; between them lies a mixture (Llama
3)."""


def rotated(x: Tensor, table: Tensor) -> Tensor:
    """*x* [..., T, D] with its first R channels turned
    as *table* [T, 2, R/2] says; computed in float32."""
    by_kernel = kernels("layers", x, table) if x.dim() == 4 else None
    if by_kernel is not None:
        return by_kernel.rotated(x, table, 1.0)
    cosines, sines = table.unbind(1)
    half = cosines.size(-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat([*(part.to(x.dtype) for part in turned), rest], dim=-1)


class SinusoidalPositions(nn.Module):
    """Sinusoids numbered from ``padding_idx + 1``,
    as the Baevski & Auli baseline adds them to its embeddings.

    Nothing is learned; ``_float_tensor`` is there because fairseq's checkpoints have it.
    """

    _float_tensor: Tensor

    def __init__(self, dim: int, padding_idx: int) -> None:
        super().__init__()
        self.dim = dim
        self.start = padding_idx + 1
        self.register_buffer("_float_tensor", torch.zeros(1))
        # Generation asks for one row at a time. No buffer: it stays float32 in a model of any type.
        self._table = torch.empty(0, dim)

    def forward(self, count: int, offset: int = 0) -> Tensor:
        """Embeddings of *count* tokens of which the first
        is number *offset* of its row: [count, dim]."""
        end, device = offset + count, self._float_tensor.device
        if torch.compiler.is_compiling():
            return sinusoids(count, self.dim, device, self.start + offset)
        table = self._table
        if table.size(0) < end or table.device != device:
            # A little longer than asked for: a row that grows by a token finds its table again.
            with torch.inference_mode(False):
                self._table = table = sinusoids(end + _MORE_ROWS, self.dim, device, self.start)
        return table[offset:end]


class LearnedPositions(nn.Embedding):
    """A learned embedding for each position, numbered from ``padding_idx + 1``.

    Args:
        count: the most tokens a row may have.
        padding_idx: id of the padding symbol; -1: there is none.
    """

    def __init__(self, count: int, dim: int, padding_idx: int) -> None:
        # fairseq numbers positions from padding_idx + 1 on, so that its tables begin with rows that
        # no token reads.
        super().__init__(count + padding_idx + 1, dim, padding_idx if padding_idx >= 0 else None)
        self.start = padding_idx + 1
        nn.init.normal_(self.weight, std=dim**-0.5)
        if self.padding_idx is not None:
            nn.init.zeros_(self.weight[padding_idx])

    def forward(self, count: int, offset: int = 0) -> Tensor:  # type: ignore[override]
        """Embeddings of *count* tokens of which the first
        is number *offset* of its row: [count, dim].

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
    """A causal convolution of each channel over time:
    y_t = x_t + Σ w_i ⊙ x_{t−i}, i from 1 to the reach.

    The first layer then has what a head would have to learn first: which word stands before (Olsson
    et al. 2022, "In-context learning and induction heads"; as convolutions So et al. 2021,
    "Primer", §3, and as time mixing Peng et al. 2023, "RWKV").

    Args:
        dim: channels C.
        reach: tokens R before each that are added to it.
    """

    def __init__(self, dim: int, reach: int) -> None:
        super().__init__()
        # 0.5 / i: pairs of words count from the first update on, which reaches a perplexity a
        # little sooner than zeros do. [R, 1, C]: not a matrix that is rounded to int8.
        distances = torch.arange(1, reach + 1)[:, None, None]
        self.weight = nn.Parameter((0.5 / distances).expand(reach, 1, dim).clone())

    def forward(
        self, x: Tensor, before: Tensor | None = None, document_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return *x* [B, T, C] with the tokens before each, and what the next call needs as
        *before*: [B, R, C].

        *before* are the inputs that precede *x*; None: *x* begins a segment, before which all
        inputs are zero. So they are before each document where rows hold several, of which
        *document_positions* [B, T] number the tokens.
        """
        reach, tokens = self.weight.size(0), x.size(1)
        if before is None:
            before = x.new_zeros(x.size(0), reach, x.size(2))
        padded = torch.cat([before.to(x.dtype), x], dim=1)  # (B, R + T, C)
        weight = self.weight.to(x.dtype)
        for i in range(1, reach + 1):
            shifted = padded[:, reach - i : reach - i + tokens]
            if document_positions is not None:
                shifted = shifted * (document_positions >= i)[..., None]
            x = torch.addcmul(x, shifted, weight[i - 1])
        return x, padded[:, tokens:]
