"""Import of GPT-2, Llama, Mistral, Qwen 2, GPT-NeoX (Pythia) and OPT from Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq.config.fields import typed
from fairseq.errors import UserError
from fairseq.interop.hugging_face import causal_names, encoders
from fairseq.interop.hugging_face.causal_names import EMBEDDINGS, OUTPUT, POSITIONS, Names
from fairseq.interop.hugging_face.model_folder import CONFIG, read_json, read_tensors
from fairseq.interop.pickles.named_tensors import Tensors, cut
from fairseq.models.transformer_lm import TransformerDecoder, TransformerLanguageModel
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.modules.positions import FEW_TURNS, MANY_TURNS

Config = Mapping[str, Any]
ACTIVATIONS = {  # theirs: ours
    **encoders.ACTIVATIONS,
    **{name: name for name in ("silu", "tanh", "linear")},
    "swish": "silu",
    "relu2": "relu_squared",
}


@dataclass(frozen=True)
class Family:
    """A kind of decoder of transformers.

    Attributes:
        names: of its parameters.
        defaults: values that a configuration may leave out, as transformers writes what differs
            from its classes'.
        sizes: settings that are positive whole numbers.
        rates: settings that are numbers from 0 to below 1.
        only: settings that change what is computed, with the one value that is supported.
        settings: our settings that are not common to all families.
    """

    names: Names
    defaults: Config
    sizes: tuple[str, ...]
    rates: tuple[str, ...]
    only: Config
    settings: Callable[[Config], dict[str, Any]]


@dataclass(frozen=True)
class Decoder:
    """A decoder that was read: parameters and settings of this package, and special symbols by
    role."""

    parameters: dict[str, Tensor]
    args: dict[str, Any]
    ids: dict[str, int]


def _gpt2(config: Config) -> dict[str, object]:
    return {
        "decoder_layers": config["n_layer"],
        "decoder_embed_dim": config["n_embd"],
        "decoder_ffn_embed_dim": config.get("n_inner", 4 * config["n_embd"]),
        "decoder_attention_heads": config["n_head"],
        "decoder_learned_pos": True,
        "decoder_norm_eps": config["layer_norm_epsilon"],
        "activation_fn": config["activation_function"],
        "dropout": float(config["resid_pdrop"]),
        "attention_dropout": float(config["attn_pdrop"]),
        "max_target_positions": config["n_positions"],
    }


def _modern(config: Config) -> dict[str, object]:
    return {
        "decoder_layers": config["num_hidden_layers"],
        "decoder_embed_dim": config["hidden_size"],
        "decoder_attention_heads": config["num_attention_heads"],
        "attention_dropout": float(config["attention_dropout"]),
        "max_target_positions": config["max_position_embeddings"],
    }


def _llama(config: Config) -> dict[str, object]:
    width = config["hidden_size"] // config["num_attention_heads"]
    if config.get("head_dim", width) != width:
        raise UserError(f"head_dim is {cut(config['head_dim'])}; only hidden_size / num_attention_heads is supported")
    return {
        **_modern(config),
        "decoder_ffn_embed_dim": config["intermediate_size"],
        "decoder_kv_heads": config.get("num_key_value_heads", config["num_attention_heads"]),
        "activation_fn": config["hidden_act"],
        "decoder_norm": "rms",
        "decoder_norm_eps": config["rms_norm_eps"],
        "decoder_gated_ffn": True,
        "decoder_biases": "none",
        "dropout": 0.0,
        **_rotary(config, 1.0),
    }


def _mistral(config: Config) -> dict[str, object]:
    return {**_llama(config), "attention_window": config.get("sliding_window")}


def _qwen2(config: Config) -> dict[str, object]:
    return {**_llama(config), "decoder_biases": "qkv"}


def _neox(config: Config) -> dict[str, object]:
    return {
        **_modern(config),
        "decoder_ffn_embed_dim": config["intermediate_size"],
        "activation_fn": config["hidden_act"],
        "decoder_norm_eps": config["layer_norm_eps"],
        "decoder_parallel_residual": config["use_parallel_residual"],
        "dropout": float(config["hidden_dropout"]),
        **_rotary(config, config.get("rotary_pct", 0.25), config.get("rotary_emb_base", 10000)),
    }


def _opt(config: Config) -> dict[str, object]:
    return {
        **_modern(config),
        "decoder_ffn_embed_dim": config["ffn_dim"],
        "activation_fn": config["activation_function"],
        "decoder_learned_pos": True,
        "decoder_normalize_before": config["do_layer_norm_before"],
        "decoder_input_dim": config.get("word_embed_proj_dim"),
        "decoder_output_dim": config.get("word_embed_proj_dim"),
        "dropout": float(config["dropout"]),
    }


def _rotary(config: Config, fraction: object, base: object = 10000) -> dict[str, object]:
    """Rotary positions: by transformers 5 in ``rope_parameters``, before in two settings and
    ``rope_scaling``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"rope_parameters is {cut(rope)}; expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    settings = {
        "rotary_fraction": rope.get("partial_rotary_factor", config.get("partial_rotary_factor", fraction)),
        "rotary_base": rope.get("rope_theta", config.get("rope_theta", base)),
    }
    if kind == "default":
        return settings
    if kind not in ("linear", "llama3"):
        raise UserError(f"rope_type is {cut(kind)}; known: default, linear, llama3")
    settings["rotary_scaling"] = rope.get("factor")
    if kind == "llama3":
        factors = rope.get("low_freq_factor"), rope.get("high_freq_factor")
        if factors != (FEW_TURNS, MANY_TURNS):
            raise UserError(f"rope_type llama3 has factors {cut(factors)}; only {FEW_TURNS:g} and {MANY_TURNS:g} are")
        settings["rotary_trained_positions"] = rope.get("original_max_position_embeddings")
    return settings


