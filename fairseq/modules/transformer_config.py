"""``TransformerConfig`` of fairseq: the settings of its transformers, each of them with a
default."""

from __future__ import annotations

import argparse
from typing import Any

from fairseq.dataclass.omegaconf import DictConfig
from fairseq.errors import UserError

DEFAULT_MAX_SOURCE_POSITIONS = DEFAULT_MAX_TARGET_POSITIONS = 1024
DEFAULT_MIN_PARAMS_TO_WRAP = int(1e8)

_OF_BOTH = {  # settings that encoder and decoder have, each under its prefix
    "embed_path": None,
    "embed_dim": 512,
    "ffn_embed_dim": 2048,
    "layers": 6,
    "attention_heads": 8,
    "normalize_before": False,
    "learned_pos": False,
    "layerdrop": 0.0,
    "layers_to_keep": None,
    "xformers_att_config": None,
}
DEFAULTS: dict[str, object] = {
    **{f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in _OF_BOTH.items()},
    "activation_fn": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "relu_dropout": 0.0,
    "adaptive_input": False,
    "decoder_input_dim": 512,
    "decoder_output_dim": 512,
    "max_source_positions": DEFAULT_MAX_SOURCE_POSITIONS,
    "max_target_positions": DEFAULT_MAX_TARGET_POSITIONS,
    "share_decoder_input_output_embed": False,
    "share_all_embeddings": False,
    "merge_src_tgt_embed": False,
    "no_token_positional_embeddings": False,
    "adaptive_softmax_cutoff": None,
    "adaptive_softmax_dropout": 0.0,
    "adaptive_softmax_factor": 4.0,
    "layernorm_embedding": False,
    "tie_adaptive_weights": False,
    "tie_adaptive_proj": False,
    "no_scale_embedding": False,
    "checkpoint_activations": False,
    "offload_activations": False,
    "no_cross_attention": False,
    "cross_self_attention": False,
    "quant_noise_pq": 0.0,
    "quant_noise_pq_block_size": 8,
    "quant_noise_scalar": 0.0,
    "min_params_to_wrap": DEFAULT_MIN_PARAMS_TO_WRAP,
    "char_inputs": False,
    "relu_squared": False,
    "base_layers": 0,
    "base_sublayers": 1,
    "base_shuffle": 0,
    "export": False,
    "no_decoder_final_norm": False,
}
_GROUPS = {"decoder": "decoder_", "encoder": "encoder_", "quant_noise": "quant_noise_"}


class _Group(DictConfig):
    """The settings of *cfg* whose names begin with *prefix*, without it."""

    def __init__(self, prefix: str, **settings: object) -> None:
        vars(self).update(settings, _prefix=prefix)

    def __setattr__(self, name: str, value: object) -> None:
        # A group is made anew at each access: a value set in one would be lost.
        flat = self._prefix + name
        raise UserError(f"TransformerConfig.{self._prefix[:-1]}.{name}: read-only; set {flat} of the configuration")


class TransformerConfig(DictConfig):
    """Settings under their flat names, and read-only in the groups ``decoder``, ``encoder`` and
    ``quant_noise``."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**{**DEFAULTS, **settings})

    @classmethod
    def from_namespace(cls, args: argparse.Namespace | None) -> TransformerConfig:
        """*args* with the defaults of what they lack; unknown settings, a plug-in's, stay."""
        if isinstance(args, cls):
            return args
        settings = {name: value for name, value in vars(args or argparse.Namespace()).items() if name != "_name"}
        config = cls()
        # A plug-in's dataclass that extends this class takes no other settings than its own.
        vars(config).update({**DEFAULTS, **vars(config), **settings})
        return config

    def __getattr__(self, group: str) -> Any:
        if group not in _GROUPS:
            raise AttributeError(f"TransformerConfig has no setting {group}")
        prefix = _GROUPS[group]
        return _Group(prefix, **{name[len(prefix) :]: v for name, v in vars(self).items() if name.startswith(prefix)})
