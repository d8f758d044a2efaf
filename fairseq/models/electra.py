"""ELECTRA: a small generator replaces chosen tokens, a discriminator detects the replaced ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq.config.fields import typed
from fairseq.data.masking import special_symbols
from fairseq.errors import SettingError
from fairseq.models.bert import (
    BertModel,
    ClassificationHead,
    EncoderModel,
    MaskedLMEncoder,
    encoder_parameters,
    vocabulary_of,
)
from fairseq.models.encoder import TransformerEncoder
from fairseq.models.encoder_settings import BertConfig, ElectraConfig
from fairseq.modules.output_layer import OutputLayer, row_chunks
from fairseq.modules.transformer_layer import EmbeddingHook

Masked = tuple[Tensor, Tensor]
"""Indices of the chosen tokens in the B·T tokens of a batch, int64 [M], and their targets, int64
[M]."""


class Discriminator(nn.Module):
    """An encoder and the head that detects replaced tokens,
    with one logit a token (Clark et al. 2020, §2)."""

    def __init__(self, cfg: BertConfig, vocabulary: int, padding_idx: int) -> None:
        super().__init__()
        self.sentence_encoder = TransformerEncoder(cfg, vocabulary, padding_idx)
        self.discriminator_head = ClassificationHead(
            cfg.encoder_embed_dim, 1, activation_fn=cfg.head_activation, init_std=cfg.init_std
        )


class ElectraModel(EncoderModel):
    """Generator and discriminator, which share their embeddings (Clark et al. 2020, §3.2).

    The finished model is the discriminator:
    without the parameters ``generator.…``, an encoder like BERT.

    Args:
        generator: None: a finished discriminator, which cannot be trained further as ELECTRA.
        special: ids of the symbols that are no text, which the generator never writes.
    """

    config_class = ElectraConfig
    decisive_settings = (*BertModel.decisive_settings, "generator_size")
    cfg: ElectraConfig

    def __init__(
        self, encoder: Discriminator, generator: MaskedLMEncoder | None, cfg: ElectraConfig, special: Sequence[int]
    ) -> None:
        super().__init__(cfg)
        self.encoder = encoder
        self.generator = generator
        self.special = list(special)

    @classmethod
    def build_model(cls, args: ElectraConfig, task: Any) -> ElectraModel:
        cfg = typed(ElectraConfig, args)
        vocabulary = vocabulary_of(task)
        encoder = Discriminator(cfg, *vocabulary)
        generator = None
        if cfg.generator_size:
            generator = MaskedLMEncoder(cfg.of_generator, *vocabulary, encoder.sentence_encoder)
        return cls(encoder, generator, cfg, np.flatnonzero(special_symbols(task.source_dictionary)).tolist())

    @property
    def masked_lm(self) -> MaskedLMEncoder | None:
        """The encoder that predicts masked tokens; None in a finished discriminator."""
        return self.generator

    @property
    def output_layer(self) -> OutputLayer | None:  # type: ignore[override]
        """The output layer of the generator, which predicts words."""
        return None if self.generator is None else self.generator.lm_head

    def forward(
        self,
        src_tokens: Tensor,
        token_types: Tensor | None = None,
        features_only: bool = False,
        infuse: EmbeddingHook | None = None,
        masked: Masked | None = None,
        noise: Tensor | None = None,
        infuse_generator_only: bool = False,
        padded: bool | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return logits of "replaced" for every token, or hidden states of the discriminator.

        With *masked* the generator first fills the chosen tokens,
        and the discriminator reads the result.

        Args:
            src_tokens, token_types, features_only, padded: see :meth:`BertModel.forward`.
            infuse: applied to the summed embeddings of generator and, unless
                *infuse_generator_only*, discriminator.
            masked: indices in B·T and the original tokens, int64 [M] each.
            noise: [M], uniform on [0, 1): determines the tokens sampled from the generator.

        Returns:
            Logits [B, T], or hidden states [B, T, C]; and ``hidden`` [B, T, C]. With *masked* also
            ``generator_hidden`` [B, T, G] and ``replaced``, bool [B, T], true where the
            discriminator read another token than the original.
        """
        extra: dict[str, object] = {}
        if masked is not None:
            if self.generator is None:
                raise SettingError(
                    "`generator_size` 0: a discriminator without generator cannot be trained on `task` masked_lm"
                )
            states = self.generator.sentence_encoder(src_tokens, token_types, infuse, padded)  # (B, T, G)
            src_tokens, replaced = self._corrupt(src_tokens, states, masked, noise)
            extra = {"generator_hidden": states, "replaced": replaced}
        infuse_discriminator = None if infuse_generator_only else infuse
        hidden = self.encoder.sentence_encoder(src_tokens, token_types, infuse_discriminator, padded)  # (B, T, C)
        extra["hidden"] = hidden
        return hidden if features_only else self.encoder.discriminator_head(hidden).squeeze(-1), extra

    @torch.no_grad()
    def _corrupt(
        self, src_tokens: Tensor, hidden: Tensor, masked: Masked, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The text with chosen tokens sampled from the generator's *hidden* states, and where it
        differs: [B, T] each.

        No gradient passes through the sampled tokens (§2).
        """
        rows, original = masked
        # Only the chosen tokens are filled: logits of the others would be computed for nothing.
        chosen = hidden.flatten(0, 1).index_select(0, rows)
        written = self._sample(chosen, torch.rand_like(original, dtype=torch.float) if noise is None else noise)
        corrupted = src_tokens.flatten().index_copy(0, rows, written).view_as(src_tokens)
        replaced = torch.zeros_like(src_tokens, dtype=torch.bool).flatten()
        # A token that the generator happens to restore counts as original (Clark et al. 2020, §2).
        return corrupted, replaced.index_copy(0, rows, written.ne(original)).view_as(src_tokens)

    def _sample(self, hidden: Tensor, noise: Tensor) -> Tensor:
        """One token for each row of *hidden*
        [M, G] by inversion of the distribution function: int64 [M].

        Padding and other special symbols have probability 0: the discriminator would read a row of
        other positions. *noise* [M] is part of the batch, so that the tokens do not depend on the
        number of processes.
        """
        assert self.generator is not None
        head = self.generator.lm_head
        last = head.weight.size(0) - 1
        # All words' probabilities of all chosen tokens would
        # be [M, V]; here they exist a chunk at a time.
        written = []
        for rows in row_chunks(hidden.size(0), head.weight.size(0), hidden.device):
            probabilities = head(hidden[rows]).float().softmax(-1)  # (n, V)
            for index in self.special:
                probabilities[:, index] = 0
            cumulative = probabilities.cumsum(-1)
            # Without the special symbols, the last sum is less than 1.
            at = noise[rows].unsqueeze(1) * cumulative[:, -1:]
            drawn = torch.searchsorted(cumulative, at, right=True).squeeze(1).clamp(max=last)
            # Sums in parallel are not monotonic: by rounding,
            # a draw may hit a symbol without probability.
            best = probabilities.argmax(-1)
            for index in self.special:
                drawn = torch.where(drawn == index, best, drawn)
            written.append(drawn)
        return torch.cat(written) if written else noise.new_empty(0, dtype=torch.long)

    def upgrade_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """*state* without version markers and fine-tuning heads."""
        # The discriminator has no word output that could be tied.
        return encoder_parameters(state, tied=False)
