"""Adafactor with the options of its paper, of which PyTorch's own has a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fairseq.optim.elementwise import CountingOptimizer, Group, State, States, Tensors
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.settings import AdafactorConfig


class Adafactor(CountingOptimizer):
    """Adam without a first moment, and with the second moment
    of a matrix kept as its row and column means.

    After t updates β₂ = 1 − t^decay_rate. An update is divided by its root mean square over
    *clip_threshold* where that is above 1, then multiplied by the rate.

    Source: Shazeer & Stern 2018, "Adafactor: adaptive learning rates with sublinear memory cost",
    algorithms 4 and 5.
    """

    # Means of rows and columns, and the root mean square, need the whole parameter.
    sliceable = False

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, settings)

    def new_state(self, group: Group, zeros: Callable[[], Tensor]) -> State:
        like = zeros()
        state: State = {"step": 0}
        if like.dim() >= 2:
            # Zeros of the shapes that the means of rows and columns have.
            state["exp_avg_sq_row"], state["exp_avg_sq_col"] = like.sum(-1), like.sum(-2)
        else:
            state["exp_avg_sq"] = torch.zeros_like(like)
        if group["beta1"] is not None:
            state["exp_avg"] = like
        return state

    def update_at(self, step: int, group: Group, params: Tensors, grads: Tensors, states: States) -> None:
        rates = _rates(group, step, params)
        squares = torch._foreach_mul(grads, grads)
        torch._foreach_add_(squares, group["eps"][0])
        decay = 1 - step ** group["decay_rate"]
        updates = [_normalised(*each, decay) for each in zip(grads, squares, states, strict=True)]
        # Clipping of the update (section 6): û = u / max(1, RMS(u) / d).
        excess = _rms(updates)
        torch._foreach_div_(excess, group["clip_threshold"])
        torch._foreach_clamp_min_(excess, 1.0)
        torch._foreach_div_(updates, excess)
        torch._foreach_mul_(updates, rates)
        if group["beta1"] is not None:
            means = [state["exp_avg"] for state in states]
            torch._foreach_mul_(means, group["beta1"])
            torch._foreach_add_(means, updates, alpha=1 - group["beta1"])
            updates = means
        if group["weight_decay"] != 0:
            torch._foreach_sub_(params, torch._foreach_mul(params, rates), alpha=group["weight_decay"])
        torch._foreach_sub_(params, updates)


def _rates(group: Group, step: int, params: Tensors) -> list[Any]:
    """The rate of each parameter: numbers, or scalar tensors
    where it follows from the parameter's size."""
    rate: float = group["lr"]
    if group["relative_step"]:
        rate = min(1e-6 * step if group["warmup_init"] else 1e-2, step**-0.5)
    if not group["scale_parameter"]:
        return [rate] * len(params)
    rates = _rms(params)
    torch._foreach_clamp_min_(rates, group["eps"][1])
    torch._foreach_mul_(rates, rate)
    return rates


def _normalised(grad: Tensor, squares: Tensor, state: State, decay: float) -> Tensor:
    """Return the gradient over the root of its second moment, which is updated."""
    if "exp_avg_sq" in state:
        return state["exp_avg_sq"].lerp_(squares, 1 - decay).rsqrt().mul_(grad)
    rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
    rows.lerp_(squares.mean(-1), 1 - decay)
    columns.lerp_(squares.mean(-2), 1 - decay)
    # The two factors are applied one after the other:
    # their product would be a matrix of second moments.
    scale = (rows / rows.mean(-1, keepdim=True)).rsqrt_().unsqueeze(-1)
    return scale * columns.rsqrt().unsqueeze(-2) * grad


def _rms(tensors: Tensors) -> Tensors:
    """The root mean square of each of *tensors*."""
    norms = list(torch._foreach_norm(tensors, 2))
    torch._foreach_div_(norms, [tensor.numel() ** 0.5 for tensor in tensors])
    return norms


class FairseqAdafactor(FairseqOptimizer):
    """``--optimizer adafactor``: see :class:`Adafactor`."""

    config_class = AdafactorConfig
    optimizer_class = Adafactor
    group_settings = {
        "eps": "adafactor_eps",
        **{name: name for name in ("clip_threshold", "decay_rate", "beta1", "scale_parameter", "relative_step")},
        **{name: name for name in ("warmup_init", "weight_decay")},
    }
