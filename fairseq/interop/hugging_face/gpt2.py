"""Import of GPT-2 from Hugging Face folders (``model_type`` ``gpt2``; Radford et al. 2019).

The model is a ``transformer_lm`` with learned positions, pre-norm and tied embeddings. It has no padding symbol.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq.errors import UserError
from fairseq.interop.hugging_face.encoders import ACTIVATIONS
from fairseq.interop.hugging_face.model_folder import CONFIG, read_json, read_tensors
from fairseq.interop.pickles.named_tensors import Tensors, cut

DEFAULTS: dict[str, Any] = {  # values that a configuration may leave out
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "eos_token_id": 50256,
}
ONLY: dict[str, Any] = {  # settings that change what is computed, with the one value that is supported
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
# The causal mask, which old versions of transformers saved under the name of a bias.
COMPUTED = (".attn.bias", ".attn.masked_bias")  # buffers of older versions
SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """Read the model of a folder, under the names of this project.

    Returns:
        Parameters by name; ``args``; and the id of the symbol between texts.

    Raises:
        UserError: a file is missing, a setting is not supported, or tensors and configuration disagree.
    """
    path = folder / CONFIG
    # A null counts as left out: transformers writes `n_inner` null where it is four times the width.
    config = {**DEFAULTS, **{name: value for name, value in read_json(path).items() if value is not None}}
    _check(config, path)
    state = {
        name.removeprefix("transformer."): value
        for name, value in read_tensors(folder).items()
        if not name.endswith(COMPUTED)
    }
    inner = config.get("n_inner", 4 * config["n_embd"])
    model = _convert(Tensors(state, str(folder)), config, inner)
    args = {
        "arch": "transformer_lm",
        "task": "language_modeling",
        "decoder_layers": config["n_layer"],
        "decoder_embed_dim": config["n_embd"],
        "decoder_ffn_embed_dim": inner,
        "decoder_attention_heads": config["n_head"],
        "decoder_learned_pos": True,
        "activation_fn": ACTIVATIONS[config["activation_function"]],
        "share_decoder_input_output_embed": config.get("tie_word_embeddings", True),
        # Unlike Vaswani et al. (2017), GPT-2 does not multiply embeddings by √d.
        "no_scale_embedding": True,
        "dropout": float(config["resid_pdrop"]),
        "attention_dropout": float(config["attn_pdrop"]),
        "tokens_per_sample": config["n_positions"],
        "max_target_positions": config["n_positions"],
        "sample_break_mode": "none",
    }
    return model, args, config["eos_token_id"]


def _check(config: Mapping[str, Any], path: Path) -> None:
    """Raise UserError for sizes that are none, and settings that the model here does not have."""
    for name in SIZES + (("n_inner",) if "n_inner" in config else ()):
        if type(config[name]) is not int or config[name] < 1:
            raise UserError(f"{path}: {name} is {cut(config[name])}; expected a positive whole number")
    for name, value in ONLY.items():
        if config.get(name, value) != value:
            raise UserError(f"{path}: {name} is {cut(config[name])}; only {value} is supported")
    if config["activation_function"] not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"{path}: activation_function is {cut(config['activation_function'])}; known: {known}")
    for name in ("resid_pdrop", "attn_pdrop"):
        if not isinstance(config[name], int | float) or not 0 <= config[name] < 1:
            raise UserError(f"{path}: {name} is {cut(config[name])}; expected a number from 0 to below 1")
    if type(config["eos_token_id"]) is not int:
        raise UserError(f"{path}: eos_token_id is {cut(config['eos_token_id'])}; expected the id of a symbol")


def _convert(tensors: Tensors, config: Mapping[str, Any], inner: int) -> dict[str, Tensor]:
    words, dim = config["vocab_size"], config["n_embd"]
    embeddings = tensors.take("wte.weight", words, dim)
    model = {
        "decoder.embed_tokens.weight": embeddings,
        "decoder.embed_positions.weight": tensors.take("wpe.weight", config["n_positions"], dim),
    }
    for layer in range(config["n_layer"]):
        theirs, ours = f"h.{layer}", f"decoder.layers.{layer}"
        for norm, name in (("ln_1", "self_attn_layer_norm"), ("ln_2", "final_layer_norm")):
            model |= _norm(tensors, f"{theirs}.{norm}", f"{ours}.{name}", dim)
        # GPT-2's linear maps are one-dimensional convolutions: [inputs, outputs], with queries, keys and values side by
        # side in the columns.
        weight = tensors.take(f"{theirs}.attn.c_attn.weight", dim, 3 * dim).t()
        bias = tensors.take(f"{theirs}.attn.c_attn.bias", 3 * dim)
        for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
            rows = slice(part * dim, (part + 1) * dim)
            model[f"{ours}.self_attn.{name}.weight"] = weight[rows].contiguous()
            model[f"{ours}.self_attn.{name}.bias"] = bias[rows].clone()
        model |= _linear(tensors, f"{theirs}.attn.c_proj", f"{ours}.self_attn.out_proj", dim, dim)
        model |= _linear(tensors, f"{theirs}.mlp.c_fc", f"{ours}.fc1", dim, inner)
        model |= _linear(tensors, f"{theirs}.mlp.c_proj", f"{ours}.fc2", inner, dim)
    model |= _norm(tensors, "ln_f", "decoder.layer_norm", dim)
    tied = config.get("tie_word_embeddings", True)
    # A tied file may store the copy; another value under that name would be silently lost.
    output = tensors.tied("lm_head.weight", embeddings) if tied else tensors.take("lm_head.weight", words, dim)
    tensors.finish()
    # Under this name also when tied, as a checkpoint of fairseq holds every copy.
    return {**model, "decoder.output_projection.weight": output}


def _norm(tensors: Tensors, theirs: str, ours: str, dim: int) -> dict[str, Tensor]:
    return {f"{ours}.{name}": tensors.take(f"{theirs}.{name}", dim) for name in ("weight", "bias")}


def _linear(tensors: Tensors, theirs: str, ours: str, inputs: int, outputs: int) -> dict[str, Tensor]:
    """A linear map, whose weight is [inputs, outputs] there."""
    weight = tensors.take(f"{theirs}.weight", inputs, outputs).t().contiguous()
    return {f"{ours}.weight": weight, f"{ours}.bias": tensors.take(f"{theirs}.bias", outputs)}
