"""Bases of plug-ins' models, encoders and decoders, with the methods that fairseq calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fairseq.incremental_decoding_utils import State, with_incremental_state
from fairseq.models.base import BaseFairseqModel, normalized, tell
from fairseq.modules.adaptive_softmax import BandedSoftmax
from fairseq.modules.fairseq_modules import cross_entropy
from fairseq.modules.output_layer import OutputLayer


class CalledSoftmax(BandedSoftmax):
    """A plug-in's own adaptive softmax, called as fairseq's: with hidden states and targets."""

    def __init__(self, softmax: Any, decoder: Any) -> None:
        super().__init__([*softmax.cutoff], 0.0)
        # Not a part: its parameters are the decoder's.
        self.call, self.score = softmax.__call__, softmax.get_log_prob
        self.padding_idx = decoder.dictionary.pad()

    def partition(self, target: Tensor, padding_idx: int, band_padding: bool = False) -> Any:
        return None, target, []

    def loss(self, hidden: Tensor, partition: Any) -> Tensor:
        parts = zip(*self.call(hidden, partition[1]), strict=True)
        losses = [cross_entropy(x, y, self.padding_idx, "sum") for x, y in parts if y is not None]
        return torch.stack(losses).sum()

    def log_probs(self, hidden: Tensor) -> Tensor:
        rows: Tensor = self.score(hidden.reshape(1, -1, hidden.size(-1)), None)
        return rows.view(*hidden.shape[:-1], -1)

    def target_log_probs(self, hidden: Tensor, target: Tensor, chunk: int | None = None) -> Tensor:
        return self.log_probs(hidden).gather(-1, target[:, None].to(hidden.device)).squeeze(-1)


class FairseqDecoder(nn.Module):
    """Base of decoders: ``forward`` is ``extract_features``, then ``output_layer``."""

    adaptive_softmax: nn.Module | None
    onnx_trace = False

    def __init__(self, dictionary: object) -> None:
        super().__init__()
        self.dictionary = dictionary
        self.adaptive_softmax = None

    def forward(self, prev_output_tokens: Tensor, encoder_out: object = None, **kwargs: object) -> Any:
        """Output and extra."""
        features, extra = self.extract_features(prev_output_tokens, encoder_out=encoder_out, **kwargs)
        return self.output_layer(features), extra

    def extract_features(self, prev_output_tokens: Tensor, encoder_out: object = None, **kwargs: object) -> Any:
        """Hidden states and extra; a decoder without an own ``forward`` defines it."""
        raise NotImplementedError

    def output_layer(self, features: Tensor, **kwargs: object) -> Tensor:
        """Logits from hidden states; a decoder without an own ``forward`` defines it."""
        raise NotImplementedError

    @property
    def output_distribution(self) -> nn.Module | None:
        """The output layer as criterions of this package take it; None where `forward` returns
        logits."""
        # A plug-in's decoder need not call this base's constructor.
        softmax = getattr(self, "adaptive_softmax", None)
        return softmax if softmax is None or isinstance(softmax, OutputLayer) else CalledSoftmax(softmax, self)

    def get_normalized_probs(self, net_output: object, log_probs: bool, sample: object = None) -> Tensor:
        """Probabilities, or their logarithms, over all words: [B, T, V]."""
        return self.get_normalized_probs_scriptable(net_output, log_probs, sample)

    def get_normalized_probs_scriptable(self, net_output: Any, log_probs: bool, sample: Any = None) -> Tensor:
        softmax: Any = getattr(self, "adaptive_softmax", None)
        if softmax is not None:
            lprobs: Tensor = softmax.get_log_prob(net_output[0], None if sample is None else sample["target"])
            return lprobs if log_probs else lprobs.exp()
        return normalized(net_output[0], log_probs)

    def max_positions(self) -> Any:
        """The most tokens of a row; without a limit here."""
        return int(1e6)

    def upgrade_state_dict_named(self, state_dict: dict[str, object], name: str) -> Any:
        """Change *state_dict*, a checkpoint's, for this version."""
        return state_dict

    def prepare_for_onnx_export_(self) -> None:
        self.onnx_trace = True


@with_incremental_state
class FairseqIncrementalDecoder(FairseqDecoder):
    """A decoder whose ``forward`` takes ``incremental_state``, and then the newest token only."""

    get_incremental_state: Any
    set_incremental_state: Any

    def forward(
        self, prev_output_tokens: Tensor, encoder_out: object = None, incremental_state: object = None, **kwargs: object
    ) -> Any:
        """Output and extra: features, then the output layer."""
        features, extra = self.extract_features(
            prev_output_tokens, encoder_out=encoder_out, incremental_state=incremental_state, **kwargs
        )
        return self.output_layer(features), extra

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

    def __init__(self, dictionary: object) -> None:
        super().__init__()
        self.dictionary = dictionary

    def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None, **kwargs: object) -> Any:
        """Hidden states of *src_tokens*; an encoder defines it."""
        raise NotImplementedError

    def forward_torchscript(self, net_input: dict[str, object]) -> Any:
        return self(**{name: value for name, value in net_input.items() if name != "prev_output_tokens"})

    forward_non_torchscript = forward_torchscript

    def reorder_encoder_out(self, encoder_out: Any, new_order: Tensor) -> Any:
        """The output of the rows *new_order*; an encoder defines it."""
        raise NotImplementedError

    def max_positions(self) -> Any:
        """The most tokens of a row; without a limit here."""
        return int(1e6)

    def upgrade_state_dict_named(self, state_dict: dict[str, object], name: str) -> Any:
        """Change *state_dict*, a checkpoint's, for this version."""
        return state_dict

    def set_num_updates(self, num_updates: int) -> None:
        """Tell the parts how many updates were made."""
        tell(self, "set_num_updates", num_updates)


class FairseqEncoderModel(BaseFairseqModel):
    """A model that is an encoder alone: for masked language models and classification."""

    predicts_next_token = False

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, src_tokens: Tensor, src_lengths: object = None, **kwargs: object) -> Any:
        return self.encoder(src_tokens, src_lengths, **kwargs)
