"""Gradient descent: plain and with momentum, Nesterov's
in fairseq's form, and Adagrad, as PyTorch has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from fairseq.modules import devices
from fairseq.optim.elementwise import Factor, Group, MultiTensorOptimizer, State, States, Tensors, divisor, scale_
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.settings import AdagradConfig, NAGConfig, SGDConfig

# torch rejects factors beyond it, as of 1e-8 raised to 1e38.
LARGEST = torch.finfo(torch.float32).max
LARGEST_CHANGE = 1e4


class MomentumSGD(MultiTensorOptimizer):
    """g ← g + λ·p; buf ← μ·buf + g; p ← p − η·buf,
    as in :class:`torch.optim.SGD`, whose states it shares."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def new_state(self, group: Group, zeros: Callable[[], Tensor]) -> State:
        return {"momentum_buffer": zeros()} if group["momentum"] > 0 else {}

    def update(self, group: Group, params: Tensors, grads: Tensors, states: States, factor: Factor) -> None:
        """One call of PyTorch's function: on an accelerator its fused kernel, which multiplies
        gradients itself."""
        fused = devices.is_accelerator(params[0].device)
        if not fused:
            scale_(grads, factor)
        sgd(
            params,
            grads,
            [state.get("momentum_buffer") for state in states],
            foreach=not fused,
            fused=fused,
            lr=group["lr"],
            momentum=group["momentum"],
            dampening=0.0,
            weight_decay=group["weight_decay"],
            nesterov=False,
            maximize=False,
            grad_scale=divisor(factor, 1.0, params[0].device) if fused else None,
        )


class SGD(FairseqOptimizer):
    """``--optimizer sgd``: see :class:`MomentumSGD`."""

    config_class = SGDConfig
    optimizer_class = MomentumSGD
    updates_parts = True
    group_settings = {"momentum": "momentum", "weight_decay": "weight_decay"}


class NAG(MultiTensorOptimizer):
    """Nesterov's momentum with the learning rate inside
    the buffer, which follows when the rate changes.

    With gradient g, rate η, momentum μ and c = η / η_old:
    p ← p + μ²·c·buf − (1 + μ)·η·g; buf ← μ·c·buf − η·g; weight decay λ shrinks p by 1 − η·λ before.

    Source: Sutskever et al. 2013, "On the importance of initialization and momentum in deep
    learning", eq. 3–4; Bengio et al. 2012, "Advances in optimizing recurrent networks", eq. 7, for
    the form without a look-ahead.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.99, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "lr_old": lr, "momentum": momentum, "weight_decay": weight_decay})

    def new_state(self, group: Group, zeros: Callable[[], Tensor]) -> State:
        return {"momentum_buffer": zeros()}

    def update(self, group: Group, params: Tensors, grads: Tensors, states: States, factor: Factor) -> None:
        """One call of PyTorch's kernel of SGD with Nesterov's momentum.

        With rate r, momentum m and dampening d it computes buf ← m·buf + (1 − d)·ĝ; p ← p − r·(ĝ +
        m·buf), which is the update above for ĝ = −c·η·g, r = −1/c, m = μ·c and d = 1 − 1/c. It
        multiplies gradients itself.
        """
        lr, lr_old, momentum = group["lr"], group["lr_old"], group["momentum"]
        # After a rate of 0 the buffer is 0.
        change = lr / lr_old if lr_old > 0 else 1.0
        buffers = [state["momentum_buffer"] for state in states]
        if group["weight_decay"] != 0:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        if momentum == 0:  # then the kernel takes no buffers
            scale_(grads, factor)
            torch._foreach_zero_(buffers)
            torch._foreach_add_(buffers, grads, alpha=-lr)
            torch._foreach_add_(params, buffers)
            return
        # Beyond it c·η·g may not be a float32.
        if not 1 / LARGEST_CHANGE <= change <= LARGEST_CHANGE:
            torch._foreach_mul_(buffers, min(change, LARGEST))
            change = 1.0
        sgd(
            params,
            grads,
            buffers,
            fused=True,
            lr=-1 / change,
            momentum=momentum * change,
            dampening=1 - 1 / change,
            weight_decay=0.0,
            nesterov=True,
            maximize=False,
            grad_scale=divisor(factor, -change * lr, params[0].device),
        )

    def end_step(self, group: Group) -> None:
        group["lr_old"] = group["lr"]


class FairseqNAG(FairseqOptimizer):
    """``--optimizer nag``: see :class:`NAG`."""

    config_class = NAGConfig
    optimizer_class = NAG
    updates_parts = True
    group_settings = {"momentum": "momentum", "weight_decay": "weight_decay"}


class Adagrad(FairseqOptimizer):
    """``--optimizer adagrad``: :class:`torch.optim.Adagrad` (Duchi et al. 2011)."""

    config_class = AdagradConfig
    optimizer_class = torch.optim.Adagrad
    supports_half_parameters = False
    updates_parts = True
