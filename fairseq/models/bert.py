"""BERT and RoBERTa: bidirectional encoders for masked language modelling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fairseq.checkpoint.former_layouts import BUFFERS
from fairseq.config.fields import typed
from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.models.encoder import TransformerEncoder, initialize
from fairseq.models.encoder_settings import INIT_STD, BertConfig
from fairseq.modules.dropout import dropout
from fairseq.modules.linear import Linear
from fairseq.modules.norms import layer_norm
from fairseq.modules.output_layer import LinearOutput, OutputLayer
from fairseq.modules.transformer_layer import EmbeddingHook, activation


class MaskedLMHead(LinearOutput):
    """Dense layer, activation, layer norm, and a projection
    to all words with a bias (Devlin et al. 2019, §3.1).

    The *weight* of the projection, [V, E], is usually the token embeddings'.
    """

    def __init__(self, cfg: BertConfig, weight: nn.Parameter) -> None:
        super().__init__(weight, nn.Parameter(torch.zeros(weight.size(0))))
        self.dense = Linear(cfg.encoder_embed_dim, weight.size(1))
        self.layer_norm = layer_norm(weight.size(1), not cfg.no_apex, cfg.layer_norm_eps)
        self.activation = activation(cfg.head_activation)
        # The projection is the embeddings', which have their initial values already.
        initialize(self.dense, cfg.init_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits: [..., C] → [..., V]."""
        return self._logits(self._transform(hidden))

    def _transform(self, hidden: Tensor) -> Tensor:
        return self.layer_norm(self.activation(self.dense(hidden)))


class ClassificationHead(nn.Module):
    """Dropout, dense layer, activation, dropout,
    projection to n classes (Devlin et al. 2019, §3.2)."""

    def __init__(
        self, dim: int, outputs: int, dropout: float = 0.0, activation_fn: str = "tanh", init_std: float = INIT_STD
    ) -> None:
        super().__init__()
        self.dense = Linear(dim, dim)
        self.out_proj = Linear(dim, outputs)
        self.activation = activation(activation_fn)
        self.dropout = dropout
        initialize(self, init_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits: [..., C] → [..., n]."""
        x = self.activation(self.dense(dropout(hidden, self.dropout, self.training)))
        return self.out_proj(dropout(x, self.dropout, self.training))


class MaskedLMEncoder(nn.Module):
    """An encoder and its output layer, under fairseq's
    names ``sentence_encoder`` and ``lm_head``."""

    def __init__(
        self, cfg: BertConfig, vocabulary: int, padding_idx: int, embeddings: TransformerEncoder | None = None
    ) -> None:
        super().__init__()
        self.sentence_encoder = TransformerEncoder(cfg, vocabulary, padding_idx, embeddings)
        weight: Any = self.sentence_encoder.embed_tokens.weight
        if cfg.untie_weights_roberta:
            # A new tensor, not a copy: untied weights begin independent of the embeddings.
            weight = nn.Parameter(torch.empty_like(weight).normal_(std=cfg.init_std))
        self.lm_head = MaskedLMHead(cfg, weight)


class EncoderModel(BaseFairseqModel):
    """Base of models with an encoder."""

    predicts_next_token = False

    def __init__(self, cfg: BertConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.skips_parameters = cfg.encoder_layerdrop > 0

    def max_positions(self) -> int:
        return self.cfg.max_positions

    def register_classification_head(self, name: str, num_classes: int = 2, **unused: object) -> None:
        """Refuse what plug-ins' tasks call."""
        raise UserError(
            f"{type(self).__name__}: register_classification_head: use a roberta architecture, or derive the model "
            "from RobertaModel"
        )


class BertModel(EncoderModel):
    """A masked language model (Devlin et al. 2019; Liu et al.
    2019), with the parameter names of fairseq's RoBERTa."""

    config_class = BertConfig
    decisive_settings = (
        *("encoder_attention_heads", "activation_fn", "head_activation_fn", "layer_norm_eps"),
        "untie_weights_roberta",  # a checkpoint has tied parameters under each of their names
    )

    def __init__(self, encoder: MaskedLMEncoder, cfg: BertConfig) -> None:
        super().__init__(cfg)
        self.encoder = encoder

    @classmethod
    def build_model(cls, args: BertConfig, task: Any) -> BertModel:
        cfg = typed(BertConfig, args)
        return cls(MaskedLMEncoder(cfg, *vocabulary_of(task)), cfg)

    @property
    def masked_lm(self) -> MaskedLMEncoder:
        """The encoder that predicts masked tokens."""
        return self.encoder

    @property
    def output_layer(self) -> OutputLayer:  # type: ignore[override]
        return self.encoder.lm_head

    def forward(
        self,
        src_tokens: Tensor,
        token_types: Tensor | None = None,
        features_only: bool = False,
        infuse: EmbeddingHook | None = None,
        padded: bool | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return logits of every token, or the last hidden states.

        Args:
            src_tokens: int64 [B, T]; padding is detected from the ids.
            token_types: int64 [B, T], where the model has token types; None: all 0.
            features_only: return hidden states,
                for a criterion that needs the logits of a few tokens.
            infuse: applied to the summed embeddings.
            padded: whether *src_tokens* have padding; None: not known.

        Returns:
            Logits [B, T, V], or the last layer's hidden states [B, T, C]; and
            ``{"hidden": hidden states}``.
        """
        hidden = self.encoder.sentence_encoder(src_tokens, token_types, infuse, padded)  # (B, T, C)
        return hidden if features_only else self.encoder.lm_head(hidden), {"hidden": hidden}

    def upgrade_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return encoder_parameters(state, tied=not self.cfg.untie_weights_roberta)


def vocabulary_of(task: Any) -> tuple[int, int]:
    """The number of symbols of *task*'s dictionary,
    and the id of its padding; UserError if it has none."""
    dictionary = task.source_dictionary
    if dictionary.pad() < 0:
        raise UserError(
            "dict.txt: an encoder needs a padding symbol, which the dictionary lacks; "
            "name one as pad=WORD in its #specials line"
        )
    return len(dictionary), dictionary.pad()


def encoder_parameters(state: dict[str, Tensor], tied: bool = True) -> dict[str, Tensor]:
    """Return the parameters of fairseq's RoBERTa that an encoder has:
    without version markers and fine-tuning heads."""
    upgraded = {
        name: value
        for name, value in state.items()
        # Heads belong to the task that they were fine-tuned on,
        # and are loaded by the model of that task.
        if name.rpartition(".")[2] not in BUFFERS and not name.startswith("classification_heads.")
    }
    table = "encoder.sentence_encoder.embed_tokens.weight"
    # Files of tied models may have the matrix under the name of the embeddings only.
    if tied and table in upgraded:
        upgraded.setdefault("encoder.lm_head.weight", upgraded[table])
    return upgraded
