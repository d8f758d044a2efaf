"""``fairseq.models.roberta``: the class that encoders of plug-ins derive from, and its parts."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.config.fields import add_flags, defaults, flag_name
from fairseq.config.namespaces import namespace_of
from fairseq.models.encoder_settings import BertConfig
from fairseq.models.fairseq_decoder import FairseqEncoder, FairseqEncoderModel, normalized
from fairseq.models.transformer import TransformerEncoder
from fairseq.modules.fairseq_layers import init_bert_params
from fairseq.modules.fairseq_modules import LayerNorm, quant_noise
from fairseq.system import deferred
from fairseq.system.deferred import names_of
from fairseq.text.dictionary import Dictionary
from fairseq.utils import get_activation_fn

ARCHITECTURE = {  # of RoBERTa's base architecture in fairseq 0.12
    "encoder_layers": 12,
    "encoder_embed_dim": 768,
    "encoder_ffn_embed_dim": 3072,
    "encoder_attention_heads": 12,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.0,
    "pooler_dropout": 0.0,
    "max_positions": 512,
    "no_token_positional_embeddings": False,
    "encoder_learned_pos": True,
    "layernorm_embedding": True,
    "no_scale_embedding": True,
    "activation_fn": "gelu",
    "encoder_normalize_before": False,
    "pooler_activation_fn": "tanh",
    "untie_weights_roberta": False,
    "adaptive_input": False,
    "encoder_layerdrop": 0.0,
    "encoder_layers_to_keep": None,
    "quant_noise_pq": 0.0,
    "quant_noise_pq_block_size": 8,
    "quant_noise_scalar": 0.0,
    "spectral_norm_classification_head": False,
}


def completed(args: Any) -> Any:
    """*args* with the settings of :data:`ARCHITECTURE` that it lacks."""
    for name, value in ARCHITECTURE.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.max_source_positions = args.max_positions
    return args


def roberta_prenorm_architecture(args: object) -> None:
    """Set on *args* the defaults of an encoder with norms before its parts."""
    vars(args).setdefault("layernorm_embedding", False)
    vars(args).setdefault("encoder_normalize_before", True)
    completed(args)


class RobertaLMHead(nn.Module):
    """Dense layer, activation, layer norm, and a projection with a bias to all words."""

    def __init__(self, embed_dim: int, output_dim: int, activation_fn: str, weight: Any = None) -> None:
        super().__init__()
        self.dense = nn.Linear(embed_dim, embed_dim)
        self.activation_fn = get_activation_fn(activation_fn)
        self.layer_norm = LayerNorm(embed_dim)
        self.weight = nn.Linear(embed_dim, output_dim, bias=False).weight if weight is None else weight
        self.bias = nn.Parameter(torch.zeros(output_dim))

    def forward(self, features: Tensor, masked_tokens: Tensor | None = None, **options: object) -> Tensor:
        """Logits of hidden states, all of them or those at *masked_tokens*."""
        x = features if masked_tokens is None else features[masked_tokens, :]
        return F.linear(self.layer_norm(self.activation_fn(self.dense(x))), self.weight, self.bias)


class RobertaClassificationHead(nn.Module):
    """Dropout, dense layer, activation, dropout, projection to classes, over the first token."""

    def __init__(
        self,
        input_dim: int,
        inner_dim: int,
        num_classes: int,
        activation_fn: str,
        pooler_dropout: float,
        q_noise: float = 0,
        qn_block_size: int = 8,
        do_spectral_norm: bool = False,
    ) -> None:
        super().__init__()
        self.dense = nn.Linear(input_dim, inner_dim)
        self.activation_fn = get_activation_fn(activation_fn)
        self.dropout = nn.Dropout(pooler_dropout)
        self.out_proj: nn.Module = quant_noise(nn.Linear(inner_dim, num_classes), q_noise, qn_block_size)
        if do_spectral_norm:
            self.out_proj = nn.utils.spectral_norm(self.out_proj)

    def forward(self, features: Tensor, **options: object) -> Tensor:
        """Logits: [B, T, C] → [B, n]."""
        return self.out_proj(self.dropout(self.activation_fn(self.dense(self.dropout(features[:, 0])))))


class RobertaEncoder(FairseqEncoder):
    """An encoder with its output layer, made of a plug-in's settings."""

    def __init__(self, args: Any, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        completed(args)
        self.args = args
        embed_tokens = self.build_embedding(len(dictionary), args.encoder_embed_dim, dictionary.pad())
        self.sentence_encoder = self.build_encoder(args, dictionary, embed_tokens)
        self.lm_head = self.build_lm_head(
            embed_dim=args.encoder_embed_dim,
            output_dim=len(dictionary),
            activation_fn=args.activation_fn,
            weight=None if args.untie_weights_roberta else self.sentence_encoder.embed_tokens.weight,
        )

    def build_embedding(self, vocab_size: int, embedding_dim: int, padding_idx: int) -> nn.Module:
        """The embeddings; plug-ins override it."""
        return nn.Embedding(vocab_size, embedding_dim, padding_idx)

    def build_encoder(self, args: object, dictionary: object, embed_tokens: nn.Module) -> Any:
        """The layers; plug-ins override it."""
        encoder = TransformerEncoder(args, dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder

    def build_lm_head(self, embed_dim: int, output_dim: int, activation_fn: str, weight: object) -> nn.Module:
        """The output layer; plug-ins override it."""
        return RobertaLMHead(embed_dim, output_dim, activation_fn, weight)

    def forward(  # type: ignore[override]
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        masked_tokens: Tensor | None = None,
        **inputs: object,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits [B, T, V], at *masked_tokens* [N, V], or hidden states [B, T, C]; and
        ``inner_states``."""
        features, extra = self.extract_features(src_tokens, return_all_hiddens, **inputs)
        return features if features_only else self.output_layer(features, masked_tokens=masked_tokens), extra

    def extract_features(
        self, src_tokens: Tensor, return_all_hiddens: bool = False, **inputs: object
    ) -> tuple[Tensor, dict[str, Any]]:
        """Hidden states [B, T, C] of the last layer; ``inner_states`` are those after each layer
        [T, B, C], or None."""
        embeddings = inputs.get("token_embeddings")
        output = self.sentence_encoder(src_tokens, return_all_hiddens=return_all_hiddens, token_embeddings=embeddings)
        states = output["encoder_states"] if return_all_hiddens else None
        return output["encoder_out"][0].transpose(0, 1), {"inner_states": states}

    def output_layer(self, features: Tensor, masked_tokens: Tensor | None = None, **options: object) -> Tensor:
        """Logits of hidden states, all of them or those at *masked_tokens*."""
        return self.lm_head(features, masked_tokens)

    def max_positions(self) -> int:
        return self.args.max_positions


class RobertaModel(FairseqEncoderModel):
    """BERT and RoBERTa, under the name and with the constructor and hooks that scripts and plug-ins
    know."""

    def __init__(self, args: Any, encoder: nn.Module) -> None:
        super().__init__(encoder)
        self.args = args
        # The initial values of all parts, those that a plug-in put in included, are BERT's.
        self.apply(init_bert_params)
        self.classification_heads = nn.ModuleDict()

    @classmethod
    def settings_of(cls, settings: Any) -> Any:
        return namespace_of(settings)

    @classmethod
    def unread(cls, stored: Mapping[str, object]) -> Mapping[str, object]:
        return {}

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """The encoder in a folder; see :mod:`fairseq.interop.fairseq.roberta_hub`."""
        return deferred.plugins().from_pretrained(cls, *args, **options)

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        """Add the flags of encoders, and of the settings that only plug-ins can change."""
        add_flags(parser, BertConfig)
        for name, value in ARCHITECTURE.items():
            if name not in defaults(BertConfig):
                kind: Any = {"action": "store_true"} if isinstance(value, bool) else {"type": type(value or "")}
                parser.add_argument(flag_name(name), **kind)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> RobertaModel:
        completed(args)
        return cls(args, RobertaEncoder(args, task.source_dictionary))

    def forward(  # type: ignore[override]
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        classification_head_name: str | None = None,
        **inputs: object,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The encoder's output, or logits [B, n] of a head; see :class:`RobertaEncoder`."""
        head = classification_head_name
        x, extra = self.encoder(src_tokens, features_only or head is not None, return_all_hiddens, **inputs)
        return x if head is None else self.classification_heads[head](x), extra

    def register_classification_head(
        self, name: str, num_classes: int | None = None, inner_dim: int | None = None, **options: object
    ) -> None:
        """Add a head over the first token, with the settings ``pooler_…``."""
        args = completed(self.args)
        self.classification_heads[name] = RobertaClassificationHead(
            args.encoder_embed_dim,
            inner_dim or args.encoder_embed_dim,
            num_classes or 2,
            args.pooler_activation_fn,
            args.pooler_dropout,
            args.quant_noise_pq,
            args.quant_noise_pq_block_size,
            do_spectral_norm=args.spectral_norm_classification_head,
        )

    @property
    def decoder(self) -> Any:
        """The encoder, under its name before fairseq 0.10."""
        return self.encoder

    @property
    def supported_targets(self) -> set[str]:
        """What the model predicts: the tokens themselves."""
        return {"self"}

    def get_normalized_probs(self, net_output: Any, log_probs: bool, sample: object = None) -> Tensor:
        return normalized(net_output[0], log_probs)

    def upgrade_state_dict_named(self, state_dict: dict[str, object], name: str) -> Any:
        """Rename what former versions called otherwise, and keep the heads that the model has."""
        prefix = f"{name}." if name else ""
        for key in list(state_dict):
            renamed = key
            if key.startswith(f"{prefix}decoder."):
                renamed = f"{prefix}encoder.{key.removeprefix(f'{prefix}decoder.')}"
            renamed = renamed.replace(".emb_layer_norm.", ".layernorm_embedding.")
            if renamed != key:
                state_dict[renamed] = state_dict.pop(key)
        super().upgrade_state_dict_named(state_dict, name)
        present = self.state_dict()
        for key in [key for key in state_dict if key.startswith(f"{prefix}classification_heads.")]:
            if key.removeprefix(prefix) not in present:
                del state_dict[key]
        # A file of before fine-tuning has no heads: they begin anew.
        for key, value in self.classification_heads.state_dict(prefix="classification_heads.").items():
            state_dict.setdefault(prefix + key, value)
        for key, value in present.items():
            # Markers of fairseq's versions, which files of this package lack.
            if key.endswith(".version"):
                state_dict.setdefault(prefix + key, value)
        return state_dict


XLMRModel = CamembertModel = GottbertModel = RobertaModel


__getattr__, _ = names_of(
    __name__,
    {
        "fairseq.models.registries": """
            base_architecture=roberta_architecture roberta_base_architecture roberta_large_architecture xlm_architecture
        """,
        "fairseq.modules.fairseq_layers": "TransformerSentenceEncoder",
    },
)
