"""The named sets of defaults of ``bert`` and ``electra``: published systems, and small ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Defaults = Mapping[str, Any]


def encoder_sizes(layers: int, dim: int, heads: int) -> dict[str, object]:
    """The sizes of an encoder, whose feed-forward networks are 4 · *dim* wide."""
    return {
        "encoder_layers": layers,
        "encoder_embed_dim": dim,
        "encoder_attention_heads": heads,
        "encoder_ffn_embed_dim": 4 * dim,
    }


DEVLIN = {"token_types": 2, "layer_norm_eps": 1e-12}
BERT_BASE = {**DEVLIN, **encoder_sizes(12, 768, 12)}  # Devlin et al. 2019: 110 M parameters with 30,522 symbols
ROBERTA_BASE = encoder_sizes(12, 768, 12)  # Liu et al. 2019: the sizes of BERT-base, no token types
# Clark et al. 2020, table 6: the sizes of BERT-base, a generator of a third of its width.
ELECTRA_BASE = {**BERT_BASE, "generator_size": 1 / 3}
ELECTRA_SMALL = {**DEVLIN, **encoder_sizes(12, 256, 4)}

BERT: dict[str, Defaults] = {
    "bert": BERT_BASE,
    "bert_base": BERT_BASE,
    "bert_small": {**DEVLIN, **encoder_sizes(4, 512, 8)},  # BERT-Small of Turc et al. 2019
    "bert_tiny": {**DEVLIN, **encoder_sizes(2, 128, 2)},  # BERT-Tiny of Turc et al. 2019
    "roberta": ROBERTA_BASE,
    "roberta_base": ROBERTA_BASE,
    "roberta_large": encoder_sizes(24, 1024, 16),
    "xlm": encoder_sizes(16, 1280, 16),  # Conneau & Lample 2019, in fairseq a size of RoBERTa
    # A generator alone: an encoder with a masked language model's output layer.
    "electra_generator": {**ELECTRA_SMALL, "encoder_input_dim": 768},
}
ELECTRA: dict[str, Defaults] = {
    "electra": ELECTRA_BASE,
    "electra_base": ELECTRA_BASE,
    "electra_discriminator": {**ELECTRA_BASE, "generator_size": 0.0},  # a finished one, without generator
    # Clark et al. 2020, table 6: 14 M parameters, embeddings of width 128, a generator of a quarter
    # of its width.
    "electra_small": {**ELECTRA_SMALL, "encoder_input_dim": 128, "generator_size": 0.25},
    "electra_tiny": {**DEVLIN, **encoder_sizes(2, 128, 2), "generator_size": 0.5},
}
