"""How the next token is chosen, and for many prompts together: sampling, the most probable token, beam search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq.generation.predictor import Predictor

Prompt = Sequence[int]
Advance = tuple[int, list[int]]
"""A row of which one more token is decided, and the tokens that are certain now: in beam search all, at the end."""

COLDEST, HOTTEST = 1e-30, 1e30  # temperatures beyond choose as these do, but float32 has no quotients by them


@dataclass(frozen=True)
class Decoding:
    """How a text goes on.

    Attributes:
        max_tokens: how many tokens it goes on for; an end of line counts as one and ends nothing.
        temperature: logits are divided by it; 0 chooses the most probable token.
        top_k: choose among the k most probable tokens (0: all).
        top_p: choose among the most probable tokens that together have this probability (Holtzman et al. 2020, §3.1).
        beam: above 1, the most probable text that a beam search of this width finds, whatever the rest says.
    """

    max_tokens: int = 100
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    beam: int = 1

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens {self.max_tokens}: must be at least 0")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature}: must be a number from 0 on")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must be greater than 0 and at most 1")
        if self.beam < 1:
            raise ValueError(f"beam {self.beam}: must be at least 1")

    @property
    def random(self) -> bool:
        """Whether chance decides anything."""
        return self.beam == 1 and self.temperature > 0


def choose(lprobs: Tensor, how: Decoding, chance: Tensor | None = None) -> Tensor:
    """One token of each distribution.

    Args:
        lprobs: log-probabilities [B, V].
        how: temperature, top_k and top_p.
        chance: a number from 0 up to 1 for each row, float64 [B]: how far up its cumulative distribution its token
            lies. Not needed at temperature 0.

    Returns:
        [B].
    """
    if how.temperature == 0:
        return lprobs.argmax(-1)
    assert chance is not None
    temperature = min(max(how.temperature, COLDEST), HOTTEST)
    scores, tokens = (lprobs - lprobs.amax(-1, keepdim=True)) / temperature, None  # the best stays 0 at any temperature
    if how.top_k or how.top_p < 1:
        scores, tokens = scores.topk(min(how.top_k or lprobs.size(-1), lprobs.size(-1)))  # from the most probable on
    probabilities = scores.softmax(-1).double()
    if how.top_p < 1:
        probabilities[probabilities.cumsum(-1) - probabilities >= how.top_p] = 0  # those before it suffice
    cumulative = probabilities.cumsum(-1)
    place = torch.searchsorted(cumulative, chance[:, None] * cumulative[:, -1:], right=True)
    place = place.clamp(max=cumulative.size(-1) - 1)  # (B, 1)
    return (place if tokens is None else tokens.gather(1, place)).squeeze(1)


def sampled(
    predictor: Predictor, prompts: Sequence[Prompt], how: Decoding, generators: Sequence[torch.Generator | None]
) -> Iterator[list[Advance]]:
    """Continue *prompts*, the longest first, token by token; each step gives the tokens that it chose.

    Rows read together what their prompts have in common in length. Then those with a longer prompt are fed its next
    token where the others choose theirs, so that all stand at one place; rows that are finished, the last first,
    leave. Each row draws from its own generator: what is sampled does not depend on the other rows.
    """
    rows, position, following = len(prompts), 0, list[int]()
    while rows:
        chunk = _prompt_chunk(prompts[:rows], position) or [[token] for token in following]
        position += len(chunk[0])
        waiting = sum(len(prompt) > position for prompt in prompts[:rows])
        lprobs = predictor.read(chunk, waiting)
        chance = None
        if how.temperature > 0:
            draws = [_draw(generator) for generator in generators[waiting:rows]]
            chance = torch.tensor(draws, dtype=torch.float64, device=lprobs.device)
        chosen: list[int] = choose(lprobs, how, chance).tolist()
        yield [(row, [token]) for row, token in zip(range(waiting, rows), chosen, strict=True)]
        rows = _unfinished(prompts[:rows], position, how.max_tokens)
        following = ([prompt[position] for prompt in prompts[:waiting]] + chosen)[:rows]
        if rows:
            predictor.keep_rows(rows)


def searched(predictor: Predictor, prompts: Sequence[Prompt], how: Decoding) -> Iterator[list[Advance]]:
    """Continue *prompts*, the longest first, with what beam search finds: the highest sum of log-probabilities.

    All texts have ``max_tokens`` tokens, so that sums compare as they are. Rows stay together as in :func:`sampled`.
    """
    rows, position, beam = len(prompts), 0, how.beam
    beams = _Beams(rows, beam, how.max_tokens, predictor.device)
    width = 1  # rows of the predictor for each prompt: their beams are the same until the first has read its prompt
    while rows:
        chunk = _prompt_chunk(prompts[:rows], position, width) or beams.following
        position += len(chunk[0])
        waiting = sum(len(prompt) > position for prompt in prompts[:rows])
        lprobs = predictor.read(chunk, waiting * width)
        if width < beam:
            width = beam
            predictor.select_rows(torch.arange(rows).repeat_interleave(beam))
            lprobs = lprobs.repeat_interleave(beam, dim=0)
        columns = [position - len(prompt) for prompt in prompts[waiting:rows]]
        parents = beams.extend(lprobs.view(rows - waiting, beam, -1), waiting, columns)
        forced = [[prompt[position]] for prompt in prompts[:waiting] for _ in range(beam)]
        beams.following[: waiting * beam] = forced
        left = _unfinished(prompts[:rows], position, how.max_tokens)
        ended = [(row, beams.best(row)) for row in range(left, rows)]
        yield [(row, []) for row in range(waiting, left)] + ended
        rows = left
        if rows:
            predictor.select_rows(parents[: rows * beam])
            beams.following = beams.following[: rows * beam]


class _Beams:
    """The texts that a search holds on to for each prompt, the best first.

    Attributes:
        scores: summed log-probabilities [rows, beam].
        texts: [rows, beam, tokens].
        following: the token that each is to read next, [rows · beam, 1].
    """

    def __init__(self, rows: int, beam: int, tokens: int, device: torch.device) -> None:
        self.beam = beam
        self.scores = torch.full((rows, beam), -torch.inf, device=device)
        self.scores[:, 0] = 0.0  # at first all are the same text: one of them is enough
        self.texts = torch.zeros(rows, beam, tokens, dtype=torch.long, device=device)
        self.following: list[list[int]] = [[0]] * (rows * beam)

    def extend(self, lprobs: Tensor, first: int, columns: Sequence[int]) -> Tensor:
        """Add a token to the texts of the rows from *first* on.

        Args:
            lprobs: of each of their texts, [rows − first, beam, V].
            columns: how many tokens the texts of each have so far, [rows − first].

        Returns:
            The text that each continues, numbered through all rows: [rows · beam].
        """
        count, beam, vocabulary = lprobs.shape
        rows = slice(first, first + count)
        candidates = self.scores[rows, :, None] + lprobs  # (rows - first, beam, V)
        self.scores[rows], place = candidates.flatten(1).topk(beam)
        parents, tokens = place // vocabulary, place % vocabulary
        for row, column in enumerate(columns):
            self.texts[first + row] = self.texts[first + row, parents[row]]
            self.texts[first + row, :, column] = tokens[row]
        self.following[first * beam : (first + count) * beam] = tokens.view(-1, 1).tolist()
        start = torch.arange(first + count, device=parents.device)[:, None] * beam
        before = torch.arange(beam, device=parents.device).expand(first, beam)
        return (start + torch.cat([before, parents])).flatten()

    def best(self, row: int) -> list[int]:
        """The tokens of a row's best text."""
        return self.texts[row, 0].tolist()


def _prompt_chunk(prompts: Sequence[Prompt], position: int, copies: int = 1) -> list[list[int]]:
    """What all prompts, the longest first, have from *position* up to the end of the shortest; empty beyond."""
    end = len(prompts[-1])
    if position >= end:
        return []
    return [list(prompt[position:end]) for prompt in prompts for _ in range(copies)]


def _unfinished(prompts: Sequence[Prompt], position: int, tokens: int) -> int:
    """How many rows still lack tokens, when at *position* all that have read their prompt have chosen one."""
    return sum(position - len(prompt) + 1 < tokens for prompt in prompts)


def _draw(generator: torch.Generator | None) -> float:
    device = generator.device if generator is not None else None
    return float(torch.rand((), generator=generator, dtype=torch.float64, device=device))
