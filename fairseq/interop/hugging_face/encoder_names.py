"""Parameters of encoders: the names here and in Hugging Face files, with shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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
class EncoderSizes:
    """Sizes of an encoder.

    Attributes:
        kind: ``bert``, ``roberta``, or ELECTRA's ``generator`` or ``discriminator``.
        embed_dim, dim: width of the embeddings, channels of the layers.
        positions: rows of Hugging Face's position table.
        untied: the output projection is a separate parameter.
    """

    kind: str
    vocabulary: int
    padding_idx: int
    embed_dim: int
    dim: int
    ffn_dim: int
    layers: int
    positions: int
    token_types: int
    untied: bool = False

    @property
    def first_position(self) -> int:
        """Rows of the position table here before the first one of Hugging Face; 0 for RoBERTa."""
        return 0 if self.kind == "roberta" else self.padding_idx + 1


class Parameter(NamedTuple):
    """A parameter under both names, with its shape in Hugging Face's files."""

    ours: str
    theirs: str
    shape: tuple[int, ...]


def parameters(sizes: EncoderSizes) -> Iterator[Parameter]:
    """All parameters of an encoder and its output layer."""
    yield from encoder_parameters(sizes)
    yield from _head(sizes)


def classifier_parameters(sizes: EncoderSizes, head: str, outputs: int) -> Iterator[Parameter]:
    """All parameters of an encoder and the classification head called *head*, with *outputs* classes."""
    yield from encoder_parameters(sizes)
    dense, out_proj = {
        "bert": ("bert.pooler.dense", "classifier"),
        "roberta": ("classifier.dense", "classifier.out_proj"),
        "discriminator": ("classifier.dense", "classifier.out_proj"),
    }[sizes.kind]
    yield from _linear(f"classification_heads.{head}.dense", dense, sizes.dim, sizes.dim)
    yield from _linear(f"classification_heads.{head}.out_proj", out_proj, outputs, sizes.dim)


def encoder_parameters(sizes: EncoderSizes) -> Iterator[Parameter]:
    """All parameters of an encoder."""
    base, encoder = BASES[sizes.kind], "encoder.sentence_encoder"
    there = f"{base}.embeddings"
    yield Parameter(TOKENS, f"{there}.word_embeddings.weight", (sizes.vocabulary, sizes.embed_dim))
    yield Parameter(POSITIONS, f"{there}.position_embeddings.weight", (sizes.positions, sizes.embed_dim))
    yield Parameter(TYPES, f"{there}.token_type_embeddings.weight", (sizes.token_types, sizes.embed_dim))
    yield from _norm(f"{encoder}.emb_layer_norm", f"{there}.LayerNorm", sizes.embed_dim)
    if sizes.embed_dim != sizes.dim:
        yield from _linear(f"{encoder}.project_in_dim", f"{base}.embeddings_project", sizes.dim, sizes.embed_dim)
    for number in range(sizes.layers):
        yield from _layer(f"{encoder}.layers.{number}", f"{base}.encoder.layer.{number}", sizes.dim, sizes.ffn_dim)


def _layer(ours: str, theirs: str, dim: int, ffn_dim: int) -> Iterator[Parameter]:
    # There, `output` is a linear layer, dropout and the norm of the sum (the layers are post-norm), which explains why
    # out_proj and its norm share a prefix.
    for here, there in (("q", "query"), ("k", "key"), ("v", "value")):
        yield from _linear(f"{ours}.self_attn.{here}_proj", f"{theirs}.attention.self.{there}", dim, dim)
    yield from _linear(f"{ours}.self_attn.out_proj", f"{theirs}.attention.output.dense", dim, dim)
    yield from _norm(f"{ours}.self_attn_layer_norm", f"{theirs}.attention.output.LayerNorm", dim)
    yield from _linear(f"{ours}.fc1", f"{theirs}.intermediate.dense", ffn_dim, dim)
    yield from _linear(f"{ours}.fc2", f"{theirs}.output.dense", dim, ffn_dim)
    yield from _norm(f"{ours}.final_layer_norm", f"{theirs}.output.LayerNorm", dim)


def _head(sizes: EncoderSizes) -> Iterator[Parameter]:
    if sizes.kind == "discriminator":
        ours, theirs = "encoder.discriminator_head", "discriminator_predictions"
        yield from _linear(f"{ours}.dense", f"{theirs}.dense", sizes.dim, sizes.dim)
        yield from _linear(f"{ours}.out_proj", f"{theirs}.dense_prediction", 1, sizes.dim)
        return
    dense, norm = {
        "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
        "roberta": ("lm_head.dense", "lm_head.layer_norm"),
        "generator": ("generator_predictions.dense", "generator_predictions.LayerNorm"),
    }[sizes.kind]
    yield from _linear("encoder.lm_head.dense", dense, sizes.embed_dim, sizes.dim)
    yield from _norm("encoder.lm_head.layer_norm", norm, sizes.embed_dim)
    yield Parameter(OUTPUT_BIAS, OUTPUT_BIASES[sizes.kind], (sizes.vocabulary,))
    # Tied weights are not listed: a file may have them or not, which the reader handles.
    if sizes.untied:
        yield Parameter(OUTPUT, OUTPUT_WEIGHTS[sizes.kind], (sizes.vocabulary, sizes.embed_dim))


def _linear(ours: str, theirs: str, outputs: int, inputs: int) -> Iterator[Parameter]:
    yield Parameter(f"{ours}.weight", f"{theirs}.weight", (outputs, inputs))
    yield Parameter(f"{ours}.bias", f"{theirs}.bias", (outputs,))


def _norm(ours: str, theirs: str, dim: int) -> Iterator[Parameter]:
    for part in ("weight", "bias"):
        yield Parameter(f"{ours}.{part}", f"{theirs}.{part}", (dim,))
