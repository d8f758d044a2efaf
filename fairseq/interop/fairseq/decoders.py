"""Decoders that read a token at a time, as plug-ins define them: state in a dict, by instance and name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fairseq.interop.fairseq.utils import get_incremental_state, set_incremental_state
from fairseq.models.base import FairseqDecoder

State = dict[str, dict[str, Tensor | None]]


def with_incremental_state(cls: type) -> type:
    """Class decorator that adds ``get_incremental_state`` and ``set_incremental_state``."""
    cls.get_incremental_state = FairseqIncrementalDecoder.get_incremental_state  # type: ignore[attr-defined]
    cls.set_incremental_state = FairseqIncrementalDecoder.set_incremental_state  # type: ignore[attr-defined]
    return cls


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

    def get_incremental_state(self, incremental_state: State | None, key: str) -> dict[str, Tensor | None] | None:
        """This module's entry *key* of the state; None without one."""
        return get_incremental_state(self, incremental_state, key)

    def set_incremental_state(self, incremental_state: State | None, key: str, value: Any) -> State | None:
        """The state with this module's entry *key* set."""
        return set_incremental_state(self, incremental_state, key, value)

    def reorder_incremental_state(self, incremental_state: State, new_order: Tensor) -> None:
        """Follow a beam's choice of rows; decoders with a state define it."""

    def reorder_incremental_state_scripting(self, incremental_state: State, new_order: Tensor) -> None:
        """Let every part of the decoder follow a beam's choice of rows."""
        for module in self.modules():
            if hasattr(module, "reorder_incremental_state"):
                module.reorder_incremental_state(incremental_state, new_order)  # type: ignore[operator]

    def set_beam_size(self, beam_size: int) -> None:
        """Tell every part of the decoder the width of the beam."""
        for module in self.modules():
            if module is not self and hasattr(module, "set_beam_size"):
                module.set_beam_size(beam_size)  # type: ignore[operator]
