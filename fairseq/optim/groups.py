"""Groups of parameters, by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

NO_DECAY = "norms and biases"


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], no_decay: bool
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """Return the trained parameters: a list, or with *no_decay* two groups, the second without weight decay.

    Args:
        named: parameters with their names; those that require no gradient are left out.
        no_decay: whether the weights of norms and biases form a group without weight decay.
    """
    trained = [(name, p) for name, p in named if p.requires_grad]
    if not no_decay:
        return [p for _, p in trained]
    decayed = [p for name, p in trained if not is_norm_or_bias(name, p)]
    others = [p for name, p in trained if is_norm_or_bias(name, p)]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "group": NO_DECAY}]
    return [group for group in groups if group["params"]]


def is_norm_or_bias(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a vector or named as a bias, like Transformer-XL's matrices ``r_w_bias`` are."""
    return parameter.dim() < 2 or name.endswith("bias")
