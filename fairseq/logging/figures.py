"""What the log reports, summed on the device, and fetched only when it is printed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fairseq.distributed import World


class Sums:
    """Running sums of a training or validation log.

    Losses are in nats where they are added, in bits where they are reported, as fairseq does.
    """

    NAMES = ("loss", "nll_loss", "ntokens", "nsentences", "sample_size")

    def __init__(self, world: World) -> None:
        self.world = world
        self.reset()

    def reset(self) -> None:
        """Start again from nothing."""
        self.totals = torch.zeros(len(self.NAMES), dtype=torch.float64, device=self.world.device)
        self.figures: dict[str, Tensor] = {}
        self.updates = 0

    @classmethod
    def vector(cls, log: Mapping[str, Any], sample_size: int, device: torch.device) -> Tensor:
        """A criterion's figures as one tensor, in the order of NAMES, without waiting for the device."""
        host = {"ntokens": 0, "nsentences": 0, "loss": 0.0, **log, "sample_size": sample_size}
        host.setdefault("nll_loss", host["loss"])
        vector = torch.tensor(
            [0.0 if isinstance(host[name], Tensor) else float(host[name]) for name in cls.NAMES], dtype=torch.float64
        ).to(device, non_blocking=True)
        for place, name in enumerate(cls.NAMES):
            if isinstance(host[name], Tensor):
                vector[place] = host[name].detach()
        return vector

    def add(self, totals: Tensor, **figures: Tensor) -> None:
        """Add one update's *totals* (see :meth:`vector`), and *figures* that are averaged over updates."""
        self.totals += totals
        self.updates += 1
        for name, value in figures.items():
            previous = self.figures.get(name)
            value = value.detach().double()
            self.figures[name] = value if previous is None else previous + value

    def report(self) -> dict[str, float]:
        """loss and nll_loss in bits a token, ppl, wpb, bsz, and the mean of each figure."""
        total = dict(zip(self.NAMES, self.totals.tolist(), strict=True))
        updates = max(self.updates, 1)
        loss = total["loss"] / max(total["sample_size"], 1) / math.log(2)
        nll = total["nll_loss"] / max(total["ntokens"], 1) / math.log(2)
        result = {
            "loss": loss,
            "nll_loss": nll,
            "ppl": safe_power(nll),
            "wpb": total["ntokens"] / updates,
            "bsz": total["nsentences"] / updates,
        }
        result.update((name, float(value) / updates) for name, value in self.figures.items())
        return result

    @property
    def tokens(self) -> float:
        """Target tokens so far."""
        return float(self.totals[self.NAMES.index("ntokens")])

    def state_dict(self) -> dict[str, Any]:
        """All of it, as tensors on the CPU."""
        return {
            "totals": self.totals.cpu(),
            "figures": {name: value.cpu() for name, value in self.figures.items()},
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        self.totals = state["totals"].to(self.world.device).clone()
        self.figures = {name: value.to(self.world.device) for name, value in state["figures"].items()}
        self.updates = state["updates"]


def safe_power(bits: float) -> float:
    """2 to the power of *bits*, infinite where it is too large for a float."""
    return 2.0**bits if bits < 1000 else math.inf
