"""Models of this package as plug-ins call them: they return logits, and so do their decoders.

A view is another object with the attributes of the original:
parameters, mode and device are shared.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.data.dataset import Sample
from fairseq.errors import UserError
from fairseq.models.base import normalized
from fairseq.models.fairseq_decoder import FairseqIncrementalDecoder
from fairseq.modules.adaptive_softmax import BandedSoftmax
from fairseq.modules.output_layer import LinearOutput, OutputLayer

M = TypeVar("M", bound=nn.Module)


class View:
    """Base of what precedes a module's class in the class of its view; *plain* is the original."""

    # No attribute of the module: its attributes are shared with the original.
    __slots__ = ("plain",)
    plain: Any
    fairseq: tuple[type, ...] = ()  # classes that have the remaining methods

    def __reduce_ex__(self, protocol: object) -> Any:
        # A copy is a view of a copy.
        return view, (type(self).__mro__[1], self.plain)


@functools.cache
def _class(kind: type[View], cls: Any) -> type:
    return type(
        cls.__name__, (kind, cls, *kind.fairseq), {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )


def view(kind: type[View], module: M) -> M:
    """*module* as a *kind* of view."""
    make: Any = _class
    made: Any = object.__new__(make(kind, type(module)))
    object.__setattr__(made, "__dict__", module.__dict__)
    object.__setattr__(made, "plain", module)
    return made


def plain(module: object) -> Any:
    """The original of *module*, which may be a view."""
    return module.plain if isinstance(module, View) else module


class LogitsModel(View):
    """A model that returns logits where this package's returns hidden states.

    Hidden states of an adaptive softmax stay as they are, as in fairseq.
    ``masked_tokens``, bool [B, T], selects the tokens whose logits are returned: [N, V]. With
    ``return_all_hiddens`` the dict of an encoder has ``inner_states``, [T, B, C] each.
    """

    __slots__ = ()

    @property
    def predicts_next_token(self) -> bool:
        return self.plain.predicts_next_token

    @property
    def decoder(self) -> Any:
        """The decoder, as plug-ins call it."""
        return view(LogitsDecoder, self.plain.decoder)

    def forward(
        self,
        src_tokens: Tensor,
        masked_tokens: Tensor | None = None,
        return_all_hiddens: bool = False,
        **inputs: object,
    ) -> Any:
        inputs = {name: value for name, value in inputs.items() if name != "src_lengths"}
        if hasattr(self.plain, "decoder") and inputs.keys() & {"features_only", "incremental_state"}:
            return self.decoder(src_tokens, **inputs)
        # What is left are arguments that models of this package take.
        output, *rest = self.plain(src_tokens, **inputs)
        if not inputs.get("features_only"):
            output = _logits(self.plain.output_layer, output)
        if return_all_hiddens and hasattr(self.plain, "encoder"):
            states = self.plain.encoder.sentence_encoder.states(src_tokens)
            rest = [{**rest[0], "inner_states": [state.transpose(0, 1) for state in states]}]
        return output if masked_tokens is None else output[masked_tokens], *rest

    def get_normalized_probs(self, net_output: object, log_probs: bool, sample: object = None) -> Tensor:
        """Probabilities, or their logarithms, over all words: [..., V]."""
        return _probabilities(self.plain.output_layer, net_output, log_probs)

    def extract_features(self, src_tokens: Tensor, **inputs: Any) -> Any:
        """Hidden states [B, T, C], and a dict."""
        return self.forward(src_tokens, features_only=True, **inputs)


class LogitsDecoder(View):
    """A decoder with fairseq's arguments."""

    __slots__ = ()
    fairseq = (FairseqIncrementalDecoder,)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: object = None,
        incremental_state: object = None,
        features_only: bool = False,
        src_lengths: object = None,
        **options: object,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits [B, T, V], or hidden states; with *incremental_state* of the last token alone.

        Raises:
            UserError: an encoder's output, or an option that changes the result, is given.
        """
        refused = {"encoder_out": encoder_out, **options}
        for name in (name for name, value in refused.items() if value not in (None, False)):
            raise UserError(f"{type(self).__name__}: {name} is not implemented; leave it out")
        hidden, _ = self.plain(prev_output_tokens)
        if incremental_state is not None:
            # Tokens are given from the start on, so that no state is needed:
            # gradients reach every step, as through fairseq's state.
            hidden = hidden[:, -1:]
        return hidden if features_only else self.output_layer(hidden), {"attn": None, "inner_states": None}

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: object = None,
        incremental_state: object = None,
        **options: object,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Hidden states [B, T, C], and a dict as in :meth:`forward`."""
        return self.forward(prev_output_tokens, encoder_out, incremental_state, True, **options)

    def output_layer(self, features: Tensor, **options: object) -> Tensor:
        """Logits of hidden states."""
        return _logits(self.plain.output_distribution, features)

    def get_normalized_probs(self, net_output: object, log_probs: bool, sample: object = None) -> Tensor:
        """Probabilities, or their logarithms, over all words: [B, T, V]."""
        return _probabilities(self.plain.output_distribution, net_output, log_probs)


class PlainCriterion(View):
    """A criterion of this package, which reads hidden states, for models that are views."""

    __slots__ = ()

    def forward(self, model: nn.Module, sample: Sample, reduce: bool = True) -> Any:
        return self.plain(plain(model), sample, reduce)


def logits_model(model: Any) -> Any:
    """*model*, as a :class:`LogitsModel` if its output layer is of this package."""
    is_ours = isinstance(getattr(model, "output_layer", None), OutputLayer) and not isinstance(model, View)
    return view(LogitsModel, model) if is_ours else model


def _logits(layer: OutputLayer, hidden: Tensor) -> Tensor:
    return F.linear(hidden, layer.weight, layer.bias) if type(layer) is LinearOutput else hidden


def _probabilities(layer: OutputLayer, net_output: Any, log_probs: bool) -> Tensor:
    if not isinstance(layer, BandedSoftmax):
        return normalized(net_output[0], log_probs)
    lprobs = layer.log_probs(net_output[0])
    return lprobs if log_probs else lprobs.exp()
