"""The frame of our optimizers: float32 arithmetic for every parameter, few kernels, no waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class ElementwiseOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose update of all parameters is a handful of multi-tensor operations.

    Parameters of half precision (``--memory-efficient-fp16``) are updated in float32: their state is float32, and
    only the result is rounded. The update is elementwise, so that equal inputs give equal bits.

    Subclasses define :meth:`new_state` and :meth:`update`.
    """

    def new_state(self, group: dict[str, Any], like: Tensor) -> dict[str, Any]:
        """The state of a parameter before its first update; *like* has its shape and device, and the state's dtype."""
        raise NotImplementedError

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        """Update *params* and *states* in place; all of one group, at least as precise as float32."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params)
        return loss

    def _step_group(self, group: dict[str, Any], params: list[nn.Parameter]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p].update(self.new_state(group, _wide(p.detach())))
        wide = [_wide(p.detach()) for p in params]
        grads = [_wide(p.grad) for p in params if p.grad is not None]
        self.update(group, wide, grads, [self.state[p] for p in params])
        rounded = [(p.detach(), w) for p, w in zip(params, wide, strict=True) if p.dtype != w.dtype]
        if rounded:
            torch._foreach_copy_([p for p, _ in rounded], [w for _, w in rounded])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state. Its tensors are copied, on the parameter's device, never below float32."""
        defaults = dict(self.defaults)  # torch adds names of its own
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, value in defaults.items():
                group.setdefault(name, value)
        stored = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(stored, params, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    self.state[p][name] = _wide(p.detach()).new_empty(p.shape).copy_(value)


def _wide(tensor: Tensor) -> Tensor:
    """*tensor* itself in float32 and float64, a float32 copy in half precision."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
