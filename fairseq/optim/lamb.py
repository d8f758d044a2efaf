"""LAMB, in the form of NVIDIA apex's FusedLAMB."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq.config.fields import flag, typed
from fairseq.config.registry import register_optimizer
from fairseq.config.settings import RateConfig
from fairseq.errors import SettingError
from fairseq.optim.elementwise import CountingOptimizer, Factor, Group, State, States, Tensors, is_half
from fairseq.optim.fairseq_optimizer import FairseqOptimizer, move_step


@dataclass(frozen=True)
class LAMBConfig(RateConfig):
    """LAMB."""

    lamb_betas: list[float] = flag([0.9, 0.999], "decay rates of the two moments", low=0, below=1, metavar="B1,B2")
    lamb_eps: float = flag(1e-8, "term added to the root of the second moment", low=0)
    weight_decay: float = flag(0.0, "weight decay, part of the update", low=0)

    def check(self) -> None:
        if len(self.lamb_betas) != 2:
            text = ",".join(map(str, self.lamb_betas))
            raise SettingError(f"`lamb_betas` {text}: expected two numbers, e.g. 0.9,0.999")


@register_optimizer("lamb", dataclass=LAMBConfig)
class FairseqLAMB(FairseqOptimizer):
    """``--optimizer lamb``: see :class:`LAMB`. It also restores states of apex's FusedLAMB, which fairseq uses."""

    group_settings = {"betas": "lamb_betas", "eps": "lamb_eps", "weight_decay": "weight_decay"}

    def __init__(self, args: LAMBConfig, params: Iterable[Any]) -> None:
        super().__init__(args)
        self.config = typed(LAMBConfig, args)
        self._optimizer = LAMB(params, **self.optimizer_config)

    def load_state_dict(
        self, state: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, adopt: bool = False
    ) -> None:
        super().load_state_dict(move_step(state, to_group=False), overrides, adopt=adopt)


class LAMB(CountingOptimizer):
    """Adam whose update of a parameter is scaled to the parameter's norm.

    With unbiased moments m and v, u = m / (√v + ε) + λ·p; p ← p − η·(‖p‖ / ‖u‖)·u. The ratio is 1 where a norm is 0,
    and without weight decay. All gradients together are scaled to a norm of at most *max_grad_norm* before.

    Source: You et al. 2020, "Large batch optimization for deep learning", algorithm 2.
    """

    # The ratio of norms belongs to the whole parameter.
    sliceable = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        super().__init__(params, settings)

    def new_state(self, group: Group, zeros: Callable[[], Tensor]) -> State:
        return {"step": 0, "exp_avg": zeros(), "exp_avg_sq": zeros()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, factor: Factor = None) -> Any:
        if closure is not None:
            raise TypeError("LAMB takes no closure: it needs all gradients before the first update")
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if grads:
            # The norm of all gradients, as FusedLAMB clips before any update.
            norms = torch._foreach_norm(grads, 2, torch.float32 if is_half(grads[0]) else None)
            scale: Tensor | float = 1.0 if factor is None else factor
            norm = torch.linalg.vector_norm(torch.stack(norms)) * scale
            factor = scale / (norm / self.param_groups[0]["max_grad_norm"]).clamp(min=1.0)
        return super().step(factor=factor)

    def update_at(self, step: int, group: Group, params: Tensors, grads: Tensors, states: States) -> None:
        beta1, beta2 = group["betas"]
        first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, grads, alpha=1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        roots = torch._foreach_div(second, 1 - beta2**step)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(first, 1 - beta1**step)
        torch._foreach_div_(updates, roots)
        if group["weight_decay"] != 0:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
            weights, lengths = (torch.stack(torch._foreach_norm(tensors, 2)) for tensors in (params, updates))
            # A new parameter of zeros would never move, and an update of zeros would divide by zero.
            ratios = torch.where((weights > 0) & (lengths > 0), weights / lengths, torch.ones_like(weights))
            torch._foreach_mul_(updates, list(ratios.unbind()))
        torch._foreach_sub_(params, updates, alpha=group["lr"])
