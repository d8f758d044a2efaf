"""Groups of parameters, by name and role."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

HIDDEN = "hidden matrices"
NO_DECAY = "norms and biases"
OUTER = "embeddings and output"
"""Roles of parameters: matrices inside transformer layers, norms and biases anywhere, and all
others."""

GroupOf = Callable[[str, str], Mapping[str, Any]]
"""A function of the name and the role of a parameter that returns the settings of its group, such
as ``lr_factor``."""


def hidden_apart(name: str, role: str) -> dict[str, object]:
    """Return the settings of groups in which hidden
    matrices are apart from the other parameters."""
    return {"group": HIDDEN} if role == HIDDEN else {}


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    no_decay: bool,  # whether the weights of norms and biases form a group without weight decay
    hidden: Collection[nn.Parameter] = (),  # the matrices inside layers, whatever their names
    group_of: GroupOf = hidden_apart,  # parameters for which it returns the same settings form a group
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """Return the parameters that require a gradient: a list,
    or groups if they are to be treated differently.

    Hidden matrices come first, what has no weight decay last.
    """
    numbers = {id(p) for p in hidden}
    groups: dict[tuple[bool, bool, str], dict[str, Any]] = {}
    for name, p in named_parameters:
        if p.requires_grad:
            role = HIDDEN if id(p) in numbers else NO_DECAY if is_norm_or_bias(name, p) else OUTER
            exempt = no_decay and role == NO_DECAY
            settings = {**({"weight_decay": 0.0, "group": NO_DECAY} if exempt else {}), **group_of(name, role)}
            key = (exempt, "group" not in settings, repr(sorted(settings.items())))
            groups.setdefault(key, {"params": [], **settings})["params"].append(p)
    in_order = [groups[key] for key in sorted(groups)]
    # A single group without settings is a plain list, as torch's optimizers take it.
    return in_order[0]["params"] if [*map(len, in_order)] == [1] else in_order


def hidden_matrices(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The weight matrices of *layers*: those that multiply
    hidden states, so not the biases that are matrices."""
    parameters = [item for layer in layers for item in layer.named_parameters()]
    return [p for name, p in parameters if p.requires_grad and p.dim() == 2 and not is_norm_or_bias(name, p)]


def is_norm_or_bias(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a vector or named as a bias,
    like Transformer-XL's matrices ``r_w_bias`` are."""
    return parameter.dim() < 2 or name.endswith("bias")
