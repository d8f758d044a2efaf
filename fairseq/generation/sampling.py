"""Texts that go on from prompts: one as a stream, or many in batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from fairseq.generation.decoding import Advance, Decoding, Prompt, sampled, searched
from fairseq.generation.predictor import Autocast, Predictor, can_generate
from fairseq.models import BaseFairseqModel

Progress = Callable[[Iterable[Advance], int], Iterable[Advance]]
"""Shows how far an iterable of known length is: (items, length) → items; an item is a token."""


def generator_of(seed: int, prompt: int = 0, sample: int = 0) -> torch.Generator:
    """The source of randomness of one text: its *sample*-th from the *prompt*-th prompt, both counted from 0.

    Raises:
        ValueError: the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed {seed}: must be at least 0")
    state = np.random.SeedSequence([seed, prompt, sample]).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(state[0]) << 31 ^ int(state[1]))


def sample(
    model: BaseFairseqModel,
    prompt_tokens: Prompt,
    max_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    forbidden: Sequence[int] = (),
) -> Iterator[int]:
    """Tokens that go on from a prompt, each as soon as it is chosen.

    A model with memory (Shortformer, Transformer-XL) reads each token once and goes on for ever at a constant cost a
    token. A model without has room for one window of positions; when it is full, the model reads the window's last
    half again and goes on from there.

    Args:
        model: in evaluation mode, with a key-value cache (``new_cache``).
        prompt_tokens: at least one; a text starts with ``</s>``.
        max_tokens, temperature, top_k, top_p: see :class:`~fairseq.generation.decoding.Decoding`.
        generator: source of randomness (default: torch's own).
        forbidden: tokens that are never chosen.

    Raises:
        ValueError: a number is out of range, the prompt is empty, or the model has no cache.
    """
    how = Decoding(max_tokens, temperature, top_k, top_p)
    return stream([model], prompt_tokens, how, generator=generator, forbidden=forbidden)


def stream(
    models: Sequence[BaseFairseqModel],
    prompt: Prompt,
    how: Decoding,
    *,
    generator: torch.Generator | None = None,
    forbidden: Sequence[int] = (),
    autocast: Autocast = contextlib.nullcontext,
) -> Iterator[int]:
    """As :func:`sample`, from one model or the average of several; a beam search's text comes at its end."""
    for _, tokens in _advances(models, [prompt], how, [generator], forbidden, autocast):
        yield from tokens


def continuations(
    models: Sequence[BaseFairseqModel],
    prompts: Sequence[Prompt],
    how: Decoding,
    *,
    generators: Callable[[int], torch.Generator],
    batch_size: int = 1,
    forbidden: Sequence[int] = (),
    autocast: Autocast = contextlib.nullcontext,
    progress: Progress | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """The texts that go on from many prompts, each as soon as it is complete: (number of the prompt, tokens).

    Prompts of like length are read together, the longest first. To rounding, each text is what :func:`stream` gives.

    Args:
        models, how, forbidden, autocast: as in :func:`stream`.
        prompts: at least one token each.
        generators: makes the source of randomness of the prompt of a number, when its batch begins.
        batch_size: most rows that are read together; each text of a beam is one.
        progress: shows how many tokens of all are decided.

    Raises:
        ValueError: a prompt is empty, or a model has no cache.
    """
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    together = max(1, batch_size // how.beam)

    def advances() -> Iterator[Advance]:
        for start in range(0, len(order), together):
            batch = order[start : start + together]
            sources = [generators(number) for number in batch]
            rows = _advances(models, [prompts[number] for number in batch], how, sources, forbidden, autocast)
            yield from ((batch[row], tokens) for row, tokens in rows)

    texts: dict[int, list[int]] = {number: [] for number in order}
    items: Iterable[Advance] = advances()
    if progress is not None:
        items = progress(items, len(prompts) * how.max_tokens)
    for number, tokens in items:
        texts[number] += tokens
        if len(texts[number]) == how.max_tokens:
            yield number, texts.pop(number)
    yield from texts.items()  # where no token was asked for


@torch.inference_mode()
def _advances(
    models: Sequence[BaseFairseqModel],
    prompts: Sequence[Prompt],
    how: Decoding,
    generators: Sequence[torch.Generator | None],
    forbidden: Sequence[int],
    autocast: Autocast,
) -> Iterator[Advance]:
    """Every token of one batch, of prompts ordered by falling length."""
    for model in models:
        if not can_generate(model):
            raise ValueError(f"{type(model).__name__} cannot generate: it has no key-value cache")
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("prompt_tokens: at least one token is needed; a text starts with </s>")
    if how.max_tokens == 0:
        return
    longest = len(prompts[0]) + how.max_tokens
    predictor = Predictor(models, len(prompts), forbidden, autocast, longest)
    steps = searched(predictor, prompts, how) if how.beam > 1 else sampled(predictor, prompts, how, generators)
    for step in steps:
        yield from step
