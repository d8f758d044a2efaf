"""Adaptive input embeddings: frequent words get wide vectors,
rare ones narrow (Baevski & Auli 2019, §3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq.modules.dispatch import is_cpu
from fairseq.modules.linear import Linear


def word_embedding(words: int, dim: int, padding_idx: int | None, std: float | None = None) -> nn.Embedding:
    """Embeddings [words, dim] of standard deviation *std*, or with fairseq's initial values;
    padding's row is zero."""
    embedding = nn.Embedding(words, dim, padding_idx)
    # fairseq's vectors have a norm of about 1 whatever
    # their width, so that all bands are of one scale.
    nn.init.normal_(embedding.weight, std=dim**-0.5 if std is None else std)
    if padding_idx is not None:
        nn.init.zeros_(embedding.weight[padding_idx])
    return embedding


def bare_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear map without a bias, with fairseq's initial values (Glorot & Bengio 2010)."""
    linear = Linear(inputs, outputs, bias=False)
    nn.init.xavier_uniform_(linear.weight)
    return linear


class AdaptiveInput(nn.Module):
    """Embeddings in bands: band i, words cutoff[i−1] … cutoff[i] − 1, has width
    ``initial_dim / factor**i``.

    Every token is looked up in every band and the right one is taken: a little arithmetic more, but
    shapes that do not depend on the data, so nothing synchronises with the device and the compiler
    can keep one graph.

    Args:
        vocabulary: number of words V.
        padding_idx: its embedding is zero and is not trained; None: there is none.
        initial_dim: width of the first band.
        factor: how much narrower each band is than the one before.
        output_dim: the model's width C.
        cutoffs: first word of each band after the first.
        projections: ``own``: each band has one to the model's width; ``shared``: all bands have the
            same one, or none if they have that width already.
        init_std: standard deviation of initial embeddings; None: fairseq's.
    """

    def __init__(
        self,
        vocabulary: int,
        padding_idx: int | None,
        initial_dim: int,
        factor: float,
        output_dim: int,
        cutoffs: list[int],
        projections: str = "own",
        init_std: float | None = None,
    ) -> None:
        super().__init__()
        self.bounds = [0, *cutoffs, vocabulary]
        self.embedding_dim = output_dim
        self.padding_idx = padding_idx
        self.embeddings = nn.ModuleList()
        shared = projections == "shared"
        projection: nn.Linear | None = None
        for band, (first, last) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            # Rounded as fairseq does, whose checkpoints have these widths.
            dim = int(initial_dim // factor**band)
            # Special symbols come first, so padding is a word of the first band.
            embedding = word_embedding(last - first, dim, padding_idx if band == 0 else None, init_std)
            if not shared or (projection is None and initial_dim != output_dim):
                projection = bare_linear(dim, output_dim)
            self.embeddings.append(nn.Sequential(embedding, *([projection] if projection is not None else [])))
        if padding_idx is not None:
            self.register_buffer("_float_tensor", torch.zeros(1))  # fairseq's checkpoints have it

    def weights_for_band(self, band: int) -> list[nn.Parameter]:
        """Embedding [words, d] and, if it has one, projection [C, d] of a band."""
        return [module.weight for module in self.embeddings[band].children()]  # type: ignore[misc]

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of *tokens* [B, T]: [B, T, C]."""
        result: Tensor | None = None
        for band, (first, last) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            embedded = self.embeddings[band](_rows(tokens, first, last))
            # Bands ascend: the last one that begins at or below a word is the word's.
            above = (tokens >= first).unsqueeze(-1)
            result = embedded if result is None else torch.where(above, embedded, result)
        assert result is not None
        return result


def _rows(tokens: Tensor, first: int, last: int) -> Tensor:
    """The rows of *tokens* in the table of words *first*
    … *last* − 1; rows of other words are not taken.

    A GPU sums the gradients of one row serially, even where all are 0: there other words get rows
    apart. On a CPU one row stays in cache.
    """
    if is_cpu(tokens):
        return (tokens - first).clamp(0, last - first - 1)
    apart = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape) % (last - first)
    return torch.where((tokens >= first) & (tokens < last), tokens - first, apart)
