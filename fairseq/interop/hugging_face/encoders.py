"""Import and export of BERT, RoBERTa and ELECTRA's generator and discriminator as Hugging Face
folders.

Positions of BERT and ELECTRA begin at 0 there and at ``padding_idx + 1`` here: the table here
begins with that many rows of zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq.config.fields import typed
from fairseq.errors import UserError
from fairseq.interop.hugging_face.encoder_names import (
    BASES,
    HEADS,
    OUTPUT,
    OUTPUT_BIAS,
    OUTPUT_BIASES,
    OUTPUT_WEIGHTS,
    POSITIONS,
    TOKENS,
    TYPES,
    EncoderLayout,
    Parameter,
    parameters,
)
from fairseq.interop.hugging_face.model_folder import CONFIG, read_json, read_tensors
from fairseq.interop.pickles.named_tensors import Tensors, cut
from fairseq.models.encoder_settings import BertConfig

FAMILIES = {
    "bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "camembert": "roberta",
    "electra": "electra",
}
ACTIVATIONS = {  # theirs: ours
    "gelu": "gelu",
    "gelu_python": "gelu",
    # The next three are one function, the tanh approximation of Hendrycks & Gimpel (2016), written
    # in different ways.
    "gelu_new": "gelu_accurate",
    "gelu_fast": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
    "relu": "relu",
}
WRITTEN_ACTIVATIONS = {"gelu": "gelu", "gelu_accurate": "gelu_new", "gelu_fast": "gelu_new", "relu": "relu"}
GELU_HEADS = ("roberta", "generator")  # output layer with gelu, whatever the activation of the layers
UNUSED = ("pooler", "seq_relationship", "position_ids", "token_type_ids")  # next-sentence prediction, and buffers
CLASSES = {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "generator": "ElectraForMaskedLM",
    "discriminator": "ElectraForPreTraining",
}
CLASSIFIERS = {
    "bert": "BertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "discriminator": "ElectraForSequenceClassification",
}
# transformers writes only what differs from the defaults of a class, so that a file of BERT base
# may be nearly empty.
COMMON: dict[str, object] = {  # values that a configuration may leave out
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
DEFAULTS: dict[str, dict[str, object]] = {
    "bert": COMMON,
    "roberta": {**COMMON, "vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "electra": {
        **COMMON,
        "embedding_size": 128,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
}


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, int]]:
    """Read the model of a folder, under the names of this project.

    Returns:
        Parameters by name; ``args``; and the ids of the special symbols that the configuration
        names, by role.

    Raises:
        UserError: a file is missing, the model is of another type, or tensors and configuration
            disagree.
    """
    path = folder / CONFIG
    config = read_json(path)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        known = ", ".join((*FAMILIES, "transfo-xl", "gpt2", "fairseq_lm"))
        raise UserError(f"{path}: model_type is {cut(config.get('model_type'))}; known: {known}")
    settings = {**DEFAULTS[family], **{name: value for name, value in config.items() if value is not None}}
    _check_computation(settings, path)
    state = {_modern(name): value for name, value in read_tensors(folder).items()}
    kind = family
    # `model_type` is the same for both of ELECTRA's models; only the heads differ.
    if family == "electra":
        kind = "discriminator" if any(name.startswith("discriminator_predictions.") for name in state) else "generator"
    args = _args(kind, settings, path)
    vocabulary = _count(settings, path, "vocab_size")
    padding_idx = _id("pad_token_id", settings, path)
    layout = EncoderLayout(kind, typed(BertConfig, args), vocabulary, padding_idx)
    _check_head(state, kind, str(folder))
    model = _convert(state, layout, str(folder))
    keys = {role: f"{role}_token_id" for role in ("bos", "pad", "eos")}
    return model, args, {role: _id(key, settings, path) for role, key in keys.items() if settings.get(key) is not None}


def write(
    model: Mapping[str, Tensor], layout: EncoderLayout, names: Iterable[Parameter] | None = None
) -> dict[str, Tensor]:
    """Return Hugging Face tensors by name for the parameters *model*; missing token types get zero
    embeddings.

    *names* are of all parameters (default: of the encoder and its output layer).
    """
    zero = torch.zeros(layout.token_types, layout.cfg.embedding_dim)
    tensors = {}
    for ours, theirs, _ in parameters(layout) if names is None else names:
        value = model.get(TYPES, zero) if ours == TYPES else model[ours]
        # RoBERTa's table has rows for positions up to padding there, too; BERT's and ELECTRA's
        # begin with position 0.
        tensors[theirs] = value[layout.first_position :] if ours == POSITIONS else value
        # transformers gives an untied projection a bias of its own.
        if ours == OUTPUT and layout.kind != "generator":
            tensors[theirs.replace("weight", "bias")] = model[OUTPUT_BIAS]
    return {
        name: value.detach().float().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()
    }


def configuration(layout: EncoderLayout, roles: Mapping[str, int]) -> dict[str, Any]:
    """Return ``config.json`` of a model; *roles* are the ids of ``bos``, ``pad`` and ``eos``.

    Raises:
        UserError: the activation of its output layer is not possible in transformers.
    """
    act, head, architecture = layout.cfg.activation_fn, layout.cfg.head_activation, CLASSES[layout.kind]
    if act not in WRITTEN_ACTIVATIONS or head != ("gelu" if layout.kind in GELU_HEADS else act):
        raise UserError(
            f"`activation_fn` {act}, `head_activation_fn` {head}: not possible in {architecture} of transformers"
        )
    tied = layout.kind == "discriminator" or not layout.cfg.untie_weights_roberta
    return {**_configuration(layout, roles, architecture), "tie_word_embeddings": tied}


def classifier_configuration(
    layout: EncoderLayout, roles: Mapping[str, int], labels: Sequence[str], dropout: float
) -> dict[str, object]:
    """Return ``config.json`` of a classifier, as :func:`configuration`.

    *labels* are the classes by number, none in regression; *dropout* is the rate of the head.

    Raises:
        UserError: the activation of its layers is not possible in transformers.
    """
    if (act := layout.cfg.activation_fn) not in WRITTEN_ACTIVATIONS:
        raise UserError(f"`activation_fn` {act}: not possible in {CLASSIFIERS[layout.kind]} of transformers")
    names = list(labels) or ["score"]
    return {
        **_configuration(layout, roles, CLASSIFIERS[layout.kind]),
        "id2label": {str(number): label for number, label in enumerate(names)},
        "label2id": {label: number for number, label in enumerate(names)},
        "problem_type": "single_label_classification" if labels else "regression",
        "classifier_dropout": dropout,
    }


def _configuration(layout: EncoderLayout, roles: Mapping[str, int], architecture: str) -> dict[str, object]:
    cfg = layout.cfg
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": BASES[layout.kind],
        "vocab_size": layout.vocabulary,
        "hidden_size": cfg.encoder_embed_dim,
        "num_hidden_layers": cfg.encoder_layers,
        "num_attention_heads": cfg.encoder_attention_heads,
        "intermediate_size": cfg.encoder_ffn_embed_dim,
        "hidden_act": WRITTEN_ACTIVATIONS[cfg.activation_fn],
        "hidden_dropout_prob": cfg.dropout,
        "attention_probs_dropout_prob": cfg.attention_dropout,
        "max_position_embeddings": layout.positions,
        "type_vocab_size": layout.token_types,
        "layer_norm_eps": cfg.layer_norm_eps,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **{f"{role}_token_id": roles.get(role) for role in ("bos", "pad", "eos")},
    }
    return config | ({"embedding_size": cfg.embedding_dim} if config["model_type"] == "electra" else {})


def _check_computation(settings: Mapping[str, object], path: Path) -> None:
    """Raise UserError for settings that models here do not implement."""
    known = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
    for name, value in known.items():
        if settings.get(name, value) != value:
            raise UserError(f"{path}: {name} is {cut(settings[name])}; only {value} is supported")
    if settings["hidden_act"] not in list(ACTIVATIONS):
        raise UserError(f"{path}: hidden_act is {cut(settings['hidden_act'])}; known: {', '.join(ACTIVATIONS)}")


def _count(settings: Mapping[str, object], path: Path, name: str, least: int = 1) -> int:
    value = settings[name]
    if type(value) is not int or not least <= value < 1 << 31:
        raise UserError(f"{path}: {name} is {cut(value)}; expected a whole number from {least}")
    return value


def _id(name: str, settings: Mapping[str, Any], path: Path) -> int:
    value = settings[name]
    if type(value) is not int or not 0 <= value < settings["vocab_size"]:
        raise UserError(f"{path}: {name} is {cut(value)}, but there are {settings['vocab_size']} words; correct it")
    return value


def _check_head(state: Mapping[str, Tensor], kind: str, where: str) -> None:
    """Raise UserError for a model without an output layer that predicts tokens, such as a
    classifier."""
    if not any(name.removeprefix("module.").startswith(HEADS[kind]) for name in state):
        classes = [CLASSES[one] for one in CLASSES if BASES[one] == BASES[kind]]
        raise UserError(f"{where}: the model has no output layer for tokens; save it as {' or '.join(classes)}")


def _convert(state: Mapping[str, Tensor], layout: EncoderLayout, where: str) -> dict[str, Tensor]:
    tensors = Tensors(state, where)
    # Parts of a name, not the end of it: `bert.pooler.dense.weight` and
    # `bert.embeddings.position_ids` both count.
    for name in [name for name in tensors.left if not set(UNUSED).isdisjoint(name.split("."))]:
        del tensors.left[name]
    untied, kind = layout.cfg.untie_weights_roberta, layout.kind
    if untied and (bias := OUTPUT_WEIGHTS[kind].replace("weight", "bias")) in tensors.left:
        # The one that an untied model reads, of the two biases in its file.
        tensors.left[OUTPUT_BIASES[kind]] = tensors.left.pop(bias)
    model = {ours: tensors.take(theirs, *shape) for ours, theirs, shape in parameters(layout)}
    # Row `padding_idx` + 1 is the first token's here; the rows before it are never read and stay
    # zero.
    model[POSITIONS] = torch.cat([torch.zeros(layout.first_position, layout.cfg.embedding_dim), model[POSITIONS]])
    if kind != "discriminator":
        if not untied:
            model[OUTPUT] = tensors.tied(OUTPUT_WEIGHTS[kind], model[TOKENS])
        # transformers stores the bias under two names, of the head and of its linear layer.
        tensors.tied(OUTPUT_WEIGHTS[kind].replace("weight", "bias"), model[OUTPUT_BIAS])
    tensors.finish()
    return model


def _args(kind: str, settings: Mapping[str, Any], path: Path) -> dict[str, object]:
    """``args`` of a checkpoint with this model."""
    count = functools.partial(_count, settings, path)
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps"):
        if type(settings[name]) not in (int, float) or not 0 <= settings[name] < 1:
            raise UserError(f"{path}: {name} is {cut(settings[name])}; expected a number from 0, below 1")
    dim, heads = count("hidden_size"), count("num_attention_heads")
    if dim % heads:
        raise UserError(f"{path}: num_attention_heads {heads} does not divide hidden_size {dim}; correct it")
    # RoBERTa's configuration counts the two rows before the first position: 514 for texts of 512
    # tokens.
    unused = count("pad_token_id", 0) + 1 if kind == "roberta" else 0
    most = count("max_position_embeddings", unused + 1) - unused
    activation = ACTIVATIONS[settings["hidden_act"]]
    args = {
        "arch": {"bert": "bert", "roberta": "roberta"}.get(kind, f"electra_{kind}"),
        "task": "masked_lm",
        "criterion": "electra" if kind == "discriminator" else "masked_lm",
        "encoder_layers": count("num_hidden_layers"),
        "encoder_embed_dim": dim,
        "encoder_input_dim": count("embedding_size") if BASES[kind] == "electra" else dim,
        "encoder_ffn_embed_dim": count("intermediate_size"),
        "encoder_attention_heads": heads,
        "activation_fn": activation,
        "head_activation_fn": "gelu" if kind in GELU_HEADS else activation,
        "dropout": settings["hidden_dropout_prob"],
        "attention_dropout": settings["attention_probs_dropout_prob"],
        "activation_dropout": 0.0,
        "max_positions": most,
        "tokens_per_sample": most,
        "token_types": count("type_vocab_size"),
        "layer_norm_eps": settings["layer_norm_eps"],
        "untie_weights_roberta": not settings["tie_word_embeddings"] and kind != "discriminator",
    }
    # The folder has the discriminator alone; with a generator of size 0 the model is built without
    # one.
    return args | ({"generator_size": 0.0} if kind == "discriminator" else {})


def _modern(name: str) -> str:
    """*name* as transformers writes it today: layer norms in files of 2018 have ``gamma`` and
    ``beta``."""
    for former, today in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(f"LayerNorm{former}"):
            return name.removesuffix(former) + today
    return name
