"""Adagrad, as PyTorch has it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fairseq.config.fields import flag, typed
from fairseq.config.registry import register_optimizer
from fairseq.config.settings import RateConfig
from fairseq.optim.fairseq_optimizer import FairseqOptimizer


@dataclass(frozen=True)
class AdagradConfig(RateConfig):
    """Adagrad."""

    weight_decay: float = flag(0.0, "weight decay, added to the gradient", low=0)


@register_optimizer("adagrad", dataclass=AdagradConfig)
class Adagrad(FairseqOptimizer):
    """``--optimizer adagrad``: :class:`torch.optim.Adagrad` (Duchi et al. 2011)."""

    supports_half_parameters = False
    updates_parts = True

    def __init__(self, args: AdagradConfig, params: Iterable[Any]) -> None:
        super().__init__(args)
        self.config = typed(AdagradConfig, args)
        self._optimizer = torch.optim.Adagrad(params, **self.optimizer_config)
