"""Settings of fairseq that change what a model computes and are not implemented here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairseq.errors import UserError

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # language models
    "character_embeddings": (False,),
    "self_target": (False,),
    "past_target": (False,),
    "output_dictionary_size": (-1,),
    "shorten_method": ("none",),
    "decoder_xformers_att_config": (None,),
    "base_layers": (0,),
    "moe_freq": (0,),
    "scale_fc": (False,),
    "scale_attn": (False,),
    "scale_heads": (False,),
    "scale_resids": (False,),
    "use_stable_embedding": (False,),
    "alibi": (False,),
    # any transformer
    "quant_noise_pq": (0,),
    "quant_noise_scalar": (0,),
    "encoder_layers_to_keep": (None, ""),
    "encoder_xformers_att_config": (None,),
    "spectral_norm_classification_head": (False,),
}
"""For each name the values with which nothing changes; a missing setting has none either.

Left out because they change no result: checkpoint_activations, offload_activations, min_params_to_wrap,
pad_to_fixed_length, pad_to_fixed_bsz, use_plasma_view, future_target, cross attention's.
"""


READ_BY = {"shorten_method": "sentence_prediction"}
"""Tasks that read such a setting, so that all its values are supported there."""


def check_supported(settings: Mapping[str, Any], source: str) -> None:
    """Check *settings* of a checkpoint for values that change the result but are not implemented.

    Raises:
        UserError: there is such a value; the message names it and *source*.
    """
    for name, neutral in NEUTRAL.items():
        value = settings.get(name)
        if value is not None and value not in neutral and READ_BY.get(name, "") != settings.get("task"):
            raise UserError(
                f"{source}: {name}={value!r} is not implemented and changes the result; supported: "
                + " or ".join(map(repr, neutral))
            )
