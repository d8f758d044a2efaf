"""Types of what a checkpoint holds beside its weights, checked before anything is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq.checkpoint.integrity import tensors
from fairseq.errors import UserError

Kind = tuple[Callable[[Any], bool], str]
"""Whether a value is valid, and what messages call a valid one."""
_MILESTONE = re.compile(r"(checkpoint_(words|tokens)_\d{1,30}\.pt)?")
LONGEST_NAME = 1000  # characters of a parameter's name


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    # True is an int in Python; numbers from 2**63 on overflow torch's and numpy's.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_settings(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _is_random_states(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(states, Mapping) and all(isinstance(each, Tensor) for each in states.values()) for states in value
    )


TEXT: Kind = (lambda value: isinstance(value, str), "text")
COUNT: Kind = (_is_count, "a count")
POSITIVE: Kind = (lambda value: _is_count(value) and value >= 1, "a count of at least 1")
NUMBER: Kind = (lambda value: value is None or _is_number(value), "a number")
DICT: Kind = (lambda value: value is None or _is_settings(value), "a dict")
LIST: Kind = (lambda value: isinstance(value, list), "a list")

HISTORY = {
    **dict.fromkeys(("criterion_name", "optimizer_name"), TEXT),
    "num_updates": COUNT,
    "lr_scheduler_state": DICT,
}
EXTRA: dict[str, Kind] = {
    "train_iterator": (_is_settings, "a dict"),
    **dict.fromkeys(("epoch", "batch_offset", "without_improvement", "skipped_nonfinite"), COUNT),
    **dict.fromkeys(("val_loss", "best", "previous_training_time"), NUMBER),
    **dict.fromkeys(("sums", "average", "criterion", "loss_scaler", "carried", "validation", "due"), DICT),
    "random": (lambda value: value is None or _is_random_states(value), "a list of tensors by name"),
}
ITERATOR = {"epoch": POSITIVE, "iterations_in_epoch": COUNT, "read": DICT}
READ = {
    "order": TEXT,
    **dict.fromkeys(("step", "processes"), POSITIVE),
    **dict.fromkeys(("units", "block_size", "cut", "seed", "count"), COUNT),
}
SCALER: dict[str, Kind] = {
    "scale": (lambda value: _is_number(value) and float(value) > 0, "a number greater than 0"),
    **dict.fromkeys(("updates", "last_rescale", "overflows", "last_overflow", "overflows_in_a_row"), COUNT),
}
DUE = {
    **dict.fromkeys(("end_of_epoch", "validate", "save"), (lambda value: isinstance(value, bool), "true or false")),
    "epoch": POSITIVE,
    # A file of this name is written.
    "milestone": (
        lambda value: isinstance(value, str) and _MILESTONE.fullmatch(value) is not None,
        "a milestone's name",
    ),
}
AVERAGE = {"count": COUNT, "mean": LIST, "weights": LIST}


def check(state: Mapping[str, Any], path: str | Path) -> None:
    """Raise UserError, which names the part, if one
    of a checkpoint's parts has another type than it should."""
    for key in ("args", "cfg"):
        _require(state.get(key) is None or _is_settings(state[key]), path, key, "a dict with names")
        _require(next(tensors(state.get(key)), None) is None, path, key, "settings without tensors")
    _require(isinstance(state.get("dictionary"), str | None), path, "dictionary", "text")
    history = state.get("optimizer_history")
    _require(history is None or isinstance(history, list), path, "optimizer_history", "a list")
    for number, entry in enumerate(history or []):
        _check_fields(entry, HISTORY, path, f"optimizer_history[{number}]")
    _check_optimizer(state.get("last_optimizer_state"), path)
    extra = state.get("extra_state")
    if extra is not None:
        _check_fields(extra, EXTRA, path, "extra_state")
        for name, fields in (("train_iterator", ITERATOR), ("loss_scaler", SCALER), ("average", AVERAGE), ("due", DUE)):
            if extra.get(name) is not None:
                _check_fields(extra[name], fields, path, f"extra_state.{name}")
        read = (extra.get("train_iterator") or {}).get("read")
        if read is not None:
            _check_fields(read, READ, path, "extra_state.train_iterator.read")


def _check_optimizer(state: Any, path: str | Path) -> None:
    name = "last_optimizer_state"
    if state is None:
        return
    _require(isinstance(state, Mapping), path, name, "a dict")
    if "param_groups" not in state and "state" not in state:
        return  # of an optimizer with a layout of its own
    groups, entries = state.get("param_groups"), state.get("state")
    _require(isinstance(groups, list) and bool(groups), path, f"{name}.param_groups", "a list of groups")
    for group in groups:
        fits = isinstance(group, Mapping) and isinstance(group.get("params"), list)
        fits = fits and all(
            isinstance(item, str) and len(item) <= LONGEST_NAME or _is_count(item) for item in group["params"]
        )
        _require(fits, path, f"{name}.param_groups", "a list of groups with 'params'")
        for setting in ("lr", "weight_decay", "momentum", "eps"):
            value = group.get(setting, 0.0)
            pair = isinstance(value, list | tuple) and all(map(_is_number, value))
            _require(_is_number(value) or pair, path, f"{name}.param_groups.{setting}", "a number")
    _require(isinstance(entries, Mapping), path, f"{name}.state", "a dict")
    parameters = {item for group in groups for item in group["params"]}
    for key, entry in entries.items():
        if key not in parameters and isinstance(entry, Tensor):
            continue  # of all parameters together
        is_entry = isinstance(entry, Mapping) and all(isinstance(key, str) for key in entry)
        _require(is_entry, path, f"{name}.state[{key!r:.60}]", "a dict")
        _require(_is_number(entry.get("step", 0)), path, f"{name}.state[{key!r:.60}].step", "a number")


def _check_fields(value: Any, fields: Mapping[str, Kind], path: str | Path, part: str) -> None:
    _require(isinstance(value, Mapping), path, part, "a dict")
    for name, (fits, expected) in fields.items():
        if name in value:
            _require(fits(value[name]), path, f"{part}.{name}", expected)


def _require(fits: bool, path: str | Path, part: str, expected: str) -> None:
    if not fits:
        raise UserError(f"{path}: not a checkpoint ('{part}' is not {expected}); use another checkpoint")
