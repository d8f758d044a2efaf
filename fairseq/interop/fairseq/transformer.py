"""``fairseq.models.transformer``: the decoder that plug-ins build language models of."""

from __future__ import annotations

import argparse
from typing import Any

from torch import nn

from fairseq.config.fields import typed
from fairseq.errors import UserError
from fairseq.interop.fairseq.modules import check_hooks
from fairseq.interop.fairseq.omegaconf import DictConfig
from fairseq.models import transformer_lm
from fairseq.modules.adaptive_input import word_embedding
from fairseq.text.dictionary import Dictionary

DEFAULT_MAX_SOURCE_POSITIONS = DEFAULT_MAX_TARGET_POSITIONS = 1024
DEFAULT_MIN_PARAMS_TO_WRAP = int(1e8)


class _Group(DictConfig):
    """The settings whose names begin with *prefix*, without it."""

    def __init__(self, prefix: str, **settings: Any) -> None:
        vars(self).update(settings, _prefix=prefix)

    def __setattr__(self, name: str, value: Any) -> None:
        # A group is made anew at each access: a value set in one would be lost.
        flat = self._prefix + name
        raise UserError(f"TransformerConfig.{self._prefix[:-1]}.{name}: read-only; set {flat} of the configuration")


class TransformerConfig(DictConfig):
    """Settings under their flat names, and read-only in the groups ``decoder``, ``encoder`` and ``quant_noise``."""

    @classmethod
    def from_namespace(cls, args: argparse.Namespace) -> TransformerConfig:
        return cls(**{"quant_noise_pq": 0.0, "quant_noise_pq_block_size": 8, **vars(args)})

    def __getattr__(self, group: str) -> DictConfig:
        if group not in ("decoder", "encoder", "quant_noise"):
            raise AttributeError(f"TransformerConfig has no setting {group}")
        prefix = f"{group}_"
        return _Group(prefix, **{name[len(prefix) :]: v for name, v in vars(self).items() if name.startswith(prefix)})


class TransformerDecoder(transformer_lm.TransformerDecoder):
    """This package's decoder with fairseq's constructor; it returns hidden states, not logits."""

    def __init__(
        self, args: argparse.Namespace, dictionary: Dictionary, embed_tokens: nn.Module, no_encoder_attn: bool = True
    ) -> None:
        advice = "put own layers into a FairseqIncrementalDecoder"
        check_hooks(self, advice, "build_decoder_layer", "build_output_projection")
        cfg = typed(transformer_lm.TransformerLMConfig, args)
        # The command's check runs where this package builds a model; a plug-in builds the decoder itself.
        cfg.check_vocabulary(len(dictionary))
        super().__init__(cfg, len(dictionary), dictionary.pad(), embed_tokens)
        self.dictionary = dictionary


TransformerDecoderBase = TransformerDecoder


def Embedding(num_embeddings: int, embedding_dim: int, padding_idx: int) -> nn.Embedding:
    """Embeddings with fairseq's initial values; padding's row is zero."""
    return word_embedding(num_embeddings, embedding_dim, padding_idx)


def Linear(in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    """A linear layer with fairseq's initial values."""
    module = nn.Linear(in_features, out_features, bias)
    nn.init.xavier_uniform_(module.weight)
    if bias:
        nn.init.zeros_(module.bias)
    return module


class CharacterTokenEmbedder(nn.Module):
    """The name of fairseq's embeddings of characters, which are not implemented."""

    def __init__(self, *args: Any) -> None:
        raise NotImplementedError("--character-embeddings: not implemented; leave it out")