_LLAMA = Family(
    names=causal_names.LLAMA,
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    },
    sizes=("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    rates=("attention_dropout",),
    only={"attention_bias": False, "mlp_bias": False},
    settings=_llama,
)
FAMILIES = {
    "gpt2": Family(
        names=causal_names.GPT2,
        defaults={
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "resid_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
        },
        sizes=("n_positions", "n_embd", "n_layer", "n_head"),
        rates=("resid_pdrop", "attn_pdrop"),
        only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        settings=_gpt2,
    ),
    "llama": _LLAMA,
    "mistral": Family(
        names=causal_names.LLAMA,
        defaults={
            **_LLAMA.defaults,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        sizes=_LLAMA.sizes,
        rates=_LLAMA.rates,
        only={},
        settings=_mistral,
    ),
    "qwen2": Family(
        names=causal_names.LLAMA,
        defaults={
            **_LLAMA.defaults,
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "eos_token_id": 151643,
        },
        sizes=_LLAMA.sizes,
        rates=_LLAMA.rates,
        only={"use_sliding_window": False},
        settings=_qwen2,
    ),
    "gpt_neox": Family(
        names=causal_names.NEOX,
        defaults={
            "vocab_size": 50432,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "max_position_embeddings": 2048,
            "use_parallel_residual": True,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        },
        sizes=_LLAMA.sizes,
        rates=("attention_dropout", "hidden_dropout"),
        only={"attention_bias": True},
        settings=_neox,
    ),
    "opt": Family(
        names=causal_names.OPT,
        defaults={
            "vocab_size": 50272,
            "hidden_size": 768,
            "ffn_dim": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "activation_function": "relu",
            "dropout": 0.1,
            "attention_dropout": 0.0,
            "max_position_embeddings": 2048,
            "do_layer_norm_before": True,
            "tie_word_embeddings": True,
            "pad_token_id": 1,
            "eos_token_id": 2,
        },
        sizes=("hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        rates=("dropout", "attention_dropout"),
        only={
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "_remove_final_layer_norm": False,
            "pad_token_id": 1,  # positions are numbered from the one after it
        },
        settings=_opt,
    ),
}


def read(folder: Path, padding: int = -1) -> Decoder:
    """Read the decoder of a folder, under the names of this package.

    Args:
        padding: id of the padding symbol of a dictionary that comes with the folder, behind which
            positions begin.

    Raises:
        UserError: a file is missing, a setting is not supported, or tensors and configuration
            disagree.
    """
    path = folder / CONFIG
    # A null counts as left out: transformers writes `n_inner` null where it is four times the
    # width. Without a window means another thing than the classes' default.
    content = {name: value for name, value in read_json(path).items() if value is not None or name == "sliding_window"}
    family = FAMILIES[content["model_type"]]
    config = {**family.defaults, **content}
    try:
        args, ids = _settings(family, config), _ids(config)
        cfg = typed(TransformerLMConfig, args)
    # Also what our own settings refuse, under their names.
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    state = read_tensors(folder)
    with torch.device("meta"):
        model = TransformerLanguageModel(TransformerDecoder(cfg, config["vocab_size"], ids.get("pad", -1)))
    shapes = {name: [*value.shape] for name, value in model.named_parameters()}
    tensors = Tensors(state, str(folder))
    parameters = family.names.read(tensors, shapes, cfg.decoder_layers, cfg.decoder_attention_heads)
    if cfg.share_decoder_input_output_embed:
        # Under this name also when tied, as a checkpoint of fairseq holds every copy. A file may
        # hold a copy, too: another value under its name would be silently lost.
        parameters[OUTPUT] = tensors.tied(f"{family.names.output}.weight", parameters[EMBEDDINGS])
    tensors.finish()
    if POSITIONS in parameters and "pad" not in ids:
        parameters[POSITIONS] = F.pad(parameters[POSITIONS], (0, 0, padding + 1, 0))
    return Decoder(parameters, args, ids)


def _settings(family: Family, config: Config) -> dict[str, Any]:
    """Our settings; UserError for values that are none, and for what a ``transformer_lm`` does not
    have."""
    optional = [name for name in ("n_inner", "num_key_value_heads", "sliding_window") if config.get(name) is not None]
    for name in ("vocab_size", *family.sizes, *optional):
        if type(config[name]) is not int or config[name] < 1:
            raise UserError(f"{name} is {cut(config[name])}; expected a positive whole number")
    for name, value in family.only.items():
        if config.get(name, value) != value:
            raise UserError(f"{name} is {cut(config[name])}; only {value} is supported")
    for name in family.rates:
        if not isinstance(config[name], int | float) or not 0 <= config[name] < 1:
            raise UserError(f"{name} is {cut(config[name])}; expected a number from 0 to below 1")
    (act,) = {"activation_function", "hidden_act"} & config.keys() & family.defaults.keys()
    if not isinstance(config[act], str) or config[act] not in ACTIVATIONS:
        raise UserError(f"{act} is {cut(config[act])}; known: {', '.join(ACTIVATIONS)}")
    settings = family.settings({**config, act: ACTIVATIONS[config[act]]})
    return {
        "arch": "transformer_lm",
        "task": "language_modeling",
        **settings,
        "tokens_per_sample": settings["max_target_positions"],
        "share_decoder_input_output_embed": config["tie_word_embeddings"],
        # Unlike Vaswani et al. (2017), none of them multiplies embeddings by √d.
        "no_scale_embedding": True,
        "sample_break_mode": "none",
    }


def _ids(config: Config) -> dict[str, int]:
    """Special symbols by role: the one between texts, and OPT's padding."""
    eos = config["eos_token_id"]
    # Chat models end a text with one of several; the first is between the texts of training.
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if type(eos) is not int:
        raise UserError(f"eos_token_id is {cut(eos)}; expected the id of a symbol")
    return {"eos": eos, **({"pad": config["pad_token_id"]} if config["model_type"] == "opt" else {})}
