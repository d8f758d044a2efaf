"""BERT and RoBERTa: bidirectional encoders for masked language modelling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.checkpoint.former_layouts import BUFFERS
from fairseq.config.fields import flag, typed
from fairseq.config.registry import register_model
from fairseq.errors import SettingError, UserError
from fairseq.models.base import MOST_LAYERS, BaseFairseqModel, ModelConfig
from fairseq.models.heads import MaskedLMHead
from fairseq.modules.encoder import INIT_STD, EncoderShape, TransformerEncoder
from fairseq.modules.output_layer import OutputLayer
from fairseq.modules.transformer_layer import ACTIVATIONS, Infuse


@dataclass(frozen=True)
class BertConfig(ModelConfig):
    """Settings of an encoder."""

    encoder_layers: int = flag(12, "number of layers", low=1, high=MOST_LAYERS)
    encoder_embed_dim: int = flag(768, "width of the model", low=1)
    encoder_input_dim: int | None = flag(None, "width of the embeddings (default: `encoder_embed_dim`)", low=1)
    encoder_ffn_embed_dim: int = flag(3072, "width of the feed-forward networks", low=1)
    encoder_attention_heads: int = flag(12, "attention heads of each layer", low=1)
    activation_fn: str = flag("gelu", "activation of the feed-forward networks", choices=tuple(ACTIVATIONS))
    head_activation_fn: str | None = flag(
        None, "activation of the output layer (default: `activation_fn`)", choices=tuple(ACTIVATIONS)
    )
    dropout: float = flag(0.1, "dropout after embeddings, attention and feed-forward networks", low=0, below=1)
    attention_dropout: float = flag(0.1, "dropout of attention weights", low=0, below=1)
    activation_dropout: float = flag(
        0.0, "dropout inside the feed-forward networks", aliases=("--relu-dropout",), low=0, below=1
    )
    encoder_layerdrop: float = flag(0.0, "LayerDrop: probability of skipping a layer in training", low=0, below=1)
    max_positions: int = flag(512, "maximum tokens per row", low=1)
    token_types: int = flag(0, "number of token types (0: none)", low=0)
    layer_norm_eps: float = flag(1e-5, "constant added to the variance in layer norms", above=0)
    init_std: float = flag(INIT_STD, "standard deviation of initial weights", low=0)
    untie_weights_roberta: bool = flag(False, "output weights separate from the token embeddings")

    def check(self) -> None:
        if self.encoder_embed_dim % self.encoder_attention_heads:
            raise SettingError(
                f"`encoder_attention_heads` {self.encoder_attention_heads}: "
                f"must divide `encoder_embed_dim` {self.encoder_embed_dim}"
            )

    def shape(self, vocabulary: int, padding_idx: int, apex: bool = True) -> EncoderShape:
        """Sizes and rates of the encoder, for a dictionary of *vocabulary* symbols."""
        return EncoderShape(
            vocabulary=vocabulary,
            padding_idx=padding_idx,
            embed_dim=self.encoder_input_dim or self.encoder_embed_dim,
            dim=self.encoder_embed_dim,
            ffn_dim=self.encoder_ffn_embed_dim,
            layers=self.encoder_layers,
            heads=self.encoder_attention_heads,
            max_positions=self.max_positions,
            token_types=self.token_types,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            activation_dropout=self.activation_dropout,
            activation_fn=self.activation_fn,
            head_activation_fn=self.head_activation_fn or self.activation_fn,
            layer_norm_eps=self.layer_norm_eps,
            apex=apex,
            init_std=self.init_std,
            layerdrop=self.encoder_layerdrop,
        )


class MaskedLMEncoder(nn.Module):
    """An encoder and its output layer, under fairseq's names ``sentence_encoder`` and ``lm_head``.

    Args:
        shape: sizes and rates.
        embeddings: an encoder to share embeddings with; None: new ones.
        untied: use an output projection separate from the token embeddings.
    """

    def __init__(self, shape: EncoderShape, embeddings: TransformerEncoder | None = None, untied: bool = False) -> None:
        super().__init__()
        self.sentence_encoder = TransformerEncoder(shape, embeddings)
        weight: Any = self.sentence_encoder.embed_tokens.weight
        if untied:
            # A new tensor, not a copy: untied weights begin independent of the embeddings.
            weight = nn.Parameter(torch.empty_like(weight).normal_(std=shape.init_std))
        self.lm_head = MaskedLMHead(
            shape.dim, weight, shape.head_activation_fn, shape.layer_norm_eps, shape.apex, shape.init_std
        )


@register_model("bert", dataclass=BertConfig)
class BertModel(BaseFairseqModel):
    """A masked language model (Devlin et al. 2019; Liu et al. 2019), with the parameter names of fairseq's RoBERTa.

    Args:
        encoder: encoder and output layer.
        cfg: its settings.
    """

    decisive_settings = (
        *("encoder_attention_heads", "activation_fn", "head_activation_fn", "layer_norm_eps"),
        "untie_weights_roberta",  # a checkpoint has tied parameters under each of their names
    )
    predicts_next_token = False

    def __init__(self, encoder: MaskedLMEncoder, cfg: BertConfig) -> None:
        super().__init__()
        self.encoder = encoder
        self.cfg = cfg
        self.skips_parameters = cfg.encoder_layerdrop > 0

    @classmethod
    def build_model(cls, args: BertConfig, task: Any) -> BertModel:
        cfg = typed(BertConfig, args)
        shape = cfg.shape(*vocabulary_of(task), apex=not cfg.no_apex)
        return cls(MaskedLMEncoder(shape, untied=cfg.untie_weights_roberta), cfg)

    @property
    def masked_lm(self) -> MaskedLMEncoder:
        """The encoder that predicts masked tokens."""
        return self.encoder

    @property
    def output_layer(self) -> OutputLayer:  # type: ignore[override]
        return self.encoder.lm_head

    def max_positions(self) -> int:
        return self.cfg.max_positions

    def forward(
        self,
        src_tokens: Tensor,
        token_types: Tensor | None = None,
        features_only: bool = False,
        infuse: Infuse | None = None,
        padded: bool | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return logits of every token, or the last hidden states.

        Args:
            src_tokens: int64 [B, T]; padding is detected from the ids.
            token_types: int64 [B, T], where the model has token types; None: all 0.
            features_only: return hidden states, for a criterion that needs the logits of a few tokens.
            infuse: applied to the summed embeddings.
            padded: whether *src_tokens* have padding; None: not known.

        Returns:
            Logits [B, T, V], or the last layer's hidden states [B, T, C]; and ``{"hidden": hidden states}``.
        """
        hidden = self.encoder.sentence_encoder(src_tokens, token_types, infuse, padded)  # (B, T, C)
        return hidden if features_only else self.encoder.lm_head(hidden), {"hidden": hidden}

    def upgrade_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return encoder_parameters(state, tied=not self.cfg.untie_weights_roberta)


def vocabulary_of(task: Any) -> tuple[int, int]:
    """The number of symbols of *task*'s dictionary, and the id of its padding.

    Raises:
        UserError: the dictionary has no padding symbol.
    """
    dictionary = task.source_dictionary
    if dictionary.pad() < 0:
        raise UserError(
            "dict.txt: an encoder needs a padding symbol, which the dictionary lacks; "
            "name one as pad=WORD in its #specials line"
        )
    return len(dictionary), dictionary.pad()


def encoder_parameters(state: dict[str, Tensor], tied: bool = True) -> dict[str, Tensor]:
    """Return the parameters of fairseq's RoBERTa that an encoder has: without version markers and fine-tuning heads."""
    upgraded = {
        name: value
        for name, value in state.items()
        # Heads belong to the task that they were fine-tuned on, and are loaded by the model of that task.
        if name.rpartition(".")[2] not in BUFFERS and not name.startswith("classification_heads.")
    }
    table = "encoder.sentence_encoder.embed_tokens.weight"
    # Files of tied models may have the matrix under the name of the embeddings only.
    if tied and table in upgraded:
        upgraded.setdefault("encoder.lm_head.weight", upgraded[table])
    return upgraded
