"""Choice of the next token, for a batch of prompts:
sampling, the most probable token, beam search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq.inference.predictor import Predictor

Prompt = Sequence[int]
Advance = tuple[int, list[int]]
"""A row and its new final tokens: one per step; in beam search all of them in the last step."""

# Quotients by temperatures beyond these overflow float32.
COLDEST, HOTTEST = 1e-30, 1e30


@dataclass(frozen=True)
class Decoding:
    """Length of a continuation and choice of its tokens.

    Attributes:
        max_tokens: number of tokens; an end of line counts as one and does not stop the text.
        temperature: divisor of the logits; 0 chooses the most probable token.
        top_k: sample from the k most probable tokens (0: all).
        top_p: sample from the most probable tokens with this total probability (Holtzman et al.
            2020, §3.1).
        beam: width of a beam search; above 1 the other choices are ignored.
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
            raise ValueError(f"temperature {self.temperature}: must be a finite number of at least 0")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must be greater than 0 and at most 1")
        if self.beam < 1:
            raise ValueError(f"beam {self.beam}: must be at least 1")

    @property
    def candidates(self) -> int:
        """Number of most probable tokens that the choice needs; 0: all."""
        # With top_p alone no number of candidates is known to suffice.
        return 1 if self.temperature == 0 else self.top_k


def choose(lprobs: Tensor, decoding: Decoding, draws: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
    """Choose one token from each distribution.

    Args:
        lprobs: log-probabilities [B, V], up to a constant for each row.
        decoding: temperature, top_k and top_p.
        draws: uniform random numbers in [0, 1), float64 [B]: its position in the cumulative
            distribution. Unused at temperature 0.
        tokens: the token of each column [B, V], if the columns are the ``decoding.candidates`` most
            probable tokens in falling order; None: column v is token v.

    Returns:
        [B].
    """
    if decoding.temperature == 0:
        return lprobs.argmax(-1) if tokens is None else tokens[:, 0]
    assert draws is not None
    temperature = min(max(decoding.temperature, COLDEST), HOTTEST)
    best = lprobs.amax(-1, keepdim=True) if tokens is None else lprobs[:, :1]
    # Less the best one, which is then 0 at any temperature: no quotient overflows to infinity.
    scores = (lprobs - best) / temperature
    if tokens is None and (decoding.top_k or decoding.top_p < 1):
        scores, tokens = scores.topk(min(decoding.top_k or lprobs.size(-1), lprobs.size(-1)))  # in falling order
    # In float32 a running sum near 1 would not change by probabilities below 3e-8.
    probabilities = scores.softmax(-1).double()
    if decoding.top_p < 1:
        # A token goes where those before it have reached top_p.
        probabilities[probabilities.cumsum(-1) - probabilities >= decoding.top_p] = 0
    cumulative = probabilities.cumsum(-1)
    # The draw is scaled to the sum of what is left, instead of all probabilities.
    index = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)
    # By rounding, a draw near 1 may lie behind the last sum.
    index = index.clamp(max=cumulative.size(-1) - 1)  # (B, 1)
    return (index if tokens is None else tokens.gather(1, index)).squeeze(1)


def sample_batch(
    predictor: Predictor, prompts: Sequence[Prompt], decoding: Decoding, generators: Sequence[torch.Generator | None]
) -> Iterator[list[Advance]]:
    """Continue *prompts*, ordered by falling length,
    token by token; yield the tokens chosen in each step.

    All rows read as many tokens as the shortest prompt has at once. After that, rows with a longer
    prompt read its next token while the others choose theirs, so that all rows have the same
    length; finished rows are dropped from the end. Each row draws from its own generator, so a
    sample does not depend on the other rows of its batch.
    """
    rows, position, following = len(prompts), 0, list[int]()
    numbers_of = [_draws(generator, decoding.max_tokens) for generator in generators]
    while rows:
        chunk = _prompt_chunk(prompts[:rows], position) or [[token] for token in following]
        position += len(chunk[0])
        waiting = sum(len(prompt) > position for prompt in prompts[:rows])
        tokens, draws = None, None
        if decoding.candidates:  # fewer than all
            lprobs, tokens = predictor.best(chunk, decoding.candidates, waiting)
        else:
            lprobs = predictor.read(chunk, waiting)
        if decoding.temperature > 0:
            numbers = [next(row) for row in numbers_of[waiting:rows]]
            # float64: draws of float32 would fall on one
            # of 2²⁴ steps, coarser than rare words' probabilities.
            draws = torch.tensor(numbers, dtype=torch.float64, device=lprobs.device)
        # The one synchronisation with a GPU of a step.
        chosen: list[int] = choose(lprobs, decoding, draws, tokens).tolist()
        yield [(row, [token]) for row, token in zip(range(waiting, rows), chosen, strict=True)]
        rows = _unfinished(prompts[:rows], position, decoding.max_tokens)
        following = ([prompt[position] for prompt in prompts[:waiting]] + chosen)[:rows]
        if rows:
            predictor.keep_rows(rows)


