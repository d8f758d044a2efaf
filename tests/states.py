"""Small checkpoints for the tests."""

from __future__ import annotations

import torch


def a_state(value: float = 1.0, size: int = 1000) -> dict:
    return {
        "args": {"arch": "transformer_lm", "lr": [0.1]},
        "model": {"w": torch.full((size,), value), "b": torch.arange(3)},
        "optimizer_history": [{"num_updates": 7, "optimizer_name": "FairseqNAG"}],
        "last_optimizer_state": {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"params": [0]}]},
        "extra_state": {"epoch": 2, "rng": (3, (1, 2), None), "memory": [torch.zeros(1, 2, 3)]},
    }
