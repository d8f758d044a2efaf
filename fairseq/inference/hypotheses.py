"""Hypotheses as fairseq's generator makes them: texts that end at ``</s>`` or a length, with a score each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq.errors import UserError
from fairseq.inference.decoding import Decoding, choose
from fairseq.inference.predictor import Model, Predictor


@dataclass(frozen=True)
class Hypothesis:
    """A text that begins with a prefix and ends with ``</s>``.

    Attributes:
        tokens: all of them.
        lprobs: natural logarithm of each token's probability.
        score: their sum, divided by length ** length penalty.
    """

    tokens: list[int]
    lprobs: list[float]
    score: float


@dataclass(frozen=True)
class Search:
    """Settings of a search.

    Attributes:
        beam: width, and number of texts where tokens are sampled.
        max_len: most tokens of a text before ``</s>``, the prefix included.
        min_len: fewest tokens before ``</s>``.
        lenpen: exponent of the length that scores are divided by; above 1 longer texts are preferred.
        no_repeat_ngram: length of n-grams that occur once in a text (0: any may be repeated).
        sampling: choice of sampled tokens; None: beam search.
    """

    beam: int = 1
    max_len: int = 200
    min_len: int = 1
    lenpen: float = 1.0
    no_repeat_ngram: int = 0
    sampling: Decoding | None = None


@dataclass
class _Rows:
    """The texts that are still being written."""

    tokens: list[list[int]]
    lprobs: list[list[float]]

    def extended(self, chosen: Sequence[tuple[int, int, float]]) -> _Rows:
        """New texts: row, token and log-probability of each."""
        return _Rows(
            [[*self.tokens[row], token] for row, token, _ in chosen],
            [[*self.lprobs[row], lprob] for row, _, lprob in chosen],
        )


@torch.inference_mode()
def hypotheses(
    models: Sequence[Model],
    prefix: Sequence[int],
    how: Search,
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
        how: settings.
        eos: the end of a text.
        start: what is read before the prefix (default: *eos*); empty for readers that begin with ``<s>``.
        forbidden: tokens that are never chosen.
        generator: random generator of sampled tokens.

    Raises:
        UserError: the prefix is as long as a text may be.
    """
    if len(prefix) >= how.max_len:
        raise UserError(f"--max-len-b: texts of {how.max_len} tokens have no room after {len(prefix)} of a prefix")
    predictor = Predictor(models, 1, forbidden, how.max_len + 2)
    rows, ended = _Rows([[]], [[]]), list[Hypothesis]()
    following = [[eos] if start is None else list(start)]
    for step in range(how.max_len + 1):
        lprobs = predictor.read(following)  # (rows, V)
        if step < len(prefix):
            token = prefix[step]
            rows, parents = rows.extended([(0, token, float(lprobs[0, token]))]), [0]
        else:
            _restrict(lprobs, rows.tokens, how, step, eos)
            if step == len(prefix) and how.beam > 1 and how.sampling is not None:
                lprobs = lprobs.expand(how.beam, -1)
                rows = _Rows(rows.tokens * how.beam, rows.lprobs * how.beam)
                predictor.select_rows(torch.zeros(how.beam, dtype=torch.long))
            chosen = _sampled(lprobs, how, generator) if how.sampling is not None else _best(lprobs, rows, how, eos)
            grown = rows.extended(chosen)
            finished = [index for index, (_, token, _) in enumerate(chosen) if token == eos]
            ended += [_ended(grown.tokens[index], grown.lprobs[index], how) for index in finished]
            alive = [index for index in range(len(chosen)) if index not in finished]
            if not alive or len(ended) >= how.beam:
                break
            alive = alive[: how.beam]
            parents = [chosen[index][0] for index in alive]
            rows = _Rows([grown.tokens[index] for index in alive], [grown.lprobs[index] for index in alive])
        predictor.select_rows(torch.tensor(parents))
        following = [[text[-1]] for text in rows.tokens]
    return sorted(ended, key=lambda hypothesis: -hypothesis.score)[: how.beam]


def _restrict(lprobs: Tensor, texts: list[list[int]], how: Search, step: int, eos: int) -> None:
    """Give probability zero, in place, to what length and repetition forbid."""
    if step >= how.max_len:
        end = lprobs[:, eos].clone()
        lprobs.fill_(-math.inf)
        lprobs[:, eos] = end
        return
    if step < how.min_len:
        lprobs[:, eos] = -math.inf
    size = how.no_repeat_ngram
    for row, text in enumerate(texts if size else []):
        last = text[len(text) - size + 1 :] if size > 1 else []
        repeated = [text[i + size - 1] for i in range(len(text) - size + 1) if text[i : i + size - 1] == last]
        lprobs[row, repeated] = -math.inf


def _best(lprobs: Tensor, rows: _Rows, how: Search, eos: int) -> list[tuple[int, int, float]]:
    """Rows, tokens and log-probabilities of the best continuations: ends among the first *beam*, and *beam* others."""
    sums = torch.tensor([math.fsum(values) for values in rows.lprobs], device=lprobs.device, dtype=torch.float64)
    totals = (sums[:, None] + lprobs.double()).flatten()
    values, places = totals.topk(min(2 * how.beam, totals.numel()))
    chosen: list[tuple[int, int, float]] = []
    alive = 0
    for rank, (value, place) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
        row, token = divmod(place, lprobs.size(-1))
        if value == -math.inf or alive == how.beam or (token == eos and rank >= how.beam):
            continue
        alive += token != eos
        chosen.append((row, token, float(lprobs[row, token])))
    return chosen


def _sampled(lprobs: Tensor, how: Search, generator: torch.Generator | None) -> list[tuple[int, int, float]]:
    """Rows, tokens and log-probabilities of one sampled token a row."""
    assert how.sampling is not None
    draws = torch.rand(len(lprobs), generator=generator, dtype=torch.float64)
    tokens = choose(lprobs, how.sampling, draws.to(lprobs.device)).tolist()
    return [(row, token, float(lprobs[row, token])) for row, token in enumerate(tokens)]


def _ended(tokens: list[int], lprobs: list[float], how: Search) -> Hypothesis:
    return Hypothesis(tokens, lprobs, math.fsum(lprobs) / len(tokens) ** how.lenpen)
