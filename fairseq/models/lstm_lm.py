"""LSTM language models (Hochreiter & Schmidhuber 1997),
with the parameter names of fairseq's ``lstm_lm``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.config.fields import typed
from fairseq.dataclass import settings_of
from fairseq.errors import SettingError
from fairseq.models.base import FairseqLanguageModel
from fairseq.models.lstm_lm_settings import LSTMLMConfig
from fairseq.modules.adaptive_softmax import AdaptiveSoftmax
from fairseq.modules.dropout import dropout
from fairseq.modules.memory import KeyValueCache
from fairseq.modules.output_layer import LinearOutput, OutputLayer

INIT = 0.1  # weights are uniform in ±INIT
State = tuple[Tensor, Tensor]


@dataclass
class RecurrentCache(KeyValueCache):
    """Hidden and cell state of each layer after the tokens that were read: [B, H] each."""

    states: list[State] = field(default_factory=list)

    def select_rows(self, parents: Sequence[int]) -> None:
        if self.states:
            index = torch.tensor(parents, device=self.states[0][0].device)
            self.states = [(hidden[index], cell[index]) for hidden, cell in self.states]

    def clear(self) -> None:
        super().clear()
        self.states = []


class LSTMDecoder(nn.Module):
    """Embeddings of V words, layers, and the output layer that criterions and the scorer use."""

    def __init__(self, cfg: LSTMLMConfig, vocabulary: int, padding_idx: int) -> None:
        super().__init__()
        self.cfg = cfg
        size, output_dim = cfg.hidden_size, cfg.decoder_out_embed_dim
        self.dropout_in = cfg.dropout if cfg.decoder_dropout_in is None else cfg.decoder_dropout_in
        self.dropout_out = cfg.dropout if cfg.decoder_dropout_out is None else cfg.decoder_dropout_out
        self.embed_tokens = nn.Embedding(vocabulary, cfg.decoder_embed_dim, padding_idx)
        widths = [cfg.decoder_embed_dim] + [size] * (cfg.decoder_layers - 1)
        self.layers = nn.ModuleList(nn.LSTMCell(width, size) for width in widths)  # only hold the parameters
        self.additional_fc = nn.Linear(size, output_dim) if size != output_dim else None
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -INIT, INIT)
        # After the uniform draw, which does not spare the padding's row.
        nn.init.zeros_(self.embed_tokens.weight[padding_idx])
        self.adaptive_softmax: AdaptiveSoftmax | None = None
        self.fc_out: LinearOutput | None = None
        if cfg.adaptive_softmax_cutoff is not None:
            self.adaptive_softmax = AdaptiveSoftmax(
                vocabulary, size, cfg.adaptive_softmax_cutoff, dropout=self.dropout_out
            )
        elif not cfg.share_decoder_input_output_embed:
            weight, bias = torch.empty(vocabulary, output_dim), torch.empty(vocabulary)
            for part in (weight, bias):
                nn.init.uniform_(part, -INIT, INIT)
            self.fc_out = LinearOutput(nn.Parameter(weight), nn.Parameter(bias))

    @property
    def output_distribution(self) -> OutputLayer:
        """The distribution over words."""
        return self.adaptive_softmax or self.fc_out or LinearOutput(self.embed_tokens.weight)  # type: ignore[arg-type]

    def flatten_parameters(self) -> None:
        """Lay the weights of each layer side by side in a GPU's memory, as ``nn.LSTM`` does: cuDNN
        would copy them in each call."""
        for cell in self.layers:
            layer: Any = nn.LSTM(cell.input_size, cell.hidden_size, device="meta")
            for name, weight in cell.named_parameters():
                setattr(layer, f"{name}_l0", weight)
            layer.flatten_parameters()

    def max_positions(self) -> int:
        """Return the largest number of tokens in a row."""
        return self.cfg.max_target_positions or self.cfg.tokens_per_sample

    def forward(self, src_tokens: Tensor, cache: RecurrentCache | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Hidden states of *src_tokens* [B, T], each from
        the tokens up to it: [B, T, C], for the output layer.

        In incremental inference they continue what *cache* holds, and are added to it.
        """
        x = dropout(self.embed_tokens(src_tokens), self.dropout_in, self.training)  # (B, T, E)
        before = cache.states if cache is not None and cache.states else [None] * len(self.layers)
        states: list[State] = []
        out = x
        for cell, state in zip(self.layers, before, strict=True):
            hidden, previous, state = self._layer(cell, x, state)
            states.append(state)
            x = dropout(hidden, self.dropout_out, self.training)
            out = x
            # fairseq adds the state of the step before, not the input of the layer.
            if self.cfg.residuals:
                x = x + previous
        if cache is not None:
            cache.states = states
            cache.advance(src_tokens.size(1))
        # fairseq's adaptive softmax reads the layers' width: its model has this projection, and
        # does not use it.
        if self.additional_fc is not None and self.adaptive_softmax is None:
            out = dropout(self.additional_fc(out), self.dropout_out, self.training)
        return out, {}

    def _layer(self, cell: Any, x: Tensor, state: State | None) -> tuple[Tensor, Tensor, State]:
        """All time steps of a layer in one call: outputs, the outputs one step before [B, T, H],
        and the last state."""
        zeros = x.new_zeros(x.size(0), self.cfg.hidden_size)
        first, memory = state if state is not None else (zeros, zeros)
        weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
        # One call for all time steps: cells of their own would launch several kernels a step.
        hidden, last, last_memory = torch.lstm(
            x, (first[None], memory[None]), weights, True, 1, 0.0, self.training, False, True
        )
        previous = torch.cat([first[:, None].to(hidden.dtype), hidden[:, :-1]], dim=1)
        return hidden, previous, (last[0], last_memory[0])


class LSTMLanguageModel(FairseqLanguageModel):
    """An LSTM language model; every block begins with a state of zeros, as in fairseq."""

    config_class = LSTMLMConfig
    decisive_settings = ("residuals",)

    def __init__(self, decoder: LSTMDecoder) -> None:
        super().__init__(decoder)
        self.cfg = decoder.cfg
        self.skips_parameters = decoder.additional_fc is not None and decoder.adaptive_softmax is not None

    @classmethod
    def build_model(cls, args: LSTMLMConfig, task: Any) -> LSTMLanguageModel:
        cfg, dictionary = typed(LSTMLMConfig, args), task.source_dictionary
        cfg.check_vocabulary(len(dictionary))
        if dictionary.pad() < 0:
            raise SettingError("`arch` lstm_lm: needs a padding symbol, which the dictionary does not have")
        return cls(LSTMDecoder(cfg, len(dictionary), dictionary.pad()))

    def new_cache(self, batch: int, longest: int | None = None) -> RecurrentCache:
        """An empty cache for token-by-token inference."""
        return RecurrentCache([], self.decoder.max_positions(), 0)  # type: ignore[operator]

    def upgrade_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        # fairseq's early files of this model lack the markers, which carry no information.
        """*state* with the markers that this version of the adaptive softmax has."""
        markers = {name: value for name, value in self.state_dict().items() if name.endswith(".version")}
        return {**markers, **state}


__getattr__ = settings_of(
    __name__,
    {"fairseq.models.registries": "base_architecture=lstm_lm_architecture"},
    LSTMLanguageModelConfig=LSTMLMConfig,
)  # fairseq's names
