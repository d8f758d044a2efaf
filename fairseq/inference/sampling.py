"""Continuations of prompts: one as a stream, or many in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from fairseq.inference.decoding import Advance, Decoding, Prompt, beam_search, sample_batch
from fairseq.inference.predictor import Model, Predictor, reader_of
from fairseq.logging import Progress, no_progress


def generator_of(seed: int, prompt: int = 0, sample: int = 0) -> torch.Generator:
    """The random generator of one text: sample number
    *sample* of prompt number *prompt*, both from 0.

    Raises:
        ValueError: the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed {seed}: must be at least 0")
    # Hashed: with a sum, prompt 2 of seed 1 would get the text of prompt 1 of seed 2.
    state = np.random.SeedSequence([seed, prompt, sample]).generate_state(2, np.uint32)
    # 63 bits: manual_seed takes signed numbers of 64.
    return torch.Generator().manual_seed(int(state[0]) << 31 ^ int(state[1]))


def sample(
    model: Model,
    prompt_tokens: Prompt,
    max_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    forbidden: Sequence[int] = (),
) -> Iterator[int]:
    """Tokens that continue a prompt, each as soon as it is chosen.

    A model with memory (Shortformer, Transformer-XL) reads each token once, at a constant cost a
    token and without a limit of length. A model without memory has one window of positions; when it
    is full, the model reads the window's second half again and continues from there.

    Args:
        model: in evaluation mode, with a key-value cache (``new_cache``); or a :class:`Reader` of
            it, which packs its weights once for many texts.
        prompt_tokens: at least one; a text starts with ``</s>``.
        max_tokens, temperature, top_k, top_p: see :class:`~fairseq.inference.decoding.Decoding`.
        generator: random generator (default: torch's own).
        forbidden: tokens that are never chosen.

    Raises:
        ValueError: a number is out of range, the prompt
            is empty, or the model has no key-value cache.
    """
    decoding = Decoding(max_tokens, temperature, top_k, top_p)
    return stream([model], prompt_tokens, decoding, generator=generator, forbidden=forbidden)


def stream(
    models: Sequence[Model],
    prompt: Prompt,
    decoding: Decoding,
    *,
    generator: torch.Generator | None = None,
    forbidden: Sequence[int] = (),
    stop: int = -1,
) -> Iterator[int]:
    """As :func:`sample`, from one model or the average
    of several; beam search yields its text at the end. The text ends before the token *stop*."""
    for step in _steps(models, [prompt], decoding, [generator], forbidden):
        for _, tokens in step:
            yield from tokens[: _end(tokens, stop)]
            if stop in tokens:
                return


def continuations(
    models: Sequence[Model],
    prompts: Sequence[Prompt],
    decoding: Decoding,
    *,
    generators: Callable[[int], torch.Generator],
    batch_size: int = 1,
    forbidden: Sequence[int] = (),
    stop: int = -1,
    progress: Progress = no_progress,
) -> Iterator[tuple[int, list[int]]]:
    """Continuations of many prompts, each as soon
    as it is complete: (number of the prompt, tokens).

    Prompts of similar length are batched, the longest first. Up to rounding, :func:`stream` gives
    the same texts.

    Args:
        models, decoding, forbidden, stop: as in :func:`stream`.
        prompts: at least one token each.
        generators: makes the random generator of a prompt, by its number, when its batch begins.
        batch_size: most rows of a batch; each beam counts as one.
        progress: shows the number of tokens that are final.

    Raises:
        ValueError: a prompt is empty, or a model has no cache.
    """
    # By falling length, rows finish from the end of a batch,
    # and the others keep their rows of the cache.
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    together = max(1, batch_size // decoding.beam)

    def advances() -> Iterator[Advance]:
        for start in range(0, len(order), together):
            batch = order[start : start + together]
            sources = [generators(number) for number in batch]
            for step in _steps(models, [prompts[number] for number in batch], decoding, sources, forbidden):
                yield from ((batch[row], tokens) for row, tokens in step)
                # Rows whose texts are over are read until the others are.
                if not texts.keys() & batch:
                    break

    texts: dict[int, list[int]] = {number: [] for number in order}
    for number, tokens in progress(advances(), len(prompts) * decoding.max_tokens):
        if number not in texts:
            continue
        texts[number] += tokens
        if stop in tokens or len(texts[number]) == decoding.max_tokens:
            text = texts.pop(number)
            yield number, text[: _end(text, stop)]
    yield from texts.items()  # max_tokens is 0


def _end(tokens: Sequence[int], stop: int) -> int:
    """The number of *tokens* before the first *stop*."""
    return list(tokens).index(stop) if stop in tokens else len(tokens)


@torch.inference_mode()
def _steps(
    models: Sequence[Model],
    prompts: Sequence[Prompt],
    decoding: Decoding,
    generators: Sequence[torch.Generator | None],
    forbidden: Sequence[int],
) -> Iterator[list[Advance]]:
    """The steps of one batch, whose prompts are ordered by falling length."""
    readers = [reader_of(model) for model in models]
    for reader in readers:
        if not reader.model.can_generate:
            raise ValueError(f"{type(reader.module).__name__} cannot generate: it has no key-value cache")
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("prompt_tokens: at least one token is needed; a text starts with </s>")
    if decoding.max_tokens == 0:
        return
    longest = len(prompts[0]) + decoding.max_tokens
    predictor = Predictor(readers, len(prompts), forbidden, longest)
    if decoding.beam > 1:
        yield from beam_search(predictor, prompts, decoding)
    else:
        yield from sample_batch(predictor, prompts, decoding, generators)
