"""Upgrade of checkpoints of fairseq 0.6 to 0.12
and of the Shortformer fork to the current format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PARAMETER_NAMES = [  # (pattern, current name), applied in order
    # RoBERTa before 0.9
    (r"^decoder\.(sentence_encoder|lm_head|classification_heads)\.", r"encoder.\1."),
    # RoBERTa since 0.10.2
    (r"sentence_encoder\.layernorm_embedding\.", "sentence_encoder.emb_layer_norm."),
    (r"\.layer_norms\.0\.", ".self_attn_layer_norm."),
    (r"\.layer_norms\.[12]\.", ".final_layer_norm."),
]
# Parameters of 0.12.2's encoder layers for a fast path: made from the others when a model is
# loaded, never trained.
COPIES = re.compile(r".*\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)")
# Of RoBERTa; fine-tuning keeps it, untrained.
OUTPUT_LAYER = re.compile(r"(?:encoder|decoder)\.lm_head\.(.*)")
BUFFERS = ("version", "_float_tensor")
# fairseq < 0.8: queries, keys and values in one matrix.
FUSED_PROJECTION = re.compile(r"(.*\.)in_proj_(weight|bias)")

ARGUMENT_NAMES = {  # former name: current name
    "relu_dropout": "activation_dropout",
    "max_sentences": "batch_size",
    "max_sentences_valid": "batch_size_valid",
    "stop_min_lr": "min_lr",
}
LISTS = ("lr", "update_freq")  # once single numbers

# Wrappers, stored in place of the optimizer's name.
HALF_PRECISION = ("FP16Optimizer", "MemoryEfficientFP16Optimizer")
# fairseq's class: this package's.
CRITERIONS = {"MaskedLmLoss": "MaskedLMCriterion"}
OPTIMIZERS = {
    "nag": "FairseqNAG",
    "adam": "FairseqAdam",
    "sgd": "SGD",
    "adafactor": "FairseqAdafactor",
    "lamb": "FairseqLAMB",
}


def upgrade(state: Mapping[str, Any]) -> dict[str, object]:
    """Return a checkpoint with current names of parameters
    and settings; a current checkpoint is unchanged.

    *state* has ``model`` (parameters by name), and ``args`` (a dict) or ``cfg`` (a nested dict).
    """
    args = upgrade_args(_settings(state))
    upgraded = {key: value for key, value in state.items() if key != "cfg"}
    upgraded["args"] = args
    if "carried" in (state.get("extra_state") or {}):
        # Written by this package: the names are the model's, and may be like the former ones.
        return upgraded
    # Loading is strict, so that parameters which no model has must go.
    superfluous = {name for name in state["model"] if COPIES.fullmatch(name)}
    if args.get("task") == "sentence_prediction":
        superfluous |= {name for name in state["model"] if OUTPUT_LAYER.fullmatch(name)}
    upgraded["model"] = upgrade_model({name: p for name, p in state["model"].items() if name not in superfluous})
    upgraded["optimizer_history"] = [_history(entry, args) for entry in state.get("optimizer_history") or []]
    upgraded["last_optimizer_state"] = _without(
        superfluous, state.get("last_optimizer_state"), state["model"], bool(args.get("untie_weights_roberta"))
    )
    upgraded["extra_state"] = _extra_state(state.get("extra_state") or {})
    return upgraded


def upgrade_model(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters under current names, with fused attention projections split into three."""
    upgraded: dict[str, Tensor] = {}
    for name, value in model.items():
        for pattern, replacement in PARAMETER_NAMES:
            name = re.sub(pattern, replacement, name)
        fused = FUSED_PROJECTION.fullmatch(name)
        if fused:
            parts = zip(("q_proj", "k_proj", "v_proj"), value.chunk(3), strict=True)
            upgraded |= {f"{fused[1]}{part}.{fused[2]}": piece for part, piece in parts}
        else:
            upgraded[name] = value
    return upgraded


