"""Adaptive softmax: frequent words in a head,
rare ones in narrow tail bands behind one head entry each.

Grave et al. 2017; weights and projections tied to adaptive
input embeddings as in Baevski & Auli 2019, §3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq.modules.adaptive_input import AdaptiveInput, bare_linear
from fairseq.modules.dropout import Dropout, dropout
from fairseq.modules.linear import linear
from fairseq.modules.output_layer import (
    OutputLayer,
    linear_cross_entropy,
    move_partition,
    row_chunks,
    select_rows,
    target_log_probs,
)

Partition = tuple[Tensor | None, Tensor, list[tuple[Tensor, Tensor]]]
"""Rows with a target (None: all), the head's target of each, and for each tail band (rows, targets
in the band)."""


class TiedLinear(nn.Module):
    """A linear map whose weight belongs to an embedding: x Wᵀ, or x W when *transpose*."""

    def __init__(self, weight: nn.Parameter, transpose: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.transpose = transpose

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t() if self.transpose else self.weight)


class TiedHead(nn.Module):
    """The head with the first band's embeddings as its words,
    and rows of its own for the tail bands."""

    def __init__(self, word_weight: nn.Parameter, input_dim: int, tails: int) -> None:
        super().__init__()
        words: nn.Module = TiedLinear(word_weight)
        if word_weight.size(1) != input_dim:
            # Embeddings narrower than the model: hidden states are brought to their width first.
            words = nn.Sequential(bare_linear(input_dim, word_weight.size(1)), words)
        self.word_proj = words
        self.class_proj = bare_linear(input_dim, tails)
        # As fairseq's checkpoints have it; they load strictly.
        self.register_buffer("_float_tensor", torch.zeros(1))

    def parts(self) -> list[Tensor]:
        """The weights of words [words, C] and of bands [tails, C],
        where the words' width is made the model's."""
        if isinstance(self.word_proj, TiedLinear):
            return [self.word_proj.weight, self.class_proj.weight]
        narrow, words = self.word_proj.children()
        return [words.weight @ narrow.weight, self.class_proj.weight]  # type: ignore[operator]


class Band(NamedTuple):
    """One softmax of an adaptive one: over the head's
    words and bands, or over a tail band's words."""

    narrow: Callable[[Tensor], Tensor]
    """Hidden states [N, C] → [N, d]."""
    weights: list[Tensor]
    """Some rows each of the weight [n, d]."""
    biases: list[Tensor]
    """As many pieces of the bias [n]; none where there is no bias."""

    def size(self) -> int:
        """The number n of its entries."""
        return sum(weight.size(0) for weight in self.weights)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of what :attr:`narrow` made of hidden states:
        [N, d] → [N, n]. The pieces are not put together first."""
        biases: Sequence[Tensor | None] = self.biases or [None] * len(self.weights)
        # Joining the weights instead would copy all of them for every batch.
        parts = [linear(hidden, weight, bias) for weight, bias in zip(self.weights, biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Summed negative log-likelihood of *target* [N] after hidden states [N, C]."""
        bias = _joined(self.biases) if self.biases else None
        return linear_cross_entropy(self.narrow(hidden), _joined(self.weights), target, bias)

    def target_log_probs(self, hidden: Tensor, target: Tensor, chunk: int | None) -> Tensor:
        """Log-probability of each *target* [N] after hidden states [N, C]; no gradient."""
        return target_log_probs(self.narrow(hidden), self.logits, self.size(), target, chunk)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Of all entries: [N, C] → [N, n], float32."""
        return self.logits(self.narrow(hidden)).float().log_softmax(-1)


class BandedSoftmax(OutputLayer):
    """log P(w) = log P_head(w) for a frequent word,
    log P_head(band) + log P_band(w) for a rare one.

    Grave et al. 2017. Subclasses say what each band's softmax is made of.

    Args:
        bounds: 0, the first word of each tail band, the number of words V.
        dropout: on the hidden states.
    """

    def __init__(self, bounds: list[int], dropout: float) -> None:
        super().__init__()
        self.bounds = bounds
        self.dropout = dropout

    def _head(self) -> Band:
        """Over the first band's words, then one entry for each tail band."""
        raise NotImplementedError

    def _tails(self) -> list[Band]:
        """Over each tail band's words."""
        raise NotImplementedError

    def partition(self, target: Tensor, padding_idx: int, band_padding: bool = False) -> Partition:
        """Sort *target* [N] into bands.

        With *band_padding* a word whose index within its tail band is *padding_idx* adds nothing to
        the band's loss, as in fairseq's ``adaptive_loss``, which so never trains one word a band.
        """
        rows, target = super().partition(target, padding_idx)
        head = target.clone()
        tails = []
        for band in range(1, len(self.bounds) - 1):
            first, last = self.bounds[band], self.bounds[band + 1]
            inside = (target >= first) & (target < last)
            # The head's entries for the tail bands follow its words.
            head[inside] = self.bounds[1] + band - 1
            if band_padding:
                inside = inside & (target != first + padding_idx)
            index = inside.nonzero().squeeze(1)
            tails.append((index, target[index] - first))
        return rows, head, tails

    def forward(self, hidden: Tensor, target: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Logits and targets of the head and of each tail band, for criterions that compute the
        loss of them.

        Hidden states [..., C] have as many targets; padding is a word of the first band.
        """
        _, head, tails = self.partition(target.reshape(-1), padding_idx=-1)
        hidden = dropout(hidden.reshape(-1, hidden.size(-1)), self.dropout, self.training)  # (N, C)
        first = self._head()
        logits: list[Tensor | None] = [first.logits(first.narrow(hidden))]
        targets: list[Tensor | None] = [head]
        for band, (index, inside) in zip(self._tails(), tails, strict=True):
            empty = not index.numel()
            logits.append(None if empty else band.logits(band.narrow(hidden.index_select(0, index))))
            targets.append(None if empty else inside)
        return logits, targets

    def get_log_prob(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        """Log-probabilities of all words, under fairseq's name of :meth:`log_probs`."""
        return self.log_probs(hidden)

    def loss(self, hidden: Tensor, partition: Partition) -> Tensor:
        rows, head, tails = partition
        if rows is not None:
            hidden = select_rows(hidden, rows)
        hidden = dropout(hidden, self.dropout, self.training)
        total = self._head().loss(hidden, head)
        # Bands without a target are computed too, so that every parameter gets a gradient.
        for band, (index, target) in zip(self._tails(), tails, strict=True):
            total = total + band.loss(select_rows(hidden, index), target)
        return total

    def target_log_probs(self, hidden: Tensor, target: Tensor, chunk: int | None = None) -> Tensor:
        # No word is −1: all targets are scored.
        _, head, tails = move_partition(self.partition(target, padding_idx=-1), hidden.device)
        result = self._head().target_log_probs(hidden, head, chunk)
        for band, (index, inside) in zip(self._tails(), tails, strict=True):
            # Without a gradient, an empty band need not be computed.
            if index.numel():
                chosen = select_rows(hidden, index)
                result.index_add_(0, index, band.target_log_probs(chosen, inside, chunk))
        return result

    def log_probs(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.size(-1))
        words = self.bounds[1]
        # Bands are written into one result: joining them would copy all [N, V] once more.
        result = torch.empty(flat.size(0), self.bounds[-1], dtype=torch.float32, device=flat.device)
        first, tails = self._head(), self._tails()
        for rows in row_chunks(flat.size(0), self.bounds[-1], flat.device):
            h, out = flat[rows], result[rows]
            head = first.log_probs(h)  # (n, words + tails)
            out[:, :words] = head[:, :words]
            for band, tail in enumerate(tails, start=1):
                inside = tail.log_probs(h)
                out[:, self.bounds[band] : self.bounds[band + 1]] = inside + head[:, words + band - 1, None]
        return result.view(*hidden.shape[:-1], self.bounds[-1])


class AdaptiveSoftmax(BandedSoftmax):
    """fairseq's: tail bands behind a projection each, no biases; tied to adaptive input as in
    Baevski & Auli 2019, §3.

    Args:
        vocab_size: number of words V.
        input_dim: the hidden states' width C.
        cutoff: first word of each tail band.
        dropout: on the hidden states, and inside the tail bands.
        factor: each band is this much narrower than the one before.
        adaptive_inputs: embeddings whose weights are the output's too.
        tie_proj: use the embeddings' projections too.
    """

    def __init__(
        self,
        vocab_size: int,
        input_dim: int,
        cutoff: list[int],
        dropout: float = 0.0,
        factor: float = 4.0,
        adaptive_inputs: AdaptiveInput | None = None,
        tie_proj: bool = False,
    ) -> None:
        super().__init__([0, *cutoff, vocab_size], dropout)
        tails = len(cutoff)
        self.head: nn.Module
        if adaptive_inputs is not None:
            self.head = TiedHead(adaptive_inputs.weights_for_band(0)[0], input_dim, tails)
        else:
            self.head = bare_linear(input_dim, cutoff[0] + tails)
        self.tail = nn.ModuleList()
        for band in range(1, tails + 1):
            dim = int(input_dim // factor**band)
            projection: nn.Module
            output: nn.Module
            if adaptive_inputs is not None:
                words, narrow = adaptive_inputs.weights_for_band(band)
                dim = words.size(1)
                output = TiedLinear(words)
                # The embeddings' projection leads from the band's
                # width to the model's; the output goes back.
                projection = TiedLinear(narrow, transpose=True) if tie_proj else bare_linear(input_dim, dim)
            else:
                projection = bare_linear(input_dim, dim)
                output = bare_linear(dim, self.bounds[band + 1] - self.bounds[band])
            self.tail.append(nn.Sequential(projection, Dropout(dropout), output))
        # A marker that fairseq's checkpoints have; they load strictly.
        self.register_buffer("version", torch.tensor([1], dtype=torch.long))

    def _head(self) -> Band:
        parts: Any = self.head.parts() if isinstance(self.head, TiedHead) else [self.head.weight]
        return Band(lambda hidden: hidden, parts, [])

    def _tails(self) -> list[Band]:
        # Of a band's modules the first two, projection and dropout, narrow the hidden states.
        return [Band(band[:2], [band[2].weight], []) for band in self.tail]  # type: ignore[index]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
