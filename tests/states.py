"""Small checkpoints for the tests."""

from __future__ import annotations

from pathlib import Path

import runs
import torch

from fairseq.checkpoint import CheckpointManager
from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.training.resume import choose


def a_state(value: float = 1.0, size: int = 1000) -> dict:
    return {
        "args": {"arch": "transformer_lm", "lr": [0.1]},
        "model": {"w": torch.full((size,), value), "b": torch.arange(3)},
        "optimizer_history": [{"num_updates": 7, "optimizer_name": "FairseqNAG"}],
        "last_optimizer_state": {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"params": [0]}]},
        "extra_state": {"epoch": 2, "rng": (3, (1, 2), None), "memory": [torch.zeros(1, 2, 3)]},
    }


def restored(manager: CheckpointManager) -> Path | None:
    """The checkpoint that a run with *manager* starts from, None: it starts afresh."""
    settings = training_settings(runs.arguments(runs.BASELINE))
    source = choose(settings, World(), manager).source
    return Path(source) if source else None
