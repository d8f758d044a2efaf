"""Adaptive softmax: frequent words in a head, rare ones in narrow tail bands behind one head entry each.

Grave et al. 2017; weights and projections tied to adaptive input embeddings as in Baevski & Auli 2019, §3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.modules.adaptive_input import AdaptiveInput
from fairseq.modules.dropout import Dropout, dropout
from fairseq.modules.linear_cross_entropy import linear_cross_entropy, rows_per_chunk, target_log_probs
from fairseq.modules.output_layer import OutputLayer, move_partition

Partition = tuple[Tensor | None, Tensor, list[tuple[Tensor, Tensor]]]
"""Rows with a target (None: all), the head's target of each, and for each tail band (rows, targets in the band)."""


class TiedLinear(nn.Module):
    """A linear map whose weight belongs to an embedding: x Wᵀ, or x W when *transpose*."""

    def __init__(self, weight: nn.Parameter, transpose: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.transpose = transpose

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t() if self.transpose else self.weight)


class TiedHead(nn.Module):
    """The head with the first band's embeddings as its words, and rows of its own for the tail bands."""

    def __init__(self, word_weight: nn.Parameter, input_dim: int, tails: int) -> None:
        super().__init__()
        words: nn.Module = TiedLinear(word_weight)
        if word_weight.size(1) != input_dim:
            words = nn.Sequential(_linear(input_dim, word_weight.size(1)), words)
        self.word_proj = words
        self.class_proj = _linear(input_dim, tails)
        self.register_buffer("_float_tensor", torch.zeros(1))

    @property
    def weight(self) -> Tensor:
        """One matrix for words and bands [words + tails, C], where the words' width is the model's."""
        words: Tensor = self.word_proj.weight if isinstance(self.word_proj, TiedLinear) else self._narrow_words()
        return torch.cat([words, self.class_proj.weight])

    def _narrow_words(self) -> Tensor:
        narrow, words = self.word_proj.children()
        return words.weight @ narrow.weight  # type: ignore[operator]


class AdaptiveSoftmax(OutputLayer):
    """log P(w) = log P_head(w) for a frequent word, log P_head(band) + log P_band(w) for a rare one.

    Args:
        vocabulary: number of words V.
        input_dim: the hidden states' width C.
        cutoffs: first word of each tail band.
        dropout: on the hidden states, and inside the tail bands.
        factor: each band is this much narrower than the one before.
        adaptive_inputs: embeddings whose weights are the output's too.
        tie_proj: use the embeddings' projections too.
    """

    def __init__(
        self,
        vocabulary: int,
        input_dim: int,
        cutoffs: list[int],
        *,
        dropout: float = 0.0,
        factor: float = 4.0,
        adaptive_inputs: AdaptiveInput | None = None,
        tie_proj: bool = False,
    ) -> None:
        super().__init__()
        self.bounds = [0, *cutoffs, vocabulary]
        self.dropout = dropout
        tails = len(cutoffs)
        self.head: nn.Module
        if adaptive_inputs is not None:
            self.head = TiedHead(adaptive_inputs.weights(0)[0], input_dim, tails)
        else:
            self.head = _linear(input_dim, cutoffs[0] + tails)
        self.tail = nn.ModuleList()
        for band in range(1, tails + 1):
            dim = int(input_dim // factor**band)
            projection: nn.Module
            output: nn.Module
            if adaptive_inputs is not None:
                words, narrow = adaptive_inputs.weights(band)
                dim = words.size(1)
                output = TiedLinear(words)
                projection = TiedLinear(narrow, transpose=True) if tie_proj else _linear(input_dim, dim)
            else:
                projection = _linear(input_dim, dim)
                output = _linear(dim, self.bounds[band + 1] - self.bounds[band])
            self.tail.append(nn.Sequential(projection, Dropout(dropout), output))
        self.register_buffer("version", torch.tensor([1], dtype=torch.long))

    def partition(self, target: Tensor, padding_idx: int, legacy_padding: bool = False) -> Partition:
        """Sort *target* [N] into bands.

        With *legacy_padding* a word whose index within its tail band is *padding_idx* adds nothing to the band's loss,
        as in fairseq's ``adaptive_loss``, which so never trains one word a band.
        """
        rows: Tensor | None = None
        keep = target != padding_idx
        if not bool(keep.all()):
            rows = keep.nonzero().squeeze(1)
            target = target[rows]
        head = target.clone()
        tails = []
        for band in range(1, len(self.bounds) - 1):
            first, last = self.bounds[band], self.bounds[band + 1]
            inside = (target >= first) & (target < last)
            head[inside] = self.bounds[1] + band - 1
            if legacy_padding:
                inside = inside & (target != first + padding_idx)
            index = inside.nonzero().squeeze(1)
            tails.append((index, target[index] - first))
        return rows, head, tails

    def loss(self, hidden: Tensor, partition: Partition) -> Tensor:
        rows, head, tails = partition
        if rows is not None:
            hidden = hidden[rows]
        hidden = dropout(hidden, self.dropout, self.training)
        total = linear_cross_entropy(hidden, self._head_weight(), head)
        for band, (index, target) in zip(self.tail, tails, strict=True):
            projection, drop, output = band.children()
            narrow = drop(projection(hidden.index_select(0, index)))
            total = total + linear_cross_entropy(narrow, _weight(output), target)
        return total

    def target_log_probs(self, hidden: Tensor, target: Tensor, chunk: int | None = None) -> Tensor:
        _, head, tails = move_partition(self.partition(target, padding_idx=-1), hidden.device)
        result = target_log_probs(hidden, self._head_weight(), head, chunk)
        for band, (index, inside) in zip(self.tail, tails, strict=True):
            if index.numel():
                projection, _, output = band.children()
                narrow = projection(hidden.index_select(0, index))
                result.index_add_(0, index, target_log_probs(narrow, _weight(output), inside, chunk))
        return result

    def log_probs(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.size(-1))
        words = self.bounds[1]
        result = torch.empty(flat.size(0), self.bounds[-1], dtype=torch.float32, device=flat.device)
        step = rows_per_chunk(flat.size(0), self.bounds[-1], flat.device)
        for start in range(0, flat.size(0), max(step, 1)):
            h, out = flat[start : start + step], result[start : start + step]
            head = F.linear(h, self._head_weight()).float().log_softmax(-1)  # (n, words + tails)
            out[:, :words] = head[:, :words]
            for band, (projection, _, output) in enumerate(map(nn.Module.children, self.tail), start=1):
                inside = output(projection(h)).float().log_softmax(-1)
                out[:, self.bounds[band] : self.bounds[band + 1]] = inside + head[:, words + band - 1, None]
        return result.view(*hidden.shape[:-1], -1)

    def _head_weight(self) -> Tensor:
        return _weight(self.head)


def _weight(module: nn.Module) -> Tensor:
    return module.weight  # type: ignore[return-value]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.xavier_uniform_(layer.weight)
    return layer
