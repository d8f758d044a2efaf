"""Sampling from a language model, a token at a time, through its key-value cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq.models import BaseFairseqModel


@torch.inference_mode()
def sample(
    model: BaseFairseqModel,
    prompt_tokens: Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    forbidden: Sequence[int] = (),
) -> Iterator[int]:
    """Tokens that go on from a prompt, each as soon as it is chosen.

    A model with memory (Shortformer) reads each token once and goes on for ever at a constant cost per token. A model
    without has room for one window of positions; when it is full, the model reads the window's last half again and
    goes on from there.

    Args:
        model: in evaluation mode, with a key-value cache (``new_cache``).
        prompt_tokens: at least one; a text starts with ``</s>``.
        max_tokens: how many tokens.
        temperature: logits are divided by it; 0 chooses the most probable token.
        top_k: choose among the k most probable tokens (0: all).
        top_p: choose among the most probable tokens that together have this probability (Holtzman et al. 2020, §3.1).
        generator: source of randomness, on the model's device (default: torch's own).
        forbidden: tokens that are never chosen.

    Raises:
        ValueError: a number is out of range, the prompt is empty, or the model has no cache.
    """
    _check(model, prompt_tokens, max_tokens, temperature, top_k, top_p)
    reader = _Reader(model)
    hidden = reader.read(list(prompt_tokens))
    banned = torch.tensor(list(forbidden), dtype=torch.long, device=hidden.device)
    for number in range(max_tokens):
        lprobs = model.output_layer.log_probs(hidden)  # type: ignore[union-attr]
        lprobs[banned] = -torch.inf
        token = choose(lprobs, temperature, top_k, top_p, generator)
        yield token
        if number + 1 < max_tokens:
            hidden = reader.read([token])


def choose(
    lprobs: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None = None
) -> int:
    """One token of a distribution given as log-probabilities [V]; see :func:`sample`."""
    if temperature == 0:
        return int(lprobs.argmax())
    lprobs = lprobs / temperature
    tokens: Tensor | None = None
    if top_k or top_p < 1:
        lprobs, tokens = lprobs.topk(min(top_k, lprobs.numel()) if top_k else lprobs.numel())
    probabilities = lprobs.softmax(-1)
    if top_p < 1:
        probabilities[probabilities.cumsum(-1) - probabilities >= top_p] = 0  # those before it suffice
    place = torch.multinomial(probabilities, 1, generator=generator)
    return int(place if tokens is None else tokens[place])


class _Reader:
    """Feeds tokens to a model through its cache, segment after segment, or window after window."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.cache = model.new_cache(1)
        self.window: list[int] = []

    def read(self, tokens: list[int]) -> Tensor:
        """Read *tokens*; the hidden state after the last of them: [C]."""
        hidden: Tensor | None = None
        while tokens:
            if self.cache.room == 0:
                tokens = self._make_room() + tokens
            piece, tokens = tokens[: self.cache.room], tokens[self.cache.room :]
            source = torch.tensor([piece], dtype=torch.long, device=self.device)
            hidden = self.model(source, cache=self.cache)[0][0, -1]
            if not self.model.memory_length:
                self.window += piece
        assert hidden is not None
        return hidden

    def _make_room(self) -> list[int]:
        """Begin a new segment or window; returns what must be read again."""
        if self.model.memory_length:
            self.cache.next_segment()
            return []
        self.cache.clear()
        again, self.window = self.window[len(self.window) - len(self.window) // 2 :], []
        return again


def _check(
    model: BaseFairseqModel, prompt: Sequence[int], max_tokens: int, temperature: float, top_k: int, top_p: float
) -> None:
    if not hasattr(model, "new_cache") or model.output_layer is None:
        raise ValueError(f"{type(model).__name__} cannot generate: it has no key-value cache")
    if len(prompt) == 0:
        raise ValueError("prompt_tokens: at least one token is needed; a text starts with </s>")
    if max_tokens < 0:
        raise ValueError(f"max_tokens {max_tokens}: must be at least 0")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature {temperature}: must be a number from 0 on")
    if top_k < 0:
        raise ValueError(f"top_k {top_k}: must be at least 0")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p}: must be greater than 0 and at most 1")
