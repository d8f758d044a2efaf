"""``fairseq.models.ema``: the moving average that a script or plug-in makes of a model's weights by
itself."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn


class EMA:
    """A copy of *model* whose weights are w̄ ← d · w̄ + (1 − d) · w at every :meth:`step`.

    Attributes:
        model: the copy.
        fp32_params: the averages in float32 by name, with ``config.ema_fp32``; else empty.

    Args:
        config: with ``ema_decay``, ``ema_start_update`` and ``ema_fp32``.
        device: of the copy; by default the one of *model*.
        skip_keys: names that are copied, not averaged.
    """

    def __init__(
        self, model: nn.Module, config: Any, device: Any = None, skip_keys: Collection[str] | None = None
    ) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.config, self.decay = config, float(config.ema_decay)
        self.skip_keys = set(skip_keys or ())
        self.fp32_params: dict[str, Tensor] = {}
        if device is not None:
            self.model.to(device)
        if config.ema_fp32:
            self.build_fp32_params()

    def build_fp32_params(self, state_dict: dict[str, Tensor] | None = None) -> None:
        """Make :attr:`fp32_params` of *state_dict*, by default of the copy's weights."""
        if not self.config.ema_fp32:
            raise RuntimeError("build_fp32_params: ema_fp32 is off")
        state = self.model.state_dict() if state_dict is None else state_dict
        self.fp32_params = {
            name: value.float().clone() for name, value in state.items() if self._is_averaged(name, value)
        }

    def _is_averaged(self, name: str, value: Tensor) -> bool:
        return value.is_floating_point() and name not in self.skip_keys and name.rpartition(".")[2] != "version"

    def restore(self, state_dict: dict[str, Tensor], build_fp32_params: bool = False) -> None:
        """Load the copy's weights; those that *state_dict* lacks stay as they are."""
        self.model.load_state_dict(state_dict, strict=False)
        if build_fp32_params:
            self.build_fp32_params(state_dict)

    def get_decay(self) -> float:
        return self.decay

    def _set_decay(self, decay: float) -> None:
        self.decay = decay

    def get_model(self) -> nn.Module:
        return self.model

    def step(self, new_model: nn.Module, updates: int | None = None) -> None:
        """Take the weights of *new_model* in, all of them before update ``ema_start_update``."""
        if updates is not None:
            self._set_decay(0.0 if updates < self.config.ema_start_update else self.config.ema_decay)
        self._step_internal(new_model, updates)

    @torch.no_grad()
    def _step_internal(self, new_model: nn.Module, updates: int | None = None) -> None:
        averages = self.model.state_dict()  # which shares memory with the copy
        for name, value in new_model.state_dict().items():
            mine = averages[name]
            if not self._is_averaged(name, value):
                mine.copy_(value)
                continue
            exact = self.fp32_params.get(name, mine)
            exact.mul_(self.decay).add_(value.to(exact), alpha=1 - self.decay)
            if exact is not mine:
                mine.copy_(exact)

    def reverse(self, model: nn.Module) -> nn.Module:
        """Load the averages into *model* and return it."""
        model.load_state_dict(self.model.state_dict())
        return model