def upgrade_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under current names, with the former defaults of missing ones."""
    upgraded = dict(args)
    for former, name in ARGUMENT_NAMES.items():
        if former in upgraded:
            value = upgraded.pop(former)
            upgraded.setdefault(name, value)
    for name in LISTS:
        if isinstance(upgraded.get(name), int | float):
            upgraded[name] = [upgraded[name]]
    if isinstance(upgraded.get("tokens_from_prev"), int):
        # The Shortformer fork's -1: no cache.
        upgraded["tokens_from_prev"] = max(0, upgraded["tokens_from_prev"])
        # The fork has no setting for position-infused attention, because all its models have it,
        # without a cache too.
        if "position_infused_attention" not in upgraded or upgraded["tokens_from_prev"]:
            upgraded["position_infused_attention"] = not upgraded.get("rotary_fraction")
    # 0.12, whose defaults are others, stores all of them.
    if upgraded.get("arch") == "transformer_lm":
        upgraded.setdefault("decoder_normalize_before", True)
        upgraded.setdefault("decoder_input_dim", None)
        upgraded.setdefault("decoder_output_dim", None)
    if upgraded.get("arch") == "transformer_lm_fast_demo":
        upgraded.setdefault("ngram_notes", 0)  # up to 2.0 there was no such setting
    if not upgraded.pop("store_ema", True):
        # 0.12 stores a decay although it averages nothing.
        upgraded.pop("ema_decay", None)
    # Settings written before models had a final norm.
    if "no_tie_adaptive_proj" in upgraded:
        upgraded["no_decoder_final_norm"] = True
        if not upgraded.pop("no_tie_adaptive_proj"):
            upgraded["tie_adaptive_proj"] = True
    if "decoder_final_norm" in upgraded:
        upgraded["no_decoder_final_norm"] = not upgraded.pop("decoder_final_norm")
    return upgraded


def _settings(state: Mapping[str, Any]) -> dict[str, Any]:
    args = state.get("args")
    return dict(args) if args is not None else _flatten(state["cfg"])


def _flatten(cfg: Mapping[str, object]) -> dict[str, object]:
    """The groups of settings of fairseq ≥ 0.11 as one flat dict;
    the ``_name`` of a group is its choice."""
    flat: dict[str, Any] = {}
    for group, settings in cfg.items():
        if not isinstance(settings, Mapping):
            continue
        chosen = settings.get("_name")
        if chosen is not None:
            flat["arch" if group == "model" else group] = chosen
        flat |= {name: value for name, value in settings.items() if name != "_name" and name not in flat}
    return flat


def _without(superfluous: set[str], optimizer: Any, model: Mapping[str, Tensor], untied: bool) -> Any:
    """The state of a numbered *optimizer* without entries
    of the *superfluous* among the parameters of *model*.

    fairseq numbers parameters in the order of *model*, tied ones once; RoBERTa's output weights may
    be *untied*. Under ``--fp16`` all are end to end in a single one.
    """
    names = [name for name in model if name.rpartition(".")[2] not in BUFFERS]
    if not untied:
        names = [name for name in names if (match := OUTPUT_LAYER.fullmatch(name)) is None or match[1] != "weight"]
    copies = {number for number, name in enumerate(names) if name in superfluous}
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    if not copies or not isinstance(groups, list):
        return optimizer
    numbers = [number for group in groups for number in group["params"]]
    if len(numbers) > 1:
        removed = {number for index, number in enumerate(numbers) if index in copies}
        remaining = [{**group, "params": [n for n in group["params"] if n not in removed]} for group in groups]
        entries = {number: entry for number, entry in optimizer["state"].items() if number not in removed}
        return {**optimizer, "state": entries, "param_groups": remaining}
    # One flat parameter: the elements of the superfluous
    # ones are cut out of every state of its shape.
    trained = torch.cat([torch.full((model[name].numel(),), number not in copies) for number, name in enumerate(names)])
    cut = {
        number: {
            # A longer one is of another model, and is rejected as such when the optimizer reads it.
            key: value[trained[: len(value)]]
            if isinstance(value, Tensor) and value.dim() == 1 and len(value) <= len(trained)
            else value
            for key, value in entry.items()
        }
        for number, entry in optimizer["state"].items()
        if number in numbers
    }
    return {**optimizer, "state": {**optimizer["state"], **cut}}


def _history(entry: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, object]:
    upgraded = {"num_updates": 0, **entry}
    if upgraded.get("criterion_name") in CRITERIONS:
        upgraded["criterion_name"] = CRITERIONS[upgraded["criterion_name"]]
    if upgraded.get("optimizer_name") in HALF_PRECISION:
        upgraded["optimizer_name"] = OPTIMIZERS.get(args.get("optimizer", ""), upgraded["optimizer_name"])
    return upgraded


def _extra_state(extra_state: Mapping[str, Any]) -> dict[str, object]:
    """The extra state without the meters that fairseq 0.8 pickled, but with their training time."""
    upgraded = dict(extra_state)
    meters = upgraded.pop("train_meters", None) or {}
    if "train_wall" in meters:
        upgraded.setdefault("previous_training_time", getattr(meters["train_wall"], "sum", 0))
    if "train_iterator" not in upgraded and "epoch" in upgraded:
        batches = upgraded.get("batch_offset", 0)
        upgraded["train_iterator"] = {"epoch": upgraded["epoch"], "iterations_in_epoch": batches}
    return upgraded
