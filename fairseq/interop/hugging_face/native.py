"""Export of decoders as classes of transformers itself, for shapes of GPT-2, Llama's kin and
GPT-NeoX.

Such a folder needs no code and serves every tool that knows these classes. Rotary positions are
written under the names of transformers 4, which 5 reads, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor

from fairseq.interop.hugging_face import causal_names
from fairseq.interop.hugging_face.causal_names import EMBEDDINGS, OUTPUT, POSITIONS, Names
from fairseq.models.base import BaseFairseqModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.modules.positions import FEW_TURNS, MANY_TURNS

ACTIVATIONS = {  # ours: theirs
    **{name: name for name in ("relu", "gelu", "silu", "tanh", "linear")},
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",
    "relu_squared": "relu2",
}
ANYWHERE: Mapping[str, tuple[object, ...]] = {  # values of settings that all of the classes have
    "decoder_normalize_before": (True,),
    "no_decoder_final_norm": (False,),
    "adaptive_input": (False,),
    "adaptive_softmax_cutoff": (None,),
    "layernorm_embedding": (False,),
    "token_shift": (False,),
    "ngram_notes": (False,),
    "word_notes": (False,),
    "qk_norm": (False,),
    "position_infused_attention": (False,),
    "tokens_from_prev": (False,),
}
UNGATED = {"decoder_norm": ("layer",), "decoder_gated_ffn": (False,), "decoder_biases": ("all",)}


@dataclass(frozen=True)
class Kind:
    """A class of transformers: the settings that it has, the names of its parameters, and its
    configuration."""

    architecture: str
    names: Names
    values: Mapping[str, tuple[Any, ...]]
    configuration: Callable[[TransformerLMConfig], dict[str, object]]


def _gpt2(cfg: TransformerLMConfig) -> dict[str, object]:
    return {
        "n_embd": cfg.decoder_embed_dim,
        "n_head": cfg.decoder_attention_heads,
        "n_inner": cfg.decoder_ffn_embed_dim,
        "activation_function": ACTIVATIONS[cfg.activation_fn],
        "layer_norm_epsilon": cfg.decoder_norm_eps,
        "resid_pdrop": cfg.dropout,
        "embd_pdrop": cfg.dropout,
        "attn_pdrop": cfg.attention_dropout,
    }


def _modern(cfg: TransformerLMConfig) -> dict[str, object]:
    scaling: dict[str, object] = {"factor": cfg.rotary_scaling}
    if cfg.rotary_trained_positions:
        scaling |= {"rope_type": "llama3", "low_freq_factor": FEW_TURNS, "high_freq_factor": MANY_TURNS}
        scaling["original_max_position_embeddings"] = cfg.rotary_trained_positions
    else:
        scaling |= {"rope_type": "linear", "type": "linear"}
    return {
        "hidden_size": cfg.decoder_embed_dim,
        "num_attention_heads": cfg.decoder_attention_heads,
        "intermediate_size": cfg.decoder_ffn_embed_dim,
        "hidden_act": ACTIVATIONS[cfg.activation_fn],
        "attention_dropout": cfg.attention_dropout,
        "rope_scaling": scaling if cfg.rotary_scaling != 1 else None,
    }


def _llama(cfg: TransformerLMConfig) -> dict[str, object]:
    return {
        **_modern(cfg),
        "num_key_value_heads": cfg.decoder_kv_heads or cfg.decoder_attention_heads,
        "rms_norm_eps": cfg.decoder_norm_eps,
        "rope_theta": cfg.rotary_base,
    }


def _mistral(cfg: TransformerLMConfig) -> dict[str, object]:
    return {**_llama(cfg), "sliding_window": cfg.attention_window}


def _neox(cfg: TransformerLMConfig) -> dict[str, object]:
    return {
        **_modern(cfg),
        "layer_norm_eps": cfg.decoder_norm_eps,
        "hidden_dropout": cfg.dropout,
        "use_parallel_residual": cfg.decoder_parallel_residual,
        "rotary_pct": cfg.rotary_fraction,
        "rotary_emb_base": cfg.rotary_base,
    }


_LLAMA_VALUES = {**ANYWHERE, "decoder_norm": ("rms",), "decoder_gated_ffn": (True,), "rotary_fraction": (1.0,)}
_LLAMA_VALUES |= {"decoder_parallel_residual": (False,), "decoder_biases": ("none",)}
_SHARED = {"attention_window": (None,)}
KINDS = {
    "gpt2": Kind(
        "GPT2LMHeadModel",
        causal_names.GPT2,
        {**ANYWHERE, **UNGATED, **_SHARED, "decoder_learned_pos": (True,), "decoder_parallel_residual": (False,)},
        _gpt2,
    ),
    "llama": Kind("LlamaForCausalLM", causal_names.LLAMA, {**_LLAMA_VALUES, **_SHARED}, _llama),
    "mistral": Kind("MistralForCausalLM", causal_names.LLAMA, _LLAMA_VALUES, _mistral),
    "qwen2": Kind(
        "Qwen2ForCausalLM", causal_names.LLAMA, {**_LLAMA_VALUES, **_SHARED, "decoder_biases": ("qkv",)}, _llama
    ),
    "gpt_neox": Kind("GPTNeoXForCausalLM", causal_names.NEOX, {**ANYWHERE, **UNGATED, **_SHARED}, _neox),
}


def kind_of(cfg: TransformerLMConfig) -> str:
    """The kind that is nearest to a decoder with the settings *cfg*."""
    if not cfg.rotary_fraction:
        return "gpt2"
    if cfg.decoder_norm == "layer":
        return "gpt_neox"
    if cfg.decoder_biases == "qkv":
        return "qwen2"
    return "llama" if cfg.attention_window is None else "mistral"


def is_native(model: BaseFairseqModel) -> TypeGuard[TransformerLanguageModel]:
    """Whether transformers has a class that computes what *model* does."""
    return type(model) is TransformerLanguageModel and not [*obstacles(model.cfg)]


def why_not(model: BaseFairseqModel) -> str:
    """What makes *model* none of transformers' classes, and what it had to be, for a message."""
    if type(model) is not TransformerLanguageModel:
        return "transformers has no such class; a transformer_lm may be one"
    changes, architecture = "; ".join(obstacles(model.cfg)), KINDS[kind_of(model.cfg)].architecture
    return f"{architecture}, which needs no code, has other settings (in brackets): {changes}"


