"""Trainers of small models, their batches and naive gradients."""

from __future__ import annotations

from typing import Any

import runs
import torch
from torch import Tensor

from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.tasks import setup_task
from fairseq.training.state import TrainingState

TINY = f"{runs.BASELINE} --decoder-layers 1 {runs.NO_DROPOUT}"
SGD = "--optimizer sgd --lr 0.5 --clip-norm 0"
XL = """--arch transformer_xl_tiny --cpu --train-subset valid --valid-subset test --max-tokens 64 --tokens-per-sample 16
    --mem-len 16 --optimizer adam --lr 0.01"""


def a_trainer(*flags: Any, base: str = TINY, world: World | None = None) -> TrainingState:
    settings = training_settings(runs.arguments(base, *flags))
    torch.manual_seed(1)
    task = setup_task(settings)
    return TrainingState(settings, task, task.build_model(settings), task.build_criterion(settings), world)


def batches(trainer: TrainingState, count: int = 4) -> list[Any]:
    epoch = trainer.task.iterator("valid", trainer.model, trainer.criterion, training=True)
    return [sample for _, sample in zip(range(count), iter(epoch), strict=False)]


def weights(trainer: TrainingState) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def naive_gradients(trainer: TrainingState, samples: list[Any]) -> tuple[dict[str, Tensor], float, int]:
    """Gradients of the mean loss over target tokens, the summed loss and the number of tokens."""
    trainer.model.train()
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        loss, size, _ = trainer.criterion(trainer.model, sample)
        total, tokens = total + loss, tokens + size
    named = dict(trainer.model.named_parameters())
    found = [gradient.to_dense() for gradient in torch.autograd.grad(total / tokens, list(named.values()))]
    return dict(zip(named, found, strict=True)), float(total.detach()), tokens


def norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in gradients.values()]).norm())