def beam_search(predictor: Predictor, prompts: Sequence[Prompt], decoding: Decoding) -> Iterator[list[Advance]]:
    """Continue *prompts*, ordered by falling length,
    by beam search for the highest sum of log-probabilities.

    All texts have ``max_tokens`` tokens, so sums need
    no length penalty. Rows advance as in :func:`sample_batch`.
    """
    rows, position, beam = len(prompts), 0, decoding.beam
    scores = torch.full((rows, beam), -torch.inf, device=predictor.device)
    scores[:, 0] = 0.0  # the beams start as one text
    texts, following = [[list[int]()] * beam for _ in prompts], list[list[int]]()
    width = 1  # predictor rows for each prompt: beams are identical until the shortest prompt is read
    while rows:
        chunk = _prompt_chunk(prompts[:rows], position, width) or following
        position += len(chunk[0])
        waiting = sum(len(prompt) > position for prompt in prompts[:rows])
        lprobs = predictor.read(chunk, waiting * width)
        if width < beam:
            width = beam
            predictor.select_rows([row for row in range(rows) for _ in range(beam)])
            lprobs = lprobs.repeat_interleave(beam, dim=0)
        following = [[prompt[position]] for prompt in prompts[:waiting] for _ in range(beam)]
        parents = list(range(waiting * beam))  # predictor row that each text continues
        lprobs = lprobs.view(rows - waiting, beam, -1)
        scores[waiting:rows], choices = best_continuations(scores[waiting:rows], lprobs, beam)
        for row, chosen in enumerate(choices, waiting):
            texts[row] = [[*texts[row][parent], token] for parent, token in chosen]
            following += [[token] for _, token in chosen]
            parents += [row * beam + parent for parent, _ in chosen]
        remaining = _unfinished(prompts[:rows], position, decoding.max_tokens)
        yield [(row, []) for row in range(waiting, remaining)] + [
            (row, texts[row][0]) for row in range(remaining, rows)
        ]
        rows = remaining
        following = following[: rows * beam]
        if rows:
            predictor.select_rows(parents[: rows * beam])


def best_continuations(scores: Tensor, lprobs: Tensor, count: int) -> tuple[Tensor, list[list[tuple[int, int]]]]:
    """Return the *count* best continuations of each prompt's texts by one token, the best first.

    Args:
        scores: sums of log-probabilities of the texts, [B, texts].
        lprobs: log-probabilities of their next tokens, [B, texts, V].
        count: at most texts · V.

    Returns:
        Sums, [B, count]; and for each prompt *count* pairs of a text's index and a token.
    """
    # One topk over texts and words together: (B, texts · V).
    sums, columns = (scores[:, :, None] + lprobs).flatten(1).topk(count)
    return sums, [[divmod(column, lprobs.size(-1)) for column in row] for row in columns.tolist()]


def _prompt_chunk(prompts: Sequence[Prompt], position: int, copies: int = 1) -> list[list[int]]:
    """Tokens of all prompts from *position* up to the end
    of the shortest, which is the last; empty beyond."""
    end = len(prompts[-1])
    if position >= end:
        return []
    return [list(prompt[position:end]) for prompt in prompts for _ in range(copies)]


def _unfinished(prompts: Sequence[Prompt], position: int, tokens: int) -> int:
    """Number of rows that need more tokens after the choice at *position*."""
    return sum(position - len(prompt) + 1 < tokens for prompt in prompts)


def _draws(generator: torch.Generator | None, count: int) -> Iterator[float]:
    """*count* uniform random numbers in [0, 1)."""
    device = generator.device if generator is not None else torch.get_default_device()
    # On CPUs numbers together are the numbers one by one,
    # for a fraction of the calls; on GPUs they differ.
    together = 64 if device.type == "cpu" else 1
    for start in range(0, count, together):
        size = min(together, count - start)
        yield from torch.rand(size, generator=generator, dtype=torch.float64, device=device).tolist()
