"""Adam with decoupled weight decay, in fairseq's form,
and LAMB, in the form of NVIDIA apex's FusedLAMB."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.config.fields import typed
from fairseq.dataclass import settings_of
from fairseq.modules import devices
from fairseq.optim.elementwise import (
    ROW_STEPS,
    CountingOptimizer,
    Factor,
    Group,
    State,
    States,
    Tensors,
    buckets,
    divisor,
    is_half,
)
from fairseq.optim.fairseq_optimizer import FairseqOptimizer, move_step
from fairseq.optim.settings import AdamConfig, LAMBConfig

logger = logging.getLogger(__name__)


class Adam(CountingOptimizer):
    """Adam with decoupled weight decay: λ shrinks the parameter by 1 − η·λ before the update.

    With moments m and v after t updates: p ← p − η·√(1 − β₂ᵗ)/(1 − β₁ᵗ) · m / (√v + ε). ε is added
    to the root of the second moment *before* bias correction: PyTorch's own Adam adds it after
    that, and so does this one with *torch_eps*.

    Source: Kingma & Ba 2015, "Adam", the remark that ends section 2; Loshchilov & Hutter 2019,
    "Decoupled weight decay regularization", algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        torch_eps: bool = False,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "torch_eps": torch_eps}
        super().__init__(params, settings)

    def update(self, group: Group, params: Tensors, grads: Tensors, states: States, factor: Factor) -> None:
        """One call of PyTorch's kernel, told the ε
        that makes its formula ours: ε / √(1 − β₂ᵗ), or ε."""
        beta1, beta2 = group["betas"]
        device = params[0].device
        scale = None if factor is None else divisor(factor, 1.0, device)
        # Not all parameters have had their first update together.
        for step, indices in buckets(params, (state["step"] for state in states), math.inf):
            unbiased = 1.0 if group.get("torch_eps") else math.sqrt(1 - beta2**step)
            # The kernel reads the step on the device,
            # where it is made: a copy from the host would synchronise.
            # The public `adamw` of torch.optim adds to a step of each parameter before.
            torch._fused_adamw_(
                [params[i] for i in indices],
                [grads[i] for i in indices],
                [states[i]["exp_avg"] for i in indices],
                [states[i]["exp_avg_sq"] for i in indices],
                [],
                [torch.full((), float(step), device=device)] * len(indices),
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"] / unbiased,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
            )

    def update_rows(self, group: Group, param: nn.Parameter, state: State, factor: Factor) -> None:
        """With v the mean of a row's squared gradient, and v̄ its running mean over the row's
        own updates: row ← row − η·g / (√v̄ + ε).

        There is no momentum and no decay, both of which would move rows without a gradient. The
        running mean is a plain one until its share of an update would fall below 1 − β₂: rare rows
        need no correction of bias.
        """
        assert param.grad is not None
        gradient = param.grad.coalesce()
        if not state:
            # float32 counts updates exactly up to 16 million.
            zeros = torch.zeros(len(param), dtype=torch.float32, device=param.device)
            state.update({ROW_STEPS: zeros, "row_avg_sq": zeros.clone()})
        rows, values = gradient.indices()[0], gradient.values()
        scale = 1.0 if factor is None else factor
        square = (torch.linalg.vector_norm(values, dim=1) * scale).square() / values.size(1)
        steps = state[ROW_STEPS][rows] + 1
        share = steps.reciprocal().clamp(min=1 - group["betas"][1])
        mean = torch.lerp(state["row_avg_sq"][rows], square, share)
        state[ROW_STEPS][rows], state["row_avg_sq"][rows] = steps, mean
        change = values * (group["lr"] * scale / (mean.sqrt() + group["eps"]))[:, None]
        param.index_add_(0, rows, change, alpha=-1)  # each row once


class FairseqAdam(FairseqOptimizer):
    """``--optimizer adam``: :class:`Adam`, or NVIDIA apex's
    FusedAdam where it is importable, unless ``--no-apex``.

    apex adds ``--adam-eps`` after the second moment's bias correction, :class:`Adam` (as fairseq
    without apex) before; with the usual values the difference shows in the first updates only. Each
    restores the other's state.
    """

    config_class = AdamConfig
    optimizer_class = Adam
    updates_parts = True
    group_settings = {
        "betas": "adam_betas",
        "eps": "adam_eps",
        "torch_eps": "adam_torch_eps",
        "weight_decay": "weight_decay",
    }

    def __init__(self, args: AdamConfig, params: Iterable[object]) -> None:
        params = list(params)
        fused = None if typed(AdamConfig, args).no_apex else _apex_adam(params)
        self._keeps_step_in_group = fused is not None
        if fused is not None:
            logger.info("`optimizer` adam: using NVIDIA apex's FusedAdam; `no_apex` turns it off")
            self.optimizer_class = fused
            # apex always adds ε after bias correction.
            self.group_settings = {key: name for key, name in self.group_settings.items() if key != "torch_eps"}
        super().__init__(args, params)

    def load_state_dict(
        self, state: Mapping[str, object], overrides: Mapping[str, object] | None = None, *, adopt: bool = False
    ) -> None:
        super().load_state_dict(move_step(state, to_group=self._keeps_step_in_group), overrides, adopt=adopt)


def _apex_adam(params: list[Any]) -> Any:
    """Return apex's FusedAdam if it can be imported and the parameters are on a GPU."""
    first = params[0]["params"][0] if params and isinstance(params[0], dict) else next(iter(params), None)
    if first is None or not devices.is_cuda(first.device):
        return None
    try:
        from apex.optimizers import FusedAdam
    except ImportError:
        return None
    return FusedAdam


class LAMB(CountingOptimizer):
    """Adam whose update of a parameter is scaled to the parameter's norm.

    With unbiased moments m and v, u = m / (√v + ε) + λ·p; p ← p − η·(‖p‖ / ‖u‖)·u. The ratio is 1
    where a norm is 0, and without weight decay. All gradients together are scaled to a norm of at
    most *max_grad_norm* before.

    Source: You et al. 2020, "Large batch optimization for deep learning", algorithm 2.
    """

    # The ratio of norms belongs to the whole parameter.
    sliceable = False

    def __init__(self, params: Iterable[Any], max_grad_norm: float = 1.0, **settings: Any) -> None:
        super().__init__(params, {**settings, "max_grad_norm": max_grad_norm})

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None, *, factor: Factor = None) -> Any:
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
            # A new parameter of zeros would never move,
            # and an update of zeros would divide by zero.
            ratios = torch.where((weights > 0) & (lengths > 0), weights / lengths, torch.ones_like(weights))
            torch._foreach_mul_(updates, list(ratios.unbind()))
        torch._foreach_sub_(params, updates, alpha=group["lr"])


class FairseqLAMB(FairseqOptimizer):
    """``--optimizer lamb``: see :class:`LAMB`.
    It also restores states of apex's FusedLAMB, which fairseq uses."""

    config_class = LAMBConfig
    optimizer_class = LAMB
    group_settings = {"betas": "lamb_betas", "eps": "lamb_eps", "weight_decay": "weight_decay"}

    def load_state_dict(
        self, state: Mapping[str, object], overrides: Mapping[str, object] | None = None, *, adopt: bool = False
    ) -> None:
        super().load_state_dict(move_step(state, to_group=False), overrides, adopt=adopt)


__getattr__ = settings_of(__name__, {}, FairseqAdamConfig=AdamConfig)  # fairseq's names
