"""Checkpoints for fairseq 0.9 to 0.12: settings as a ``Namespace``, the optimizer's state by
number."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from fairseq.errors import UserError

ROBERTA = "roberta_base"
MODELS = {
    "transformer_lm": "decoder_attention_heads",
    "lstm_lm": "decoder_out_embed_dim",
    ROBERTA: "encoder_attention_heads",
}
"""Models that fairseq has, and a setting that only they have among those."""
# fairseq ignores settings that it does not know: it would load such a model and compute something
# else.
FAIRSEQ_VALUES = {  # setting: values that fairseq's model has
    "position_infused_attention": (False, None),
    "tokens_from_prev": (0, None),
    "qk_norm": (False, None),
    "token_shift": (0, None),
    "ngram_notes": (0, None),
    "word_notes": (0, None),
    "decoder_kv_heads": ("decoder_attention_heads", None),
    "decoder_norm": ("layer", None),
    "decoder_norm_eps": (1e-5, None),
    "decoder_gated_ffn": (False, None),
    "decoder_biases": ("all", None),
    "decoder_parallel_residual": (False, None),
    "rotary_fraction": (0, None),
    "attention_window": (None,),
    "notes": (False, None),
    "streams": (False, None),
    "token_types": (0, None),
    "layer_norm_eps": (1e-5, None),
    "encoder_input_dim": ("encoder_embed_dim", None),  # a name: the value of that setting
    "head_activation_fn": ("activation_fn", None),
    "generator_size": (None,),
    "classification_head_name": (None,),
}
SETTINGS = """
activation_dropout activation_fn adam_betas adam_eps adaptive_input adaptive_input_cutoff adaptive_input_factor
adaptive_softmax_cutoff adaptive_softmax_dropout adaptive_softmax_factor add_bos_token attention_dropout batch_size
batch_size_valid character_embeddings clip_norm criterion curriculum data decoder_attention_heads decoder_dropout_in
decoder_dropout_out decoder_embed_dim decoder_ffn_embed_dim decoder_hidden_size decoder_input_dim decoder_layerdrop
decoder_layers decoder_learned_pos decoder_normalize_before decoder_out_embed_dim decoder_output_dim dropout
encoder_attention_heads encoder_embed_dim encoder_ffn_embed_dim encoder_layerdrop encoder_layers force_anneal
freq_weighted_replacement label_smoothing layernorm_embedding leave_unmasked_prob lr lr_period_updates lr_scheduler
lr_shrink mask_prob mask_whole_words max_epoch max_lr max_positions max_target_positions max_tokens max_tokens_valid
max_update min_lr momentum no_decoder_final_norm no_scale_embedding no_token_positional_embeddings optimizer
random_token_prob required_batch_size_multiple residuals sample_break_mode seed sentence_avg
share_decoder_input_output_embed stop_min_lr t_mult task tie_adaptive_proj tie_adaptive_weights tokens_per_sample
train_subset untie_weights_roberta update_freq valid_subset warmup_init_lr warmup_updates weight_decay
"""
HISTORY = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}  # without training
# In fairseq these are flags of text, parsed by the model.
TEXT_LISTS = ("adaptive_input_cutoff", "adaptive_softmax_cutoff")  # fairseq reads "200,600"


def to_fairseq(state: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a loaded checkpoint as fairseq writes it, of the model and of the position that
    training has reached.

    Raises:
        UserError: fairseq has no such model.
    """
    args = dict(state["args"])
    # By settings and not by `arch`: an architecture's name may be a plug-in's.
    model = next((name for name, only in MODELS.items() if only in args), None)
    if model is None:
        raise UserError(f"--to fairseq: {source} is a model that fairseq lacks; known: {', '.join(MODELS)}")
    for name, there in FAIRSEQ_VALUES.items():
        if args.get(name) not in (*there, *(args.get(value) for value in there if isinstance(value, str))):
            raise UserError(f"--to fairseq: {source} has {name}={args[name]}, which fairseq's {model} lacks")
    extra = state.get("extra_state") or {}
    names = ("val_loss", "best", "previous_training_time")
    iterator = extra.get("train_iterator") or {"epoch": 1, "iterations_in_epoch": 0}
    # The order of RoBERTa's parameters, and so their numbers, differ between versions of fairseq.
    optimizer = _numbered(state.get("last_optimizer_state"), state["model"]) if model != ROBERTA else None
    return {
        "args": argparse.Namespace(**_settings(args, model)),
        "model": dict(state["model"]),
        "optimizer_history": list(state.get("optimizer_history") or [HISTORY]),
        "extra_state": {
            # `read` counts what earlier numbers of processes have read of the epoch, which
            # fairseq's iterators do not know.
            "train_iterator": {name: value for name, value in iterator.items() if name != "read"},
            **{name: extra[name] for name in names if extra.get(name) is not None},
        },
        "last_optimizer_state": optimizer,
    }


def _settings(args: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The settings that fairseq reads, without None: its loading takes what is missing from the
    dataclasses."""
    settings = {name: value for name, value in args.items() if name in SETTINGS.split() and value is not None}
    settings["arch"] = model
    if model == "transformer_lm":
        for name in ("decoder_input_dim", "decoder_output_dim"):
            # fairseq's loading fills what is missing from the dataclass, 512, and not from the
            # width of the model.
            settings.setdefault(name, args["decoder_embed_dim"])
    if model == ROBERTA:
        settings.pop("max_target_positions", None)
    else:
        settings.setdefault("max_target_positions", args.get("tokens_per_sample", 1024))
    for name in TEXT_LISTS:
        if not isinstance(settings.get(name, ""), str):
            settings[name] = ",".join(map(str, settings[name]))
    if not isinstance(settings.get("adam_betas", ""), str):  # text in what fairseq wrote
        settings["adam_betas"] = str(tuple(settings["adam_betas"]))
    if "batch_size" in settings:
        settings["max_sentences"] = settings["batch_size"]  # the name before 0.10
    return {**settings, "task": "masked_lm" if model == ROBERTA else "language_modeling"}


def _numbered(state: object, model: Mapping[str, object]) -> dict[str, Any] | None:
    """The optimizer's state by number, in the order of the model's parameters; None if fairseq has
    no such groups."""
    if not isinstance(state, Mapping) or len(state.get("param_groups") or []) != 1:
        return None
    (group,) = state["param_groups"]
    names = [name for name in model if name in set(group["params"])]
    if len(names) != len(group["params"]):
        # Numbered already, or of a criterion with parameters, whose names no model has.
        return dict(state)
    # The order of the state dict is the order of `model.parameters()`, by which fairseq's
    # optimizers number.
    numbers = {name: index for index, name in enumerate(names)}
    entries = {numbers.get(name, name): entry for name, entry in state["state"].items()}
    # torch's Adam reads it from the group, and fairseq restores groups as they are.
    defaults = {"amsgrad": False} if "betas" in group else {}
    return {"state": entries, "param_groups": [{**defaults, **group, "params": list(range(len(names)))}]}
