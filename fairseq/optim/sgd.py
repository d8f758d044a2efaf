"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq.config.fields import flag, typed
from fairseq.config.registry import register_optimizer
from fairseq.config.settings import RateConfig
from fairseq.optim.elementwise import ElementwiseOptimizer, Group, State, States, Tensors
from fairseq.optim.fairseq_optimizer import FairseqOptimizer


@dataclass(frozen=True)
class SGDConfig(RateConfig):
    """Stochastic gradient descent with momentum."""

    momentum: float = flag(0.0, "momentum", low=0, below=1)
    weight_decay: float = flag(0.0, "weight decay, added to the gradient", low=0)


@register_optimizer("sgd", dataclass=SGDConfig)
class SGD(FairseqOptimizer):
    """``--optimizer sgd``: see :class:`MomentumSGD`."""

    updates_parts = True
    group_settings = {"momentum": "momentum", "weight_decay": "weight_decay"}

    def __init__(self, args: SGDConfig, params: Iterable[Any]) -> None:
        super().__init__(args)
        self.config = typed(SGDConfig, args)
        self._optimizer = MomentumSGD(params, **self.optimizer_config)


class MomentumSGD(ElementwiseOptimizer):
    """g ← g + λ·p; buf ← μ·buf + g; p ← p − η·buf, as in :class:`torch.optim.SGD`, whose states it shares."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def new_state(self, group: Group, zeros: Callable[[], Tensor]) -> State:
        return {"momentum_buffer": zeros()} if group["momentum"] > 0 else {}

    def update(self, group: Group, params: Tensors, grads: Tensors, states: States) -> None:
        if group["weight_decay"] != 0:
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        if group["momentum"] > 0:
            buffers = [state["momentum_buffer"] for state in states]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, grads)
            grads = buffers
        torch._foreach_add_(params, grads, alpha=-group["lr"])
