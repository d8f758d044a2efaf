"""An encoder with a classification head in place of its pre-training head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.models.bert import ClassificationHead, EncoderModel, encoder_parameters
from fairseq.models.encoder import TransformerEncoder

HEADS = "classification_heads."
ONLY_IN_PRETRAINING = ("generator_size", "untie_weights_roberta")


class SentenceModel(EncoderModel):
    """The encoder of a pre-training model and a head
    over the first token, with fairseq's parameter names.

    Other parts of the pre-training model, such
    as the output layer and ELECTRA's generator, are dropped.

    Args:
        pretrained: BERT or ELECTRA; of ELECTRA the discriminator is used.
        name: name of the head.
        outputs: number n of classes; 1 for regression.

    Raises:
        UserError: *pretrained* is not an encoder.
    """

    def __init__(
        self, pretrained: BaseFairseqModel, name: str, outputs: int, dropout: float = 0.0, activation_fn: str = "tanh"
    ) -> None:
        encoder = getattr(getattr(pretrained, "encoder", None), "sentence_encoder", None)
        if not isinstance(encoder, TransformerEncoder):
            raise UserError(
                f"`task` sentence_prediction: {type(pretrained).__name__} is not an encoder; use a bert or electra "
                "architecture"
            )
        super().__init__(encoder.cfg)
        self.encoder: Any = nn.ModuleDict({"sentence_encoder": encoder})  # as fairseq's checkpoints name it
        head = ClassificationHead(encoder.cfg.encoder_embed_dim, outputs, dropout, activation_fn)
        try:
            self.classification_heads = nn.ModuleDict({name: head})
        # torch rejects names of modules with a dot, or names of a module's own attributes.
        except KeyError:
            raise UserError(
                f"`classification_head_name` {name}: not possible as the name of a module; use another, without dots"
            ) from None
        self.name = name
        self.config_class = pretrained.config_class
        self.decisive_settings = tuple(s for s in pretrained.decisive_settings if s not in ONLY_IN_PRETRAINING)

    def forward(
        self,
        src_tokens: Tensor,
        token_types: Tensor | None = None,
        features_only: bool = False,
        classification_head_name: str | None = None,
        src_lengths: Tensor | None = None,  # in batches of fairseq's datasets; padding tells it, too
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits of each row's classes, or its score.

        Args:
            src_tokens, token_types: see :meth:`BertModel.forward`.
            features_only: return hidden states, unless a head
                is named: fairseq's criterions ask for both.
            classification_head_name: the head.

        Returns:
            Logits [B, n], or the last layer's hidden states [B, T, C]; and
            ``{"hidden": hidden states}``.
        """
        hidden = self.encoder.sentence_encoder(src_tokens, token_types)  # (B, T, C)
        # The first token's state stands for the row (Devlin et al. 2019, §3.1).
        head = classification_head_name or ("" if features_only else self.name)
        output = self.classification_heads[head](hidden[:, 0]) if head else hidden
        return output, {"hidden": hidden}

    def register_classification_head(self, name: str, num_classes: int = 2, **unused: object) -> None:
        """Add a head over the first token, for a plug-in's ``build_model``."""
        self.classification_heads[name] = ClassificationHead(self.cfg.encoder_embed_dim, num_classes)

    def upgrade_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of fairseq's RoBERTa, with the heads of this model."""
        # Heads of other names are for other tasks: their classes may be of another number.
        heads = tuple(f"{HEADS}{name}." for name in self.classification_heads)
        head = {name: value for name, value in state.items() if name.startswith(heads)}
        return {**encoder_parameters(state, tied=False), **head}

    def is_begun_by(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether *parameters* lack this head, or have one for other classes."""
        head = self.classification_heads.state_dict(prefix=HEADS)
        return any(name not in parameters or parameters[name].shape != value.shape for name, value in head.items())

    def check_start(self, parameters: Mapping[str, Tensor], source: str) -> None:
        """Raise UserError if *parameters* lack a part
        of the encoder, or have one of another shape."""
        upgraded = self.upgrade_state_dict(dict(parameters))
        for name, initial in self.encoder.state_dict(prefix="encoder.").items():
            if name not in upgraded:
                raise UserError(f"{source}: has no {name}; give a checkpoint of a bert or electra model")
            if upgraded[name].shape == initial.shape:
                continue
            if name.endswith("embed_tokens.weight"):
                raise UserError(
                    f"{source}: was trained with a dictionary of {len(upgraded[name])} symbols, but `data_bin` has "
                    f"{len(initial)}; give the data folder it was trained with"
                )
            shapes = f"{list(upgraded[name].shape)}, not {list(initial.shape)}"
            raise UserError(f"{source}: {name} has the shape {shapes}; use the sizes of the checkpoint")
