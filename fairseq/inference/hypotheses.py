"""Hypotheses as fairseq's generator makes them:
texts that end at ``</s>`` or a length, with a score each."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq.inference.decoding import Decoding, best_continuations, choose
from fairseq.inference.predictor import Model, Predictor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hypothesis:
    """A text that begins with a prefix and, when it is complete, ends with ``</s>``."""

    tokens: list[int]
    lprobs: list[float]  # natural logarithm of each token's probability
    lenpen: float  # exponent of the length in the score

    @property
    def score(self) -> float:
        """The sum of the log-probabilities, divided by length ** ``lenpen``."""
        return math.fsum(self.lprobs) / len(self.tokens) ** self.lenpen

    def extended(self, token: int, lprobs: Tensor) -> Hypothesis:
        """This text with one token more, given the log-probabilities [V] of all."""
        return Hypothesis([*self.tokens, token], [*self.lprobs, float(lprobs[token])], self.lenpen)


@dataclass(frozen=True)
class Search:
    """Settings of a search."""

    beam: int = 1  # width, and number of texts where tokens are sampled
    max_len: int = 200  # most tokens of a text before ``</s>``, the prefix included
    min_len: int = 1  # fewest tokens before ``</s>``
    lenpen: float = 1.0  # exponent of the length that scores are divided by; above 1 longer texts are preferred
    no_repeat_ngram: int = 0  # length of n-grams that occur once in a text (0: any may be repeated)
    sampling: Decoding | None = None  # choice of sampled tokens; None: beam search


@torch.inference_mode()
def hypotheses(
    models: Sequence[Model],
    prefix: Sequence[int],
    search: Search,
    *,
    eos: int,
    start: Sequence[int] | None = None,
    forbidden: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> list[Hypothesis]:
    """Return the texts that a search finds, the best first.

    Args:
        models: in evaluation mode; their probabilities are averaged.
        prefix: the first tokens of every text, without *start*.
        search: settings.
        eos: the end of a text.
        start: what is read before the prefix (default:
            *eos*); empty for readers that begin with ``<s>``.
        forbidden: tokens that are never chosen.
        generator: random generator of sampled tokens.

    A longer prefix is cut at the length of a text, as in fairseq.
    """
    if len(prefix) >= search.max_len:
        logger.warning("`max_len_b` %d: a prefix of %d tokens fills the text", search.max_len, len(prefix))
        prefix = prefix[: search.max_len]
    predictor = Predictor(models, 1, forbidden, search.max_len + 2)
    texts, ended = [Hypothesis([], [], search.lenpen)], list[Hypothesis]()
    following = [[eos] if start is None else list(start)]
    for step in range(search.max_len + 1):
        lprobs = predictor.read(following)  # (texts, V)
        if step < len(prefix):
            # A prefix is read token by token, because its tokens are scored like chosen ones.
            live = [(0, prefix[step])]
        else:
            _restrict(lprobs, texts, search, eos)
            # Samples share the prefix, which is read once.
            if step == len(prefix) and search.sampling is not None:
                texts, lprobs = texts * search.beam, lprobs.expand(search.beam, -1)
                predictor.select_rows([0] * search.beam)
            chosen = (
                _sampled(lprobs, search.sampling, generator) if search.sampling else _best(lprobs, texts, search, eos)
            )
            ends = [texts[row].extended(token, lprobs[row]) for row, token in chosen if token == eos]
            # fairseq's rule: of the last step's ends the most probable fill the beam.
            ended += ends[: search.beam - len(ended)]
            live = [(row, token) for row, token in chosen if token != eos]
            if not live or len(ended) >= search.beam:
                break
        texts = [texts[row].extended(token, lprobs[row]) for row, token in live]
        predictor.select_rows([row for row, _ in live])
        following = [[token] for _, token in live]
    return sorted(ended, key=lambda hypothesis: -hypothesis.score)


def _restrict(lprobs: Tensor, texts: list[Hypothesis], search: Search, eos: int) -> None:
    """Give probability zero, in place, to what length and repetition forbid."""
    length, size = len(texts[0].tokens), search.no_repeat_ngram
    if length >= search.max_len:
        lprobs[:, :eos] = lprobs[:, eos + 1 :] = -math.inf
        return
    if length < search.min_len:
        lprobs[:, eos] = -math.inf
    for row, text in enumerate(texts if size else []):
        tokens = text.tokens
        last = tokens[len(tokens) - size + 1 :] if size > 1 else []
        starts = range(len(tokens) - size + 1)
        # Tokens that have followed the last n − 1 tokens before.
        lprobs[row, [tokens[i + size - 1] for i in starts if tokens[i : i + size - 1] == last]] = -math.inf


def _best(lprobs: Tensor, texts: list[Hypothesis], search: Search, eos: int) -> list[tuple[int, int]]:
    """Texts and tokens of the best continuations:
    ends among the first *beam*, and *beam* others."""
    sums = torch.tensor([math.fsum(text.lprobs) for text in texts], device=lprobs.device, dtype=torch.float64)
    # Each text has one continuation by the end:
    # of twice as many, enough others are left (fairseq's rule).
    values, [choices] = best_continuations(sums[None], lprobs.double()[None], min(2 * search.beam, lprobs.numel()))
    possible = [choice for choice, value in zip(choices, values[0].tolist(), strict=True) if value != -math.inf]
    ends = [choice for choice in possible[: search.beam] if choice[1] == eos]
    others = [choice for choice in possible if choice[1] != eos][: search.beam]
    return ends + others


def _sampled(lprobs: Tensor, decoding: Decoding, generator: torch.Generator | None) -> list[tuple[int, int]]:
    """Texts and one sampled token for each."""
    draws = torch.rand(len(lprobs), generator=generator, dtype=torch.float64)
    return list(enumerate(choose(lprobs, decoding, draws.to(lprobs.device)).tolist()))
