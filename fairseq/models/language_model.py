"""The interface that scoring and generation use
of a language model, and the check that a model has it."""

from __future__ import annotations

from typing import Any, Protocol, cast

from torch import Tensor, nn

from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.modules.memory import KeyValueCache
from fairseq.modules.output_layer import OutputLayer


class NextTokenModel(Protocol):
    """A model that predicts the next token, as :func:`language_model` returns it."""

    @property
    def memory_length(self) -> int:
        """Tokens that the model remembers from segment to segment; 0: none."""

    @property
    def output_layer(self) -> OutputLayer:
        """The distribution over words after hidden states."""

    @property
    def can_generate(self) -> bool:
        """Whether the model reads token by token,
        so that :meth:`new_cache` and :meth:`embed` may be called."""

    def __call__(self, src_tokens: Tensor, **state: object) -> tuple[Tensor, dict[str, Any]]:
        """Hidden states [B, T, C] of *src_tokens* [B, T] for the output layer, and ``memory`` where
        there is one."""

    def max_positions(self) -> int | None:
        """The most tokens of a row, or None."""

    def new_cache(self, batch: int, longest: int | None = None) -> KeyValueCache:
        """An empty cache for *batch* rows, of *longest* tokens at most."""

    def embed(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """The first layer's input for *tokens* [B, T], which continue *cache*: [B, T, C]."""


class LogProbabilities(OutputLayer):
    """The output layer over hidden states that are log-probabilities of all words already."""

    def target_log_probs(self, hidden: Tensor, target: Tensor, chunk: int | None = None) -> Tensor:
        return hidden.gather(-1, target.to(hidden.device)[:, None]).squeeze(-1).float()

    def log_probs(self, hidden: Tensor) -> Tensor:
        return hidden


class NormalizedModel(BaseFairseqModel):
    """A *model* that returns logits, with the log-probabilities
    that it makes of them as hidden states."""

    output_layer = LogProbabilities()

    def __init__(self, model: BaseFairseqModel) -> None:
        super().__init__()
        self.model = model
        self.memory_length = model.memory_length

    def max_positions(self) -> int | None:
        return self.model.max_positions()

    def forward(self, src_tokens: Tensor, **state: object) -> tuple[Tensor, dict[str, Any]]:
        net_output = self.model(**self.model.net_input({"src_tokens": src_tokens, **state}))
        # Through the model's own method: it may have a softmax of its own.
        return self.model.get_normalized_probs(net_output, log_probs=True), (
            net_output[1] if len(net_output) > 1 else None
        ) or {}


def language_model(model: nn.Module, source: str | None = None) -> NextTokenModel:
    """*model* as scoring and generation use it; one that returns logits is given an output layer.

    Raises:
        UserError: it is an encoder, or extends no model of this package; the message names
            *source*, or its class.
    """
    name = type(model).__name__
    prefix = f"{source}: {name}" if source is not None else name
    if not isinstance(model, BaseFairseqModel):
        raise UserError(f"{prefix} is not a language model; extend fairseq.models.FairseqLanguageModel")
    if not model.predicts_next_token:
        raise UserError(
            f"{prefix} is an encoder, which does not predict the next token; give a language model (fairseq-validate "
            "computes the loss of encoders)"
        )
    # None, or a method of that name.
    if not isinstance(model.output_layer, OutputLayer):
        model = NormalizedModel(model)
    return cast(NextTokenModel, model)