def obstacles(cfg: TransformerLMConfig) -> Iterator[str]:
    """The settings of *cfg* that the nearest of transformers' classes does not have, each with what
    it has."""
    kind = KINDS[kind_of(cfg)]
    for name, values in kind.values.items():
        if getattr(cfg, name) not in values:
            expected = "set" if values[0] is True else "unset" if values[0] in (None, False) else values[0]
            yield f"`{name}` {_shown(getattr(cfg, name))} ({expected})"
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if getattr(cfg, name) not in (None, cfg.decoder_embed_dim):
            yield f"`{name}` {getattr(cfg, name)} ({cfg.decoder_embed_dim})"
    shares = cfg.decoder_kv_heads not in (None, cfg.decoder_attention_heads)
    if shares and kind.names is not causal_names.LLAMA:
        yield f"`decoder_kv_heads` {cfg.decoder_kv_heads} ({cfg.decoder_attention_heads})"


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def configuration(model: TransformerLanguageModel, vocabulary: int) -> dict[str, Any]:
    """The ``config.json`` of *model*, see :func:`is_native`, but for special symbols."""
    cfg, decoder = model.cfg, model.decoder
    name = kind_of(cfg)
    longest, layers = decoder.max_positions(), len(decoder.layers)
    sizes = ("n_positions", "n_layer") if name == "gpt2" else ("max_position_embeddings", "num_hidden_layers")
    return {
        "architectures": [KINDS[name].architecture],
        "model_type": name,
        "dtype": "float32",
        "vocab_size": vocabulary,
        **dict(zip(sizes, (longest, layers), strict=True)),
        # An old name of the same number, which converters to GGUF read.
        **({"n_ctx": longest} if name == "gpt2" else {}),
        **KINDS[name].configuration(cfg),
        "tie_word_embeddings": _is_tied(cfg),
    }


def tensors(model: TransformerLanguageModel) -> dict[str, Tensor]:
    """The tensors of ``model.safetensors``, float32."""
    cfg, decoder = model.cfg, model.decoder
    state = {name: value.detach().float() for name, value in model.named_parameters()}
    if not _is_tied(cfg):
        state.setdefault(OUTPUT, state[EMBEDDINGS])
        # None of the classes multiplies embeddings by √d, which is in the table instead.
        state[EMBEDDINGS] = state[EMBEDDINGS] * decoder.embed_scale
    if POSITIONS in state:
        # Here positions are numbered from the one after the padding symbol on.
        state[POSITIONS] = state[POSITIONS][decoder.first_position :]
    values = KINDS[kind_of(cfg)].names.write(state, len(decoder.layers), cfg.decoder_attention_heads)
    # A name each: safetensors rejects tensors that share memory.
    return {name: value.clone() for name, value in values.items()}


def _is_tied(cfg: TransformerLMConfig) -> bool:
    return cfg.share_decoder_input_output_embed and cfg.no_scale_embedding
