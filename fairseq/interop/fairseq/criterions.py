"""Functions of fairseq's criterions that plug-ins call."""

from __future__ import annotations

from torch import Tensor


def label_smoothed_nll_loss(
    lprobs: Tensor, target: Tensor, epsilon: float, ignore_index: int | None = None, reduce: bool = True
) -> tuple[Tensor, Tensor]:
    """Smoothed and plain negative log-likelihood, summed, or of each target without *reduce*.

    The probability *epsilon* is spread over the words other than the target.

    Args:
        lprobs: log-probabilities [..., V].
        target: words [...] or [..., 1].
        epsilon: probability taken from the target.
        ignore_index: targets that count nothing.
        reduce: sum over the targets.
    """
    if target.dim() == lprobs.dim() - 1:
        target = target.unsqueeze(-1)
    nll = -lprobs.gather(-1, target)
    others = -lprobs.sum(-1, keepdim=True)
    if ignore_index is not None:
        ignored = target.eq(ignore_index)
        nll, others = nll.masked_fill(ignored, 0.0), others.masked_fill(ignored, 0.0)
    if reduce:
        nll, others = nll.sum(), others.sum()
    share = epsilon / (lprobs.size(-1) - 1)
    return (1.0 - epsilon - share) * nll + share * others, nll
