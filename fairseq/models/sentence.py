"""A pre-trained encoder or decoder with a classification head in place of its output layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.errors import UserError
from fairseq.models.base import PAD, BaseFairseqModel
from fairseq.models.bert import ClassificationHead, encoder_parameters
from fairseq.models.decoder import Decoder
from fairseq.models.encoder import TransformerEncoder

HEADS = "classification_heads."
ONLY_IN_PRETRAINING = (
    *("generator_size", "untie_weights_roberta"),
    *("share_decoder_input_output_embed", "tie_adaptive_proj", "tie_weight", "tie_projs"),
)
OUTPUT_LAYERS = ("adaptive_softmax", "output_projection", "project_out_dim")  # of a decoder


class SentenceModel(BaseFairseqModel):
    """The layers of a pre-trained model and a head over one state of each row.

    The state is an encoder's of the first token (Devlin et al. 2019, §3.1), and a decoder's of the
    last token that is no padding (Radford et al. 2018, §3.2), which alone has read the whole row.
    What predicts words in pre-training is dropped: output layers, ELECTRA's generator.

    Args:
        pretrained: BERT, ELECTRA, a transformer language model or a Transformer-XL; of ELECTRA the
            discriminator is used.
        name: name of the head.
        outputs: number n of classes; 1 for regression.
        padding_idx: id of the padding behind a row's end.

    Raises:
        UserError: *pretrained* is another model.
    """

    predicts_next_token = False

    def __init__(
        self,
        pretrained: BaseFairseqModel,
        name: str,
        outputs: int,
        dropout: float = 0.0,
        activation_fn: str = "tanh",
        padding_idx: int = PAD,
    ) -> None:
        encoder = getattr(getattr(pretrained, "encoder", None), "sentence_encoder", None)
        decoder = getattr(pretrained, "decoder", None)
        layers: Any = encoder if isinstance(encoder, TransformerEncoder) else decoder
        if not isinstance(layers, TransformerEncoder | Decoder):
            raise UserError(
                f"`task` sentence_prediction: {type(pretrained).__name__} cannot be fine-tuned; use a bert, electra, "
                "transformer_lm or transformer_xl architecture"
            )
        super().__init__()
        cfg: Any = layers.cfg
        self.cfg = cfg
        self.skips_parameters = pretrained.skips_parameters
        self.padding_idx = padding_idx
        if isinstance(layers, Decoder):
            for part in OUTPUT_LAYERS:
                if getattr(layers, part, None) is not None:
                    setattr(layers, part, None)
            self.decoder = layers
            # A method of the whole model, which is no submodule: no parameter has two names.
            self._upgrade_decoder = pretrained.upgrade_state_dict
        else:
            self.encoder: Any = nn.ModuleDict({"sentence_encoder": layers})  # as fairseq's checkpoints name it
        width = pretrained.infused_dim if self.is_decoder else cfg.encoder_embed_dim
        assert width is not None
        self.width: int = width
        head = ClassificationHead(width, outputs, dropout, activation_fn)
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

    @property
    def is_decoder(self) -> bool:
        """Whether the pre-trained model is a decoder."""
        return hasattr(self, "decoder")

    def max_positions(self) -> int | None:
        return self.decoder.max_positions() if self.is_decoder else self.cfg.max_positions

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
            src_tokens: int64 [B, T], padded on the right.
            token_types: see :meth:`BertModel.forward`; a decoder has none.
            features_only: return hidden states, unless a head
                is named: fairseq's criterions ask for both.
            classification_head_name: the head.

        Returns:
            Logits [B, n], or the last layer's hidden states [B, T, C]; and
            ``{"hidden": hidden states}``.
        """
        if self.is_decoder:
            hidden = self.decoder(src_tokens)[0]  # (B, T, C)
            last = src_tokens.ne(self.padding_idx).sum(1) - 1  # (B)
            state = hidden[torch.arange(len(hidden), device=hidden.device), last]  # (B, C)
        else:
            hidden = self.encoder.sentence_encoder(src_tokens, token_types)
            state = hidden[:, 0]
        head = classification_head_name or ("" if features_only else self.name)
        return self.classification_heads[head](state) if head else hidden, {"hidden": hidden}

    def register_classification_head(self, name: str, num_classes: int = 2, **unused: object) -> None:
        """Add a head over the same state, for a plug-in's ``build_model``."""
        self.classification_heads[name] = ClassificationHead(self.width, num_classes)

    def upgrade_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of fairseq's RoBERTa or of a decoder, with the heads of this model."""
        # Heads of other names are for other tasks: their classes may be of another number.
        heads = tuple(f"{HEADS}{name}." for name in self.classification_heads)
        head = {name: value for name, value in state.items() if name.startswith(heads)}
        if not self.is_decoder:
            return {**encoder_parameters(state, tied=False), **head}
        rest = {name: value for name, value in state.items() if not name.startswith(HEADS)}
        outputs = tuple(f"decoder.{part}." for part in OUTPUT_LAYERS)
        kept = {n: value for n, value in self._upgrade_decoder(rest).items() if not n.startswith(outputs)}
        return {**kept, **head}

    def lacks_head(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether *parameters* lack this head, or have one for other classes."""
        head = self.classification_heads.state_dict(prefix=HEADS)
        return any(name not in parameters or parameters[name].shape != value.shape for name, value in head.items())

    def check_init(self, parameters: Mapping[str, Tensor], source: str) -> None:
        """Raise UserError if *parameters* lack a part
        of the layers, or have one of another shape."""
        upgraded = self.upgrade_state_dict(dict(parameters))
        for name, initial in self.state_dict().items():
            if name.startswith(HEADS):
                continue
            if name not in upgraded:
                raise UserError(f"{source}: has no {name}; give a checkpoint of the model that `arch` names")
            if upgraded[name].shape == initial.shape:
                continue
            if name.endswith("embed_tokens.weight"):
                raise UserError(
                    f"{source}: was trained with a dictionary of {len(upgraded[name])} symbols, but `data_bin` has "
                    f"{len(initial)}; give the data folder it was trained with"
                )
            shapes = f"{list(upgraded[name].shape)}, not {list(initial.shape)}"
            raise UserError(f"{source}: {name} has the shape {shapes}; use the sizes of the checkpoint")
