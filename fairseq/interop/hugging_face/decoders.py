"""Language models as Hugging Face's configuration and tensors, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.config import fields
from fairseq.config.registry import ARCHITECTURES, MODELS
from fairseq.errors import UserError, first_of
from fairseq.inference.reader import reach
from fairseq.interop.hugging_face.model_folder import CONFIG
from fairseq.interop.pickles.named_tensors import Tensors
from fairseq.models.base import BaseFairseqModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.models.transformer_xl import TransformerXL
from fairseq.models.transformer_xl_settings import BY_DISTANCE
from fairseq.text.dictionary import Dictionary

MODEL_TYPE = "fairseq_lm"
NAMES: dict[type[BaseFairseqModel], str] = {TransformerLanguageModel: "transformer_lm", TransformerXL: "transformer_xl"}


def configuration(model: BaseFairseqModel, dictionary: Dictionary, source: str) -> dict[str, Any]:
    """Return the fields of ``FairseqConfig`` of *model* over *dictionary*, which came from
    *source*.

    Raises:
        UserError: it is a plug-in or an encoder, or its positions change as a text grows.
    """
    if type(model) not in NAMES:
        known = ", ".join(NAMES.values())
        raise UserError(f"{source}: {type(model).__name__} cannot be exported; known: {known}")
    decoder: Any = model.decoder
    encoding = getattr(decoder.cfg, "position_encoding", None)
    # The exported model reads a text from a cache that only grows; other encodings number positions
    # from the end of the segment, so that every new token would change the positions of all former
    # ones.
    if type(model) is TransformerXL and encoding not in BY_DISTANCE:
        known = ", ".join(BY_DISTANCE)
        raise UserError(f"{source}: `position_encoding` {encoding} cannot be exported; known: {known}")
    settings = {"arch": NAMES[type(model)], **dataclasses.asdict(decoder.cfg)}
    layer = decoder.layers[0]
    return {
        "vocab_size": len(dictionary),
        "padding_idx": dictionary.pad(),
        "hidden_size": layer.fc1.in_features,
        "num_hidden_layers": len(decoder.layers),
        "num_attention_heads": layer.self_attn.num_heads,
        "intermediate_size": layer.fc1.out_features,
        "max_position_embeddings": reach(model),
        "segment_length": decoder.segment_length,
        "memory_length": decoder.memory_length,
        "settings": {name: value for name, value in settings.items() if value is not None},
    }


def tensors(model: BaseFairseqModel) -> dict[str, Tensor]:
    """Return the parameters of *model* by name, float32, a shared one under its first name only;
    and what symbols are to words, if it has notes of words."""
    # Not `state_dict`, which has a shared parameter under every name: safetensors rejects tensors
    # that share memory. The other buffers are markers of fairseq's checkpoints.
    parts = {name: value for name, value in model.named_buffers() if name.endswith("word_notes.parts")}
    return {name: value.detach().float().contiguous() for name, value in model.named_parameters()} | parts


def restored(
    tensors_by_name: Mapping[str, Tensor], settings: Mapping[str, object], dictionary: Dictionary, source: str
) -> Any:
    """Return parameters and settings of the model that :func:`tensors` and :func:`configuration`
    wrote to *source*.

    Raises:
        UserError: the settings describe no known model, or the tensors do not fit the settings.
    """
    arch, file = str(settings.get("arch")), Path(source) / CONFIG
    if arch not in NAMES.values():
        raise UserError(f"{file}: settings name the model {arch[:40]!r}; known: {', '.join(NAMES.values())}")
    kind = MODELS[ARCHITECTURES[arch].model]
    assert kind.config_class is not None
    # Nothing would check their values, and all settings go into the checkpoint.
    if foreign := sorted(settings.keys() - fields.defaults(kind.config_class).keys() - {"arch"}):
        raise UserError(f"{file}: settings: {first_of(foreign)}: {arch} has no such setting; remove it")
    try:
        cfg = fields.typed(kind.config_class, dict(settings))
    # An error of the file: `fairseq-import` has no flags of these names.
    except UserError as error:
        raise UserError(f"{file}: settings: {error}") from None
    with torch.device("meta"):  # names and shapes only
        model = kind.build_model(cfg, SimpleNamespace(source_dictionary=dictionary))
    tensors, parameters = Tensors(tensors_by_name, source), {}
    for name, buffer in model.named_buffers():
        found = tensors.left.pop(name, None)  # exports of version 1.0 have copies of markers
        if not name.endswith("word_notes.parts"):
            continue
        if found is None or found.dtype != torch.uint8 or found.shape != buffer.shape:
            raise UserError(f"{source}: {name}: expected bytes, one for each symbol; export the model again")
        parameters[name] = found
    for shape, names in _names(model):
        parameters.update(dict.fromkeys(names[1:], tensors.take(names[0], *shape)))
    tensors.finish()
    return parameters, dict(settings)


def _names(model: nn.Module) -> list[tuple[torch.Size, list[str]]]:
    """The shape of each parameter of *model*, its first name in its modules, and all names in a
    checkpoint."""
    names = {id(value): (value.shape, [name]) for name, value in model.named_parameters()}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            names[id(value)][1].append(name)
    return list(names.values())
