"""The named sets of defaults of ``electra``: published systems, and a small one."""

from __future__ import annotations

from fairseq.config.registry import register_architectures
from fairseq.models.architectures.bert import BERT_BASE, DEVLIN, encoder_sizes

# Clark et al. 2020, table 6: the sizes of BERT-base, a generator of a third of its width.
BASE = {**BERT_BASE, "generator_size": 1 / 3}
SMALL = {**DEVLIN, **encoder_sizes(12, 256, 4)}

register_architectures(
    "electra",
    {
        "electra": BASE,
        "electra_base": BASE,
        "electra_discriminator": {**BASE, "generator_size": 0.0},  # a finished discriminator, without generator
        # Clark et al. 2020, table 6: 14 M parameters, embeddings of width 128, a generator of a quarter of its width.
        "electra_small": {**SMALL, "encoder_input_dim": 128, "generator_size": 0.25},
        "electra_tiny": {**DEVLIN, **encoder_sizes(2, 128, 2), "generator_size": 0.5},
    },
)
# A generator alone: an encoder with a masked language model's output layer.
register_architectures("bert", {"electra_generator": {**SMALL, "encoder_input_dim": 768}})
