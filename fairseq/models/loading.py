"""The model that settings choose, and strict loading of checkpoint parameters."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from fairseq.checkpoint import describe_mismatch
from fairseq.config import fields
from fairseq.config.fields import UNSTORED
from fairseq.config.registry import ARCHITECTURES, EXTENSIONS, MODELS, TASKS
from fairseq.config.settings import Settings, typed_settings
from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel

logger = logging.getLogger(__name__)

# Settings of fairseq that change what a model computes and are not implemented here, each with the
# values that change nothing. Left out because they change no result: checkpoint_activations,
# offload_activations, min_params_to_wrap, pad_to_fixed_length, pad_to_fixed_bsz, use_plasma_view,
# future_target, cross attention's.
NEUTRAL: dict[str, tuple[object, ...]] = {
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


def build_model(settings: Settings, task: Any) -> BaseFairseqModel:
    """The model of the architecture that *settings* choose, for *task*'s dictionary."""
    settings = typed_settings(settings)
    cls = task.model_class(settings.chosen.arch)
    model = cls.build_model(cls.settings_of(settings), task)
    for name, cfg in settings.extensions.items():
        EXTENSIONS[name].extend_model(model, cfg, task)
    return model


def load_parameters(model: BaseFairseqModel, parameters: Mapping[str, Tensor], source: str) -> None:
    """Load a checkpoint's *parameters* strictly;
    raise UserError if names, shapes or data differ."""
    model.check_parameters(parameters)
    upgraded = model.upgrade_state_dict(dict(parameters))
    problem = describe_mismatch(upgraded, model.state_dict(), source)
    if problem:
        raise UserError(problem)
    model.load_state_dict(upgraded)


def load_fitting(model: BaseFairseqModel, parameters: Mapping[str, Tensor], source: str) -> None:
    """Load the *parameters* of a checkpoint that *model* has with the same shape and for the same
    data; log the others.

    Raises:
        UserError: no parameter matches, or a part
            of the model cannot begin anew; see :meth:`check_init`.
    """
    model.check_init(parameters, source)
    upgraded, expected = model.upgrade_state_dict(dict(parameters)), model.state_dict()
    foreign = model.data_specific(upgraded)
    fitting = {
        name: value
        for name, value in upgraded.items()
        if name in expected and name not in foreign and value.shape == expected[name].shape
    }
    # Parameters only: markers of fairseq's versions are buffers that every model has.
    if not any(name in fitting for name, _ in model.named_parameters()):
        raise UserError(f"{source}: no parameter matches this model; check `arch` and its sizes")
    model.load_state_dict(fitting, strict=False)
    left_out = {
        "of other data": list(foreign),
        "with another shape": [n for n in upgraded if n in expected and n not in fitting and n not in foreign],
        "unused": [name for name in upgraded if name not in expected],
        "initialized": [name for name in expected if name not in upgraded],
    }
    parts = [f"{len(names)} {kind} ({', '.join(names)})" for kind, names in left_out.items() if names]
    logger.info(
        "%s: %d of %d parameters loaded%s", source, len(fitting), len(expected), "".join(f"; {p}" for p in parts)
    )


def check_settings(
    model: BaseFairseqModel,
    stored: Mapping[str, object],
    settings: object,
    source: str,
    extensions: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Check that typed *settings*, of the model and of its *extensions*, agree with the *stored*
    ones of a checkpoint.

    Raises:
        UserError: a setting that changes the meaning of the parameters differs, or a stored one is
            not implemented; the message names the flag.
    """
    check_supported(model.unread(stored), source)
    for part, cfg in [(model, settings), *((EXTENSIONS[name], cfg) for name, cfg in extensions.items())]:
        if part.config_class is not None:
            _check_decisive(part, stored, cfg, source)


def check_supported(settings: Mapping[str, object], source: str) -> None:
    """Raise UserError if *settings* of a checkpoint have a value
    that changes the result and is not implemented."""
    task = str(settings.get("task"))
    reads = TASKS[task].reads if task in TASKS else ()
    for name, neutral in NEUTRAL.items():
        value = settings.get(name)
        # None stands for "not set" in checkpoints of several versions.
        if value is not None and value not in neutral and name not in reads:
            raise UserError(
                f"{source}: {name}={value!r} is not implemented and changes the result; supported: "
                + " or ".join(map(repr, neutral))
            )


def _check_decisive(part: Any, stored: Mapping[str, object], settings: object, source: str) -> None:
    # An older checkpoint lacks newer settings, which then have their defaults, as the program that
    # wrote it had.
    known = {name: value for name, value in stored.items() if value is not None}
    before: Any = fields.typed(part.config_class, known)
    for name in part.decisive_settings:
        if name in known and getattr(before, name) != getattr(settings, name):
            now = getattr(settings, name)
            raise UserError(
                f"`{name}` {now}: {source} was trained with {getattr(before, name)}, "
                "which its parameters depend on; keep that value"
            )


def decisive_settings(stored: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of *stored*, a checkpoint's,
    that its parameters depend on beside their shapes.

    None are known of a model that is not registered.
    """
    arch = stored.get("arch")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        return {}
    parts = [MODELS[ARCHITECTURES[arch].model], *(EXTENSIONS[name] for name in EXTENSIONS if stored.get(name))]
    names = [name for part in parts for name in part.decisive_settings]
    return {name: stored[name] for name in names if stored.get(name) is not None}


def strip_for_inference(
    args: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Settings and parameters of the model that a checkpoint
    is used as after training, without its extensions."""
    args, parameters = MODELS[ARCHITECTURES[args["arch"]].model].strip_for_inference(args, parameters)
    for name in EXTENSIONS:
        if args.get(name):
            args, parameters = EXTENSIONS[name].strip_for_inference(args, parameters)
    return args, parameters


def stored_settings(flat: Mapping[str, object], model: BaseFairseqModel) -> dict[str, object]:
    """The settings a checkpoint stores: the plain values of *flat*, as fairseq's, and what *model*
    was built with; no paths."""
    cfg: Any = getattr(model, "cfg", None)
    # After the flat ones: a model may have completed its settings,
    # such as the length of a table of positions.
    built: dict[str, object] = dataclasses.asdict(cfg) if model.config_class is not None and cfg is not None else {}
    return {name: value for name, value in {**flat, **built}.items() if _is_plain(value) and name not in UNSTORED}


def stored_parameters(model: BaseFairseqModel) -> dict[str, Tensor]:
    """The parameters and buffers of *model* as a checkpoint stores them, the live ones; a tied one
    is one tensor."""
    tensors = model.state_dict(keep_vars=True)
    # detach() makes a new tensor at each call:
    # without this table a tied parameter would be saved twice.
    once = {id(value): value.detach() for value in tensors.values()}
    return {name: once[id(value)] for name, value in tensors.items()}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return value is None or isinstance(value, bool | int | float | str)
