"""Adam with decoupled weight decay, in fairseq's form."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq.config.fields import flag, typed
from fairseq.config.registry import register_optimizer
from fairseq.config.settings import RateConfig
from fairseq.config.shared import KernelConfig
from fairseq.errors import SettingError
from fairseq.optim.elementwise import CountingOptimizer, Factor, Group, State, States, Tensors, buckets, divisor
from fairseq.optim.fairseq_optimizer import FairseqOptimizer, move_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdamConfig(RateConfig, KernelConfig):
    """Adam."""

    adam_betas: list[float] = flag([0.9, 0.999], "decay rates of the two moments", low=0, below=1, metavar="B1,B2")
    adam_eps: float = flag(1e-8, "term added to the root of the second moment", low=0)
    adam_torch_eps: bool = flag(False, "add `adam_eps` after bias correction, as torch.optim.Adam does, not before")
    weight_decay: float = flag(0.0, "weight decay, decoupled from the gradient", low=0)

    def check(self) -> None:
        if len(self.adam_betas) != 2:
            text = ",".join(map(str, self.adam_betas))
            raise SettingError(f"`adam_betas` {text}: expected two numbers, e.g. 0.9,0.98")


@register_optimizer("adam", dataclass=AdamConfig)
class FairseqAdam(FairseqOptimizer):
    """``--optimizer adam``: :class:`Adam`, or NVIDIA apex's FusedAdam where it is importable, unless ``--no-apex``.

    apex adds ``--adam-eps`` after the second moment's bias correction, :class:`Adam` (as fairseq without apex) before;
    with the usual values the difference shows in the first updates only. Each restores the other's state.
    """

    updates_parts = True
    group_settings = {
        "betas": "adam_betas",
        "eps": "adam_eps",
        "torch_eps": "adam_torch_eps",
        "weight_decay": "weight_decay",
    }

    def __init__(self, args: AdamConfig, params: Iterable[Any]) -> None:
        super().__init__(args)
        self.config = typed(AdamConfig, args)
        params = list(params)
        fused = None if self.config.no_apex else _apex_adam(params)
        if fused is not None:
            logger.info("`optimizer` adam: using NVIDIA apex's FusedAdam; `no_apex` turns it off")
        self._keeps_step_in_group = fused is not None
        settings = self.optimizer_config
        if fused is not None:
            # apex always adds it after bias correction.
            settings.pop("torch_eps", None)
        self._optimizer = (fused or Adam)(params, **settings)

    def load_state_dict(
        self, state: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, adopt: bool = False
    ) -> None:
        super().load_state_dict(move_step(state, to_group=self._keeps_step_in_group), overrides, adopt=adopt)


class Adam(CountingOptimizer):
    """Adam with decoupled weight decay: λ shrinks the parameter by 1 − η·λ before the update.

    With moments m and v after t updates: p ← p − η·√(1 − β₂ᵗ)/(1 − β₁ᵗ) · m / (√v + ε). ε is added to the root of
    the second moment *before* bias correction: PyTorch's own Adam adds it after that, and so does this one with
    *torch_eps*.

    Source: Kingma & Ba 2015, "Adam", the remark that ends section 2; Loshchilov & Hutter 2019, "Decoupled weight
    decay regularization", algorithm 2.
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

    def new_state(self, group: Group, zeros: Callable[[], Tensor]) -> State:
        return {"step": 0, "exp_avg": zeros(), "exp_avg_sq": zeros()}

    def scaled_update(self, group: Group, params: Tensors, grads: Tensors, states: States, factor: Factor) -> None:
        """One call of PyTorch's kernel, told the ε that makes its formula ours: ε / √(1 − β₂ᵗ), or ε."""
        beta1, beta2 = group["betas"]
        device = params[0].device
        scale = None if factor is None else divisor(factor, 1.0, device)
        for step, indices in buckets(params, states, math.inf):
            unbiased = 1.0 if group.get("torch_eps") else math.sqrt(1 - beta2**step)
            # The kernel reads the step on the device, where it is made: a copy from the host would synchronise.
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


def _apex_adam(params: list[Any]) -> Any:
    """Return apex's FusedAdam if it can be imported and the parameters are on a GPU."""
    first = params[0]["params"][0] if params and isinstance(params[0], dict) else next(iter(params), None)
    # apex has CUDA kernels only.
    if first is None or not first.is_cuda:
        return None
    try:
        from apex.optimizers import FusedAdam
    except ImportError:
        return None
    return FusedAdam
