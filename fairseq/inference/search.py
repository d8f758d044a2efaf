"""Texts that continue prompts: one search that samples, takes the most probable token, or keeps a
beam.

All rows of a batch are at one position of the key-value cache: the common length of the prompts is
read at once, then longer prompts read their own tokens while the others choose. There is no
padding, so that a text does not depend on its batch; its randomness is (seed, prompt, sample).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fairseq.inference.reader import Predictor, Reader
from fairseq.logging import Progress, no_progress
from fairseq.models.base import BaseFairseqModel
from fairseq.modules import devices

logger = logging.getLogger(__name__)

# Quotients by temperatures beyond these overflow float32.
COLDEST, HOTTEST = 1e-30, 1e30

Model = BaseFairseqModel | Reader
"""A model, or a reader of it, which packs its weights once for many searches."""


@dataclass(frozen=True)
class Search:
    """How texts are chosen.

    With *eos* a search finds hypotheses as fairseq's generator does: texts that begin with their
    prompt and end with *eos*, at the latest after ``max_tokens``, with a score of every token.
    Without it, texts are what follows a prompt and have ``max_tokens`` tokens.

    Attributes:
        max_tokens: number of tokens; an end of line counts as one. Of hypotheses at most, without
            *eos*.
        temperature: divisor of the logits in sampling; 0 searches for the most probable text.
        top_k: sample from the k most probable tokens (0: all).
        top_p: sample from the most probable tokens with this total probability (Holtzman et al.
            2020, §3.1).
        beam: width of the search (1: the most probable token); in sampling, texts of each prompt.
        eos: the end of hypotheses; -1: none.
        min_tokens: fewest tokens of a hypothesis before *eos*.
        lenpen: exponent of the length that scores of hypotheses are divided by; above 1 longer
            texts are preferred.
        no_repeat_ngram: length of n-grams that occur once in a hypothesis (0: any may be repeated).
    """

    max_tokens: int = 100
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    beam: int = 1
    eos: int = -1
    min_tokens: int = 1
    lenpen: float = 1.0
    no_repeat_ngram: int = 0

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
    def scored(self) -> bool:
        """Whether every token has a score: in hypotheses, and in a beam, which is chosen by
        them."""
        return self.eos >= 0 or (self.temperature == 0 and self.beam > 1)

    @property
    def candidates(self) -> int:
        """Number of most probable tokens that sampling needs; 0: all."""
        # With top_p alone no number of candidates is known to suffice.
        return 1 if self.temperature == 0 else self.top_k


@dataclass
class Hypothesis:
    """One text, or its beginning.

    Attributes:
        lprobs: natural logarithm of each token's probability; empty if the search needs none.
        score: their sum; of a complete hypothesis divided by length ** ``lenpen``.
    """

    tokens: list[int] = field(default_factory=list)
    lprobs: list[float] = field(default_factory=list)
    score: float = 0.0

    def add(self, token: int, lprob: float | None) -> None:
        """Append a token."""
        self.tokens.append(token)
        if lprob is not None:
            self.lprobs.append(lprob)
            self.score += lprob


@dataclass
class _Prompt:
    """A prompt in a search: each of its live texts is a row of the cache."""

    number: int
    tokens: list[int]
    draws: Iterator[float]
    live: list[Hypothesis] = field(default_factory=lambda: [Hypothesis()])
    ended: list[Hypothesis] = field(default_factory=list)
    begun: bool = False  # a token has been chosen

    @property
    def is_complete(self) -> bool:
        return not self.live


def generate(
    models: Sequence[Model],
    prompts: Sequence[Sequence[int]],
    search: Search,
    *,
    generators: Callable[[int], torch.Generator | None] = lambda number: None,
    batch_size: int = 1,
    forbidden: Sequence[int] = (),
    stop: int = -1,
    progress: Progress = no_progress,
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """The texts of each prompt, the best first, as soon as they are complete: (number of the
    prompt, texts).

    A model with memory (Shortformer, Transformer-XL) reads each token once, at a constant cost a
    token and without a limit of length. A model without memory has one window of positions; when it
    is full, the model reads the window's second half again and continues from there. Prompts of
    similar length are batched, the longest first.

    Args:
        models: in evaluation mode, with a key-value cache, over one dictionary; their probabilities
            are averaged.
        prompts: at least one token each, unless the reader begins rows with ``<s>``; a text starts
            with ``</s>``.
        generators: makes the random generator of a prompt, by its number, when its batch begins
            (default: torch's own).
        batch_size: most rows of a batch; each text of a beam counts as one.
        forbidden: tokens that are never chosen.
        stop: a text that is no hypothesis ends before this token.
        progress: shows the number of tokens that are final.

    Raises:
        ValueError: a prompt is empty, or a model has no key-value cache.
        UserError: a model's probabilities are NaN.
    """
    readers = _readers(models, prompts)
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    together = max(1, batch_size // search.beam)

    def steps() -> Iterator[_Prompt]:
        for start in range(0, len(order), together):
            batch = [
                _Prompt(number, list(prompts[number]), _draws(generators(number)))
                for number in order[start : start + together]
            ]
            for step in _search(readers, batch, search, forbidden, stop):
                yield from step

    for prompt in progress(steps(), len(prompts) * search.max_tokens):
        if prompt.is_complete:
            for text in prompt.ended:
                if stop in text.tokens:
                    del text.tokens[text.tokens.index(stop) :]
            yield prompt.number, prompt.ended


def stream(
    models: Sequence[Model],
    prompt: Sequence[int],
    search: Search,
    *,
    generator: torch.Generator | None = None,
    forbidden: Sequence[int] = (),
    stop: int = -1,
) -> Iterator[int]:
    """The tokens of the text that :func:`generate` finds, each as soon as it is chosen; a beam's at
    the end."""
    one, shown = _Prompt(0, list(prompt), _draws(generator)), 0
    for _ in _search(_readers(models, [prompt]), [one], search, forbidden, stop):
        if search.beam == 1 or one.is_complete:
            new = (one.live or one.ended)[0].tokens[shown:]
            shown += len(new)
            for token in new:
                if token == stop:
                    return
                yield token


def generator_of(seed: int, prompt: int = 0, sample: int = 0) -> torch.Generator:
    """The random generator of one text: sample number *sample* of prompt number *prompt*, both from
    0.

    Raises:
        ValueError: the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed {seed}: must be at least 0")
    # Hashed: with a sum, prompt 2 of seed 1 would get the text of prompt 1 of seed 2.
    state = np.random.SeedSequence([seed, prompt, sample]).generate_state(2, np.uint32)
    # 63 bits: manual_seed takes signed numbers of 64.
    return torch.Generator().manual_seed(int(state[0]) << 31 ^ int(state[1]))


def _draws(generator: torch.Generator | None) -> Iterator[float]:
    """Uniform random numbers in [0, 1)."""
    device = generator.device if generator is not None else torch.get_default_device()
    # On CPUs numbers together are the numbers one by one, for a fraction of the calls; on GPUs they
    # differ, and of torch's own generator others are not to be taken.
    together = 64 if generator is not None and device.type == "cpu" else 1
    while True:
        # float64: draws of float32 would fall on one of 2²⁴ steps, coarser than rare words'
        # probabilities.
        if not devices.has_float64(device):
            high, low = torch.rand(2, generator=generator, device=device).tolist()
            yield high + low * 2.0**-24
            continue
        yield from torch.rand(together, generator=generator, dtype=torch.float64, device=device).tolist()


def _readers(models: Sequence[Model], prompts: Sequence[Sequence[int]]) -> list[Reader]:
    readers = [model if isinstance(model, Reader) else Reader(model) for model in models]
    for reader in readers:
        if not reader.model.can_generate:
            raise ValueError(f"{type(reader.module).__name__} cannot generate: it has no key-value cache")
    if readers[0].begin is None and any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("prompt_tokens: at least one token is needed; a text starts with </s>")
    return readers


@torch.inference_mode()
def _search(
    readers: Sequence[Reader], prompts: list[_Prompt], search: Search, forbidden: Sequence[int], stop: int
) -> Iterator[list[_Prompt]]:
    """Search for the texts of *prompts*, ordered by falling length; after each step yield the
    prompts whose texts have grown."""
    if search.eos >= 0:
        for prompt in prompts:
            _cut(prompt, search, first=int(readers[0].begin is None))
    elif search.max_tokens == 0:
        for prompt in prompts:
            prompt.live, prompt.ended = [], [Hypothesis()]
        yield prompts
        return
    predictor = Predictor(readers, len(prompts), forbidden, len(prompts[0].tokens) + search.max_tokens)
    position, end = 0, len(prompts[-1].tokens)
    tokens = [prompt.tokens[:end] for prompt in prompts]
    while prompts:
        hidden = predictor.read(tokens)
        position = end
        waiting = sum(len(prompt.tokens) > position for prompt in prompts)  # they read on, one row each
        if search.eos >= 0:
            _score_prompts(predictor, prompts, waiting, hidden, position)
        choose_next = _best if search.scored and search.temperature == 0 else _sampled
        last = [states[waiting:, -1] for states in hidden]
        # The row that each new row continues: rows of ended texts are dropped, others repeated.
        parents, row = list(range(waiting)), waiting
        choosing = prompts[waiting:]
        for prompt, chosen in zip(choosing, choose_next(predictor, last, choosing, search), strict=True):
            rows = len(prompt.live)
            parents += [row + place for place in _continue(prompt, chosen, search, stop)]
            row += rows
        # Not one by one: to leave and enter inference mode takes longer than to continue a text.
        yield choosing
        prompts = [prompt for prompt in prompts if not prompt.is_complete]
        if prompts:
            predictor.select_rows(parents)
            end = max(position + 1, len(prompts[-1].tokens))
            tokens = [prompt.tokens[position:end] for prompt in prompts[:waiting]]
            tokens += [[text.tokens[-1]] for prompt in prompts[waiting:] for text in prompt.live]


def _cut(prompt: _Prompt, search: Search, first: int) -> None:
    """Cut the tokens of *prompt* from *first* on, with which hypotheses begin, at the length of a
    text, as fairseq."""
    count = len(prompt.tokens) - first
    if count >= search.max_tokens:
        logger.warning("`max_len_b` %d: a prefix of %d tokens fills the text", search.max_tokens, count)
        del prompt.tokens[first + search.max_tokens :]


def _score_prompts(
    predictor: Predictor, prompts: Sequence[_Prompt], waiting: int, hidden: Sequence[Tensor], position: int
) -> None:
    """Begin the hypotheses of *prompts* with the tokens that *hidden* predict, up to *position*."""
    width = hidden[0].size(1)
    rows = len(prompts) if width > 1 else waiting  # one of each prompt that is not complete before
    if rows == 0:
        return
    # The last state of a complete prompt predicts none of its tokens: 0 stands for it.
    targets = [[*prompt.tokens, 0][position - width + 1 : position + 1] for prompt in prompts[:rows]]
    lprobs = predictor.target_log_probs([states[:rows] for states in hidden], targets)
    for row, prompt in enumerate(prompts[:rows]):
        for column in range(width if row < waiting else width - 1):
            prompt.live[0].add(targets[row][column], lprobs[row][column])


Chosen = tuple[int, int, float | None]
"""A live text of a prompt, its next token, and the token's log-probability where it is known."""


def _sampled(
    predictor: Predictor, hidden: Sequence[Tensor], prompts: Sequence[_Prompt], search: Search
) -> list[list[Chosen]]:
    """One token for each live text; the first tokens of all texts of a prompt are drawn from one
    distribution."""
    tokens = draws = None
    if search.candidates and not search.scored:  # fewer than all
        lprobs, tokens = predictor.best(hidden, search.candidates)
    else:
        lprobs = predictor.log_probs(hidden)
        _restrict(lprobs, prompts, search)
    places = [[*range(len(prompt.live))] if prompt.begun else [0] * search.beam for prompt in prompts]
    if search.beam > 1:
        firsts = itertools.accumulate((len(prompt.live) for prompt in prompts), initial=0)
        parents = [first + place for first, each in zip(firsts, places, strict=False) for place in each]
        index = torch.tensor(parents, device=lprobs.device)
        lprobs, tokens = lprobs[index], None if tokens is None else tokens[index]
    if search.temperature > 0:
        numbers = [next(prompt.draws) for prompt, each in zip(prompts, places, strict=True) for _ in each]
        draws = torch.tensor(numbers, dtype=torch.float64, device=devices.exact_device(lprobs.device))
    index = choose(lprobs, search, draws, tokens)
    scores = iter(lprobs.gather(1, index[:, None]).squeeze(1).tolist()) if search.scored else None
    # The one synchronisation with a GPU of a step.
    chosen = iter(index.tolist())
    return [[(place, next(chosen), next(scores) if scores else None) for place in each] for each in places]


def choose(lprobs: Tensor, search: Search, draws: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
    """Choose one token from each distribution.

    Args:
        lprobs: log-probabilities [B, V], up to a constant for each row.
        search: temperature, top_k and top_p.
        draws: uniform random numbers in [0, 1), float64 [B]: its position in the cumulative
            distribution. Unused at temperature 0.
        tokens: the token of each column [B, V], if the columns are the ``search.candidates`` most
            probable tokens in falling order; None: column v is token v.

    Returns:
        [B].
    """
    if search.temperature == 0:
        return lprobs.argmax(-1) if tokens is None else tokens[:, 0]
    assert draws is not None
    temperature = min(max(search.temperature, COLDEST), HOTTEST)
    best = lprobs.amax(-1, keepdim=True) if tokens is None else lprobs[:, :1]
    # Less the best one, which is then 0 at any temperature: no quotient overflows to infinity.
    scores = (lprobs - best) / temperature
    if tokens is None and (search.top_k or search.top_p < 1):
        scores, tokens = scores.topk(min(search.top_k or lprobs.size(-1), lprobs.size(-1)))  # in falling order
    # In float32 a running sum near 1 would not change by probabilities below 3e-8.
    probabilities = devices.exact(scores.softmax(-1))
    if search.top_p < 1:
        # A token goes where those before it have reached top_p.
        probabilities[probabilities.cumsum(-1) - probabilities >= search.top_p] = 0
    cumulative = probabilities.cumsum(-1)
    # The draw is scaled to the sum of what is left, instead of all probabilities.
    index = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)
    # By rounding, a draw near 1 may lie behind the last sum.
    index = index.clamp(max=cumulative.size(-1) - 1).to(lprobs.device)  # (B, 1)
    return (index if tokens is None else tokens.gather(1, index)).squeeze(1)


def _best(
    predictor: Predictor, hidden: Sequence[Tensor], prompts: Sequence[_Prompt], search: Search
) -> list[list[Chosen]]:
    """The best continuations of each prompt's texts by one token, the best first: ends among the
    first ``beam``, and ``beam`` others."""
    lprobs = predictor.log_probs(hidden)
    _restrict(lprobs, prompts, search)
    # Each text has one continuation by the end: of twice as many, enough others are left (fairseq's
    # rule).
    count = search.beam if search.eos < 0 else 2 * search.beam
    values, tokens = lprobs.topk(min(count, lprobs.size(-1)))  # (texts, k)
    scores = [text.score for prompt in prompts for text in prompt.live]
    exact = devices.exact_device(lprobs.device)
    sums = torch.tensor(scores, dtype=torch.float64, device=exact)[:, None] + values.to(exact)
    if search.beam == 1:  # the continuations of the only text are ranked
        best, columns = sums.tolist(), [list(range(values.size(1)))] * len(prompts)
    else:
        best, columns = _ranked(sums, prompts, search.beam, count)
    of_texts, lprobs_of = tokens.tolist(), values.tolist()
    found, first = [], 0
    for prompt, totals, indices in zip(prompts, best, columns, strict=True):
        ranked = [
            divmod(index, values.size(1)) for index, total in zip(indices, totals, strict=True) if total > -math.inf
        ]
        chosen = [(place, of_texts[first + place][rank], lprobs_of[first + place][rank]) for place, rank in ranked]
        ends = [one for one in chosen[: search.beam] if one[1] == search.eos]
        found.append(ends + [one for one in chosen if one[1] != search.eos][: search.beam])
        first += len(prompt.live)
    return found


def _ranked(
    sums: Tensor, prompts: Sequence[_Prompt], beam: int, count: int
) -> tuple[list[list[float]], list[list[int]]]:
    """The *count* largest *sums* [texts, k] of each prompt, and where they stand in [beam · k]."""
    if len(sums) == len(prompts) * beam:
        table = sums.view(len(prompts), beam, -1)
    else:  # some prompts have fewer texts than the beam
        table = sums.new_full((len(prompts), beam, sums.size(1)), -torch.inf)
        owners = [number for number, prompt in enumerate(prompts) for _ in prompt.live]
        table[owners, [place for prompt in prompts for place in range(len(prompt.live))]] = sums
    best, columns = table.flatten(1).topk(min(count, table[0].numel()))  # (prompts, count)
    return best.tolist(), columns.tolist()


def _restrict(lprobs: Tensor, prompts: Sequence[_Prompt], search: Search) -> None:
    """Give probability zero, in place, to what length and repetition forbid in hypotheses."""
    eos, size = search.eos, search.no_repeat_ngram
    for row, text in enumerate([text for prompt in prompts for text in prompt.live] if eos >= 0 else []):
        tokens = text.tokens
        if len(tokens) >= search.max_tokens:
            lprobs[row, :eos] = lprobs[row, eos + 1 :] = -math.inf
            continue
        if len(tokens) < search.min_tokens:
            lprobs[row, eos] = -math.inf
        if size:
            last = tokens[len(tokens) - size + 1 :] if size > 1 else []
            starts = range(len(tokens) - size + 1)
            # Tokens that have followed the last n − 1 tokens before.
            lprobs[row, [tokens[i + size - 1] for i in starts if tokens[i : i + size - 1] == last]] = -math.inf


def _continue(prompt: _Prompt, chosen: Sequence[Chosen], search: Search, stop: int) -> list[int]:
    """Continue the texts of *prompt*; return the former text of each live one."""
    live, places = [], []
    for place, token, lprob in chosen:
        text = prompt.live[place]
        if len(chosen) > 1:  # several may continue it
            text = Hypothesis([*text.tokens], [*text.lprobs], text.score)
        text.add(token, lprob)
        if token == search.eos:
            # fairseq's rule: of the last step's ends the most probable fill the beam.
            if len(prompt.ended) < search.beam:
                prompt.ended.append(text)
        elif search.eos < 0 and (len(text.tokens) == search.max_tokens or (token == stop and not search.scored)):
            prompt.ended.append(text)
        else:
            live.append(text)
            places.append(place)
    if not live or len(prompt.ended) >= search.beam:
        live, places = [], []
        for text in prompt.ended:
            text.score /= len(text.tokens) ** search.lenpen
        prompt.ended.sort(key=lambda text: -text.score)
    prompt.live, prompt.begun = live, True
    return places
