"""Groups of parameters, by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

NO_DECAY = "norms and biases"
HIDDEN = "hidden matrices"


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], no_decay: bool, hidden: Collection[nn.Parameter] = ()
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """Return the trained parameters: a list, or groups if they are to be treated differently.

    Args:
        named: parameters with their names; those that require no gradient are left out.
        no_decay: whether the weights of norms and biases form a group without weight decay.
        hidden: parameters that form a group of their own, the first one, whatever their names.
    """
    trained = [(name, p) for name, p in named if p.requires_grad]
    if not no_decay and not hidden:
        return [p for _, p in trained]
    numbers = {id(p) for p in hidden}
    others = [(name, p) for name, p in trained if id(p) not in numbers]
    exempt = {id(p) for name, p in others if no_decay and is_norm_or_bias(name, p)}
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in trained if id(p) in numbers], "group": HIDDEN},
        {"params": [p for _, p in others if id(p) not in exempt]},
        {"params": [p for _, p in others if id(p) in exempt], "weight_decay": 0.0, "group": NO_DECAY},
    ]
    return [group for group in groups if group["params"]]


def hidden_matrices(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The weight matrices of *layers*: those that multiply hidden states, so not the biases that are matrices."""
    named = [item for layer in layers for item in layer.named_parameters()]
    return [p for name, p in named if p.requires_grad and p.dim() == 2 and not is_norm_or_bias(name, p)]


def is_norm_or_bias(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a vector or named as a bias, like Transformer-XL's matrices ``r_w_bias`` are."""
    return parameter.dim() < 2 or name.endswith("bias")
