"""Language models as Hugging Face's configuration and tensors, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.config import fields
from fairseq.config.registry import ARCHITECTURES, MODELS
from fairseq.errors import UserError
from fairseq.interop.pickles.named_tensors import Tensors
from fairseq.models import BaseFairseqModel
from fairseq.models.transformer_lm import TransformerDecoder, TransformerLanguageModel
from fairseq.models.transformer_xl import TransformerXL, TransformerXLDecoder
from fairseq.modules.adaptive_input import AdaptiveInput
from fairseq.modules.adaptive_softmax import AdaptiveSoftmax
from fairseq.system.limits import ModelLimit, limited_models
from fairseq.text.dictionary import Dictionary

MODEL_TYPE = "fairseq_lm"
ACTIVATIONS = {"gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh"}  # theirs have our names otherwise
NAMES = {TransformerLanguageModel: "transformer_lm", TransformerXL: "transformer_xl"}


def configuration(model: BaseFairseqModel, source: str) -> dict[str, Any]:
    """Return the fields of ``FairseqConfig`` of *model*, which came from *source*.

    Raises:
        UserError: it is a plug-in or an encoder, or has positions that change as a text grows.
    """
    if type(model) is TransformerLanguageModel:
        decoder: Any = model.decoder
        fields = _transformer_lm(decoder)
    elif type(model) is TransformerXL:
        decoder = model.decoder
        fields = _transformer_xl(decoder, source)
    else:
        raise UserError(f"{source}: {type(model).__name__} cannot be exported; known: transformer_lm, transformer_xl")
    settings = {"arch": NAMES[type(model)], **dataclasses.asdict(decoder.cfg)}
    return {**fields, "settings": {name: value for name, value in settings.items() if value is not None}}


def tensors(model: BaseFairseqModel) -> dict[str, Tensor]:
    """Return the parameters of *model* by name, float32; a shared one under its first name only."""
    parameters = model.state_dict()
    return {first: parameters[first].float().contiguous() for first, *_ in _names(model)}


def restored(given: Mapping[str, Tensor], settings: Mapping[str, Any], dictionary: Dictionary, source: str) -> Any:
    """Return parameters and settings of the model that :func:`tensors` and :func:`configuration` wrote.

    Args:
        given: the tensors.
        settings: ``settings`` of the configuration.
        source: the folder, for messages.

    Raises:
        UserError: the settings are not those of a known model, or the tensors are not those of the settings.
    """
    arch = str(settings.get("arch"))
    if arch not in NAMES.values():
        raise UserError(f"{source}: settings name the model {arch[:40]!r}; known: {', '.join(NAMES.values())}")
    kind = MODELS[ARCHITECTURES[arch].model]
    assert kind.config_class is not None
    cfg = fields.typed(kind.config_class, dict(settings))
    limit = ModelLimit.of_checkpoint(given, source)
    with limited_models(limit), torch.device("meta"):  # names and shapes only
        model = kind.build_model(cfg, SimpleNamespace(source_dictionary=dictionary))
    left, parameters = Tensors(given, source), {}
    for names in _names(model):
        value = left.take(names[0], *model.state_dict()[names[0]].shape)
        parameters.update(dict.fromkeys(names, value))
    left.finish()
    return parameters, dict(settings)


def _names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter of *model*, in order."""
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            names.setdefault(id(value), []).append(name)
    return list(names.values())


def _transformer_lm(decoder: TransformerDecoder) -> dict[str, Any]:
    cfg, embeddings, softmax = decoder.cfg, decoder.embed_tokens, decoder.adaptive_softmax
    dim, longest = cfg.decoder_embed_dim, decoder.max_positions()
    positions = "learned" if cfg.decoder_learned_pos else "sinusoidal"
    if cfg.no_token_positional_embeddings:
        positions = "none"
    return {
        "hidden_size": dim,
        "num_hidden_layers": len(decoder.layers),
        "num_attention_heads": cfg.decoder_attention_heads,
        "head_dim": dim // cfg.decoder_attention_heads,
        "intermediate_size": cfg.decoder_ffn_embed_dim,
        "hidden_act": ACTIVATIONS.get(cfg.activation_fn, cfg.activation_fn),
        "pre_norm": cfg.decoder_normalize_before,
        "final_norm": decoder.layer_norm is not None,
        "embedding_norm": cfg.layernorm_embedding,
        "positions": "infused" if decoder.infused else positions,
        "first_position": decoder.first_position,
        "segment_length": cfg.tokens_per_sample if decoder.infused else longest,
        "memory_length": decoder.memory_length,
        "embedding_scale": decoder.embed_scale,
        "cutoffs": cfg.adaptive_input_cutoff if cfg.adaptive_input else None,
        "embedding_projections": "own" if cfg.adaptive_input else "none",
        **_embedding_widths(embeddings),
        "output": "linear" if softmax is None else "adaptive",
        "output_cutoffs": cfg.adaptive_softmax_cutoff or [],
        "output_widths": _output_widths(cfg, softmax),
        "tie_word_embeddings": cfg.tie_adaptive_weights
        or (softmax is None and cfg.share_decoder_input_output_embed),
        "tied_projections": list(range(1, len(softmax.tail) + 1)) if softmax and cfg.tie_adaptive_proj else [],
    }  # fmt: skip


def _output_widths(cfg: Any, softmax: AdaptiveSoftmax | None) -> list[int]:
    first = cfg.decoder_embed_dim if cfg.tie_adaptive_weights else cfg.decoder_output_dim or cfg.decoder_embed_dim
    tails: Any = softmax.tail if softmax is not None else []
    return [first, *(tail[2].weight.size(1) for tail in tails)]


def _transformer_xl(decoder: TransformerXLDecoder, source: str) -> dict[str, Any]:
    cfg = decoder.cfg
    if cfg.position_encoding != "relative":
        raise UserError(f"{source}: --position-encoding {cfg.position_encoding} cannot be exported; known: relative")
    widths = _embedding_widths(decoder.embed_tokens)
    projections = "own" if cfg.div_val > 1 else "shared" if len(decoder.embed_tokens.weights(0)) > 1 else "none"
    return {
        "hidden_size": cfg.d_model,
        "num_hidden_layers": len(decoder.layers),
        "num_attention_heads": cfg.n_head,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.d_inner,
        "hidden_act": "relu",
        "pre_norm": cfg.pre_lnorm,
        "final_norm": False,
        "positions": "relative",
        "first_position": 0,
        "segment_length": cfg.tokens_per_sample,
        "memory_length": decoder.memory_length,
        "zero_memory": cfg.memory_start == "zeros",
        "same_length": cfg.same_length,
        "clamp_length": cfg.clamp_len,
        "embedding_scale": math.sqrt(cfg.d_model),
        "cutoffs": cfg.cutoffs or [],
        "embedding_projections": projections,
        **widths,
        "output": "clustered",
        "output_cutoffs": cfg.cutoffs or [],
        "output_widths": widths["embedding_widths"],
        "tie_word_embeddings": cfg.tie_weight,
        "tied_projections": sorted(cfg.tied_projections()),
        "own_biases": cfg.untie_r,
    }


def _embedding_widths(embeddings: nn.Module) -> dict[str, Any]:
    if not isinstance(embeddings, AdaptiveInput):
        assert isinstance(embeddings, nn.Embedding)
        return {"vocab_size": embeddings.num_embeddings, "embedding_widths": [embeddings.embedding_dim]}
    bands = range(len(embeddings.bounds) - 1)
    return {
        "vocab_size": embeddings.bounds[-1],
        "embedding_widths": [embeddings.weights(band)[0].size(1) for band in bands],
    }
