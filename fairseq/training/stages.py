"""Staged training: short inputs first, longer ones later (Press et al. 2021, §4).

A stage is the run that fairseq's second command would be: new blocks, a new model object, everything else from the
state of the stage before, through the code that restores a checkpoint, so that ``--stages`` and the two commands
agree to the last bit. Between stages the state waits on the host, and the former model and optimizer are gone before
the next ones are built.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fairseq.config.fields import flag_name
from fairseq.config.settings import TrainingSettings
from fairseq.errors import UserError
from fairseq.models import ModelConfig


@dataclass(frozen=True)
class Stage:
    """Train on blocks of *tokens_per_sample* up to *max_update* updates; stages are numbered from 1."""

    number: int
    tokens_per_sample: int
    max_update: int


def parse_stages(text: str) -> list[Stage]:
    """The stages that ``--stages`` asks for, e.g. ``128:140100,512:286000``.

    Raises:
        UserError: *text* is malformed, or its updates do not grow.
    """
    stages: list[Stage] = []
    for number, part in enumerate(text.split(","), start=1):
        match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", part)
        if match is None or int(match[1]) == 0:
            raise UserError(f"--stages {text}: {part.strip()!r} is not LENGTH:UPDATES, as in 128:140100,512:286000")
        stage = Stage(number, int(match[1]), int(match[2]))
        if stages and stage.max_update <= stages[-1].max_update or stage.max_update == 0:
            raise UserError(f"--stages {text}: updates count from the start of training, so they must increase")
        stages.append(stage)
    return stages


def plan(settings: TrainingSettings) -> list[Stage]:
    """The stages of a run; a run without ``--stages`` has none.

    Raises:
        UserError: ``--stages`` is malformed or contradicts other flags.
    """
    cfg = settings.optimization
    if not cfg.stages:
        return []
    stages = parse_stages(cfg.stages)
    if cfg.max_update and cfg.max_update != stages[-1].max_update:
        raise UserError(
            f"--max-update {cfg.max_update}: --stages ends at update {stages[-1].max_update}; leave --max-update out"
        )
    longest = max(stage.tokens_per_sample for stage in stages)
    rows = settings.model.row_limit if isinstance(settings.model, ModelConfig) else None
    for name, limit in (("max_tokens", settings.data.max_tokens), ("max_target_positions", rows)):
        if limit is not None and limit < longest:
            raise UserError(f"{flag_name(name)} {limit}: --stages {cfg.stages} needs {longest}; raise it")
    return stages


def stage_at(stages: list[Stage], updates: int) -> Stage:
    """The stage that the update after *updates* belongs to; the last one when all are done."""
    return next((stage for stage in stages if updates < stage.max_update), stages[-1])


def settings_at(settings: TrainingSettings, stages: list[Stage], stage: Stage) -> TrainingSettings:
    """*settings* as the command of *stage* would have them: cache and validation lengths follow the stage's blocks."""
    lengths = {s.tokens_per_sample for s in stages}
    changes = {"tokens_per_sample": stage.tokens_per_sample, "max_update": stages[-1].max_update}
    if isinstance(settings.model, ModelConfig):
        changes |= settings.model.at_block_length(stage.tokens_per_sample, max(lengths))
    limit = settings.data.max_tokens_valid
    if limit is not None:
        changes["max_tokens_valid"] = (
            stage.tokens_per_sample if limit in lengths else max(limit, stage.tokens_per_sample)
        )
    return settings.changed(**changes)
