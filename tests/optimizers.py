"""Small optimizers, their parameters and their steps, for tests."""

from __future__ import annotations

from argparse import Namespace

import torch

from fairseq.optim import build_optimizer

SHAPES = [(3, 4), (5,), (2, 1, 3)]
SETTINGS = {
    "nag": {"momentum": 0.9, "weight_decay": 0.1},
    "adam": {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-3, "weight_decay": 0.1},
    "sgd": {"momentum": 0.9, "weight_decay": 0.1},
}
RATES = [0.1, 0.1, 0.3, 0.0, 0.2, 0.05]


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in SHAPES]


def build(name, params, **settings):
    return build_optimizer(Namespace(optimizer=name, lr=[0.1], **{**SETTINGS[name], **settings}), params)


def train(optimizer, rates, seed=1, skip=lambda step, index: False):
    """Steps with random gradients, the same for one seed."""
    generator = torch.Generator().manual_seed(seed)
    for step, rate in enumerate(rates):
        for index, p in enumerate(optimizer.params):
            grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            p.grad = None if skip(step, index) else grad
        optimizer.set_lr(rate)
        optimizer.step()
