"""Evaluation of a task that makes the batches itself, as fairseq's ``eval_lm`` calls it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fairseq.config.settings import DataConfig
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.evaluation.scorer import Scores
from fairseq.logging import Progress
from fairseq.models.base import BaseFairseqModel
from fairseq.sequence_generator import SequenceScorer
from fairseq.utils import apply_to_sample, resolve_max_positions


def task_scores(
    task: Any, models: Sequence[BaseFairseqModel], batches: DataConfig, window: int, world: World, show: Progress
) -> Scores:
    """Log-probabilities of the targets of the batches of *task*, one line a row, in their order.

    Raises:
        UserError: several processes are asked for, or there is nothing to score.
    """
    if world.size > 1:
        raise UserError(f"`distributed_world_size` {world.size}: {type(task).__name__} is evaluated by one process")
    for model in models:
        model.eval().to(world.device)
    task.load_dataset(batches.gen_subset)
    loader = task.eval_lm_dataloader(
        task.dataset(batches.gen_subset),
        max_tokens=batches.max_tokens or (None if batches.batch_size else 36000),
        batch_size=batches.batch_size,
        max_positions=resolve_max_positions(*(model.max_positions() for model in models)),
        num_workers=0,
        context_window=window,
    )
    scorer = SequenceScorer(task.target_dictionary)
    rows = [
        hypothesis
        for sample in show(loader, len(loader))
        if "net_input" in sample
        for [hypothesis] in scorer.generate(models, apply_to_sample(lambda tensor: tensor.to(world.device), sample))
    ]
    if not rows:
        raise UserError(f"`gen_subset` {batches.gen_subset}: no block to score")
    tokens, lprobs = (torch.cat([row[name] for row in rows]).cpu().numpy() for name in ("tokens", "positional_scores"))
    lines = np.array([0, *itertools.accumulate(len(row["tokens"]) for row in rows)])
    return Scores(tokens.astype(np.int64), lprobs.astype(np.float32), lines)
