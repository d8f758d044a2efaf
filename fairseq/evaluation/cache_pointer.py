"""A pointer over a cache: what followed similar states earlier in the text is expected again.

Source: Grave et al. 2016, "Improving neural language models with a continuous cache". Their weights
are exp(θ h·h'); here states have length 1, which gained more with every size of the cache
(benchmarks/results/small.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq.modules.devices import exact

SHARPNESS = (5.0, 10.0, 20.0, 40.0)
"""Values that a fit tries."""
_QUERIES = 256  # states that read the cache at once


@dataclass(frozen=True)
class Pointer:
    """p = (1 − w) p_model + w Σᵢ aᵢ [tokenᵢ = y] with a = softmax(s cos(h, hᵢ)) over the last
    *states* states hᵢ, each of which predicted tokenᵢ.

    Attributes:
        sharpness: s.
        weight: w, from 0 to 1.
    """

    states: int
    sharpness: float
    weight: float

    def mixed(self, lprobs: Tensor, pointed: Tensor) -> Tensor:
        """Log-probabilities of the mixture: those of the model [N], and the probabilities [N] that
        :class:`CachePointer` gives; where that has none, the model's."""
        # In logarithms: the exponential of an improbable token may be 0.
        weight = torch.tensor(self.weight, dtype=lprobs.dtype)
        mixture = torch.logaddexp(lprobs + torch.log1p(-weight), pointed.clamp(min=0).log() + weight.log())
        return torch.where(pointed < 0, lprobs, mixture)


class CachePointer:
    """The last *states* states of a text that is read in order, and the tokens that they
    predicted.

    Args:
        sharpness: for each of these values the probabilities are computed, S in all.
    """

    def __init__(self, states: int, sharpness: Sequence[float]) -> None:
        self.states, self.sharpness = states, sharpness
        self.keys, self.tokens = torch.empty(0, 0), torch.empty(0, dtype=torch.long)

    def __call__(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Probabilities that the cache gives to *tokens* [N], which states *hidden* [N, C] predict
        and which follow those of the last call: [S, N]; −1 where the cache is empty."""
        queries = F.normalize(hidden.float(), dim=1)
        tokens = tokens.to(queries.device)
        known = len(self.tokens)
        keys = torch.cat([self.keys.to(queries), queries]) if known else queries
        seen = torch.cat([self.tokens.to(tokens), tokens])
        result = queries.new_empty(len(self.sharpness), len(queries))
        place = torch.arange(len(seen), device=tokens.device)
        for first in range(0, len(queries), _QUERIES):
            rows = slice(first, min(first + _QUERIES, len(queries)))
            own = place[known:][rows, None]
            span = slice(max(0, known + first - self.states), known + rows.stop)
            outside = (place[span] >= own) | (place[span] < own - self.states)
            cosines = (queries[rows] @ keys[span].T).masked_fill(outside, -torch.inf)
            same = seen[span] == tokens[rows, None]
            for number, sharpness in enumerate(self.sharpness):
                result[number, rows] = ((sharpness * cosines).softmax(1) * same).sum(1)
        # Copied: a view would keep all states of this call.
        self.keys, self.tokens = keys[-self.states :].clone(), seen[-self.states :].clone()
        if not known:
            result[:, :1] = -1  # the softmax of nothing is NaN
        return result


def fitted(states: int, lprobs: Tensor, pointed: Tensor) -> Pointer:
    """The pointer with the largest likelihood of a text, from the model's log-probabilities [N]
    and those of a cache [S, N], for each of :data:`SHARPNESS`.

    The likelihood is concave in the weight: expectation and maximisation in turns reach its
    maximum.
    """
    found: list[tuple[float, Pointer]] = []
    lprobs = exact(lprobs)
    of_model = lprobs.exp()
    for sharpness, of_cache in zip(SHARPNESS, exact(pointed), strict=True):
        known = of_cache >= 0
        weight = 0.5
        for _ in range(100):
            share = weight * of_cache
            weight = float((share / ((1 - weight) * of_model + share))[known].mean())
        pointer = Pointer(states, sharpness, weight)
        found.append((float(pointer.mixed(lprobs, of_cache).mean()), pointer))
    return max(found, key=lambda each: each[0])[1]
