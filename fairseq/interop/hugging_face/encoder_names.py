"""Parameters of encoders: the names here and in Hugging Face files, with shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fairseq.models.encoder_settings import BertConfig

TOKENS = "encoder.sentence_encoder.embed_tokens.weight"
POSITIONS = "encoder.sentence_encoder.embed_positions.weight"
TYPES = "encoder.sentence_encoder.segment_embeddings.weight"
OUTPUT, OUTPUT_BIAS = "encoder.lm_head.weight", "encoder.lm_head.bias"
BASES = {"bert": "bert", "roberta": "roberta", "generator": "electra", "discriminator": "electra"}
OUTPUT_WEIGHTS = {
    "bert": "cls.predictions.decoder.weight",
    "roberta": "lm_head.decoder.weight",
    "generator": "generator_lm_head.weight",
}
OUTPUT_BIASES = {
    "bert": "cls.predictions.bias",
    "roberta": "lm_head.bias",
    "generator": "generator_lm_head.bias",
}
HEADS = {  # first part of the names of the output layer
    "bert": "cls.predictions.",
    "roberta": "lm_head.",
    "generator": "generator_predictions.",
    "discriminator": "discriminator_predictions.",
}


@dataclass(frozen=True)
class EncoderLayout:
    """An encoder, as it is stored in Hugging Face's files."""

    kind: str  # ``bert``, ``roberta``, or ELECTRA's ``generator`` or ``discriminator``
    cfg: BertConfig  # its settings here
    vocabulary: int
    padding_idx: int

    @property
    def first_position(self) -> int:
        """Rows of the position table here before the first one of Hugging Face; 0 for RoBERTa."""
        return 0 if self.kind == "roberta" else self.padding_idx + 1

    @property
    def positions(self) -> int:
        """Rows of Hugging Face's position table."""
        return self.cfg.max_positions + self.padding_idx + 1 - self.first_position

    @property
    def token_types(self) -> int:
        """Rows of Hugging Face's table of token types; a model without types gets one row of
        zeros."""
        return max(1, self.cfg.token_types)


class Parameter(NamedTuple):
    """A parameter under both names, with its shape in Hugging Face's files."""

    ours: str
    theirs: str
    shape: tuple[int, ...]


def parameters(layout: EncoderLayout) -> Iterator[Parameter]:
    """All parameters of an encoder and its output layer."""
    yield from encoder_parameters(layout)
    yield from _head(layout)


def classifier_parameters(layout: EncoderLayout, head: str, outputs: int) -> Iterator[Parameter]:
    """All parameters of an encoder and the classification head called *head*, with *outputs*
    classes."""
    yield from encoder_parameters(layout)
    dense, out_proj = {
        "bert": ("bert.pooler.dense", "classifier"),
        "roberta": ("classifier.dense", "classifier.out_proj"),
        "discriminator": ("classifier.dense", "classifier.out_proj"),
    }[layout.kind]
    dim = layout.cfg.encoder_embed_dim
    yield from _linear(f"classification_heads.{head}.dense", dense, dim, dim)
    yield from _linear(f"classification_heads.{head}.out_proj", out_proj, outputs, dim)


def encoder_parameters(layout: EncoderLayout) -> Iterator[Parameter]:
    """All parameters of an encoder."""
    base, encoder = BASES[layout.kind], "encoder.sentence_encoder"
    dim, ffn_dim, width = layout.cfg.encoder_embed_dim, layout.cfg.encoder_ffn_embed_dim, layout.cfg.embedding_dim
    there = f"{base}.embeddings"
    yield Parameter(TOKENS, f"{there}.word_embeddings.weight", (layout.vocabulary, width))
    yield Parameter(POSITIONS, f"{there}.position_embeddings.weight", (layout.positions, width))
    yield Parameter(TYPES, f"{there}.token_type_embeddings.weight", (layout.token_types, width))
    yield from _norm(f"{encoder}.emb_layer_norm", f"{there}.LayerNorm", width)
    if width != dim:
        yield from _linear(f"{encoder}.project_in_dim", f"{base}.embeddings_project", dim, width)
    for number in range(layout.cfg.encoder_layers):
        yield from _layer(f"{encoder}.layers.{number}", f"{base}.encoder.layer.{number}", dim, ffn_dim)


def _layer(ours: str, theirs: str, dim: int, ffn_dim: int) -> Iterator[Parameter]:
    # There, `output` is a linear layer, dropout and the norm of the sum (the layers are post-norm),
    # which explains why out_proj and its norm share a prefix.
    for here, there in (("q", "query"), ("k", "key"), ("v", "value")):
        yield from _linear(f"{ours}.self_attn.{here}_proj", f"{theirs}.attention.self.{there}", dim, dim)
    yield from _linear(f"{ours}.self_attn.out_proj", f"{theirs}.attention.output.dense", dim, dim)
    yield from _norm(f"{ours}.self_attn_layer_norm", f"{theirs}.attention.output.LayerNorm", dim)
    yield from _linear(f"{ours}.fc1", f"{theirs}.intermediate.dense", ffn_dim, dim)
    yield from _linear(f"{ours}.fc2", f"{theirs}.output.dense", dim, ffn_dim)
    yield from _norm(f"{ours}.final_layer_norm", f"{theirs}.output.LayerNorm", dim)


def _head(layout: EncoderLayout) -> Iterator[Parameter]:
    dim, width = layout.cfg.encoder_embed_dim, layout.cfg.embedding_dim
    if layout.kind == "discriminator":
        ours, theirs = "encoder.discriminator_head", "discriminator_predictions"
        yield from _linear(f"{ours}.dense", f"{theirs}.dense", dim, dim)
        yield from _linear(f"{ours}.out_proj", f"{theirs}.dense_prediction", 1, dim)
        return
    dense, norm = {
        "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
        "roberta": ("lm_head.dense", "lm_head.layer_norm"),
        "generator": ("generator_predictions.dense", "generator_predictions.LayerNorm"),
    }[layout.kind]
    yield from _linear("encoder.lm_head.dense", dense, width, dim)
    yield from _norm("encoder.lm_head.layer_norm", norm, width)
    yield Parameter(OUTPUT_BIAS, OUTPUT_BIASES[layout.kind], (layout.vocabulary,))
    # Tied weights are not listed: a file may have them or not, which the reader handles.
    if layout.cfg.untie_weights_roberta:
        yield Parameter(OUTPUT, OUTPUT_WEIGHTS[layout.kind], (layout.vocabulary, width))


def _linear(ours: str, theirs: str, outputs: int, inputs: int) -> Iterator[Parameter]:
    yield Parameter(f"{ours}.weight", f"{theirs}.weight", (outputs, inputs))
    yield Parameter(f"{ours}.bias", f"{theirs}.bias", (outputs,))


def _norm(ours: str, theirs: str, dim: int) -> Iterator[Parameter]:
    for part in ("weight", "bias"):
        yield Parameter(f"{ours}.{part}", f"{theirs}.{part}", (dim,))
