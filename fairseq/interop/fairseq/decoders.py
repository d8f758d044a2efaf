"""Bases of plug-ins' encoders, and of decoders that read a token at a time: state in a dict, by instance and name."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fairseq.interop.fairseq import utils
from fairseq.models.base import BaseFairseqModel, FairseqDecoder

State = dict[str, dict[str, Tensor | None]]


def with_incremental_state(cls: Any) -> Any:
    """Class decorator that adds ``get_incremental_state`` and ``set_incremental_state``."""
    cls.get_incremental_state, cls.set_incremental_state = utils.get_incremental_state, utils.set_incremental_state
    return cls


@with_incremental_state
class FairseqIncrementalDecoder(FairseqDecoder):
    """A decoder whose ``forward`` takes ``incremental_state``, and then the newest token only."""

    def forward(
        self, prev_output_tokens: Tensor, encoder_out: Any = None, incremental_state: Any = None, **kwargs: Any
    ) -> Any:
        """Output and extra: features, then the output layer."""
        features, extra = self.extract_features(
            prev_output_tokens, encoder_out=encoder_out, incremental_state=incremental_state, **kwargs
        )
        return self.output_layer(features), extra

    def extract_features(
        self, prev_output_tokens: Tensor, encoder_out: Any = None, incremental_state: Any = None, **kwargs: Any
    ) -> Any:
        """Hidden states and extra; a decoder without an own ``forward`` defines it."""
        raise NotImplementedError

    def output_layer(self, features: Tensor, **kwargs: Any) -> Tensor:
        """Logits from hidden states; a decoder without an own ``forward`` defines it."""
        raise NotImplementedError

    def reorder_incremental_state(self, incremental_state: State, new_order: Tensor) -> None:
        """Follow a beam's choice of rows; decoders with a state define it."""

    def reorder_incremental_state_scripting(self, incremental_state: State, new_order: Tensor) -> None:
        """Let every part of the decoder follow a beam's choice of rows."""
        for module in self.modules():
            if hasattr(module, "reorder_incremental_state"):
                module.reorder_incremental_state(incremental_state, new_order)  # type: ignore[operator]

    def set_beam_size(self, beam_size: int) -> None:
        for module in self.modules():
            # Without `self`, which has this very method and would call itself without end.
            if module is not self and hasattr(module, "set_beam_size"):
                module.set_beam_size(beam_size)  # type: ignore[operator]


class FairseqEncoder(nn.Module):
    """Base of encoders."""

    def __init__(self, dictionary: Any) -> None:
        super().__init__()
        self.dictionary = dictionary

    def max_positions(self) -> Any:
        """The most tokens of a row; without a limit here."""
        return int(1e6)


class FairseqEncoderModel(BaseFairseqModel):
    """A model that is an encoder alone: for masked language models and classification."""

    predicts_next_token = False

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, src_tokens: Tensor, src_lengths: Any = None, **kwargs: Any) -> Any:
        return self.encoder(src_tokens, src_lengths, **kwargs)

    def get_normalized_probs(self, net_output: Any, log_probs: bool, sample: Any = None) -> Tensor:
        output = net_output["encoder_out"] if isinstance(net_output, dict) else net_output
        logits = output[0] if isinstance(output, tuple | list) else output
        return logits.float().log_softmax(-1) if log_probs else logits.float().softmax(-1)

    def max_positions(self) -> Any:
        return self.encoder.max_positions()  # type: ignore[operator]
