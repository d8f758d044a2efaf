"""Staged training: short inputs first, longer ones later (Press et al. 2021, §4).

A stage is the run that fairseq's second command would be: new blocks, a new model object,
everything else from the state of the stage before, through the code that restores a checkpoint, so
that ``--stages`` and the two commands agree to the last bit. Between stages the state waits on the
host, and the former model and optimizer are gone before the next ones are built.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from fairseq.config.registry import LR_SCHEDULERS
from fairseq.config.settings import TrainingSettings
from fairseq.config.shared import BlockModelConfig, ModelConfig
from fairseq.errors import UserError

SYNTAX = (
    "LENGTH[+MEMORY]:UPDATES[:TOKENS[:LR]], as in 128:140100,512:286000 or 128:140100:9216:0.5,512:286000::0.25 "
    "or 64+0:560,64+64:800"
)
# int reads no text of any length.
_STAGE = re.compile(r"(\d{1,9})(?:\+(\d{1,9}))?:(\d{1,9})(?::(\d{1,9}|(?=:))(?::(\S+))?)?")


@dataclass(frozen=True)
class Stage:
    """Train on blocks of *tokens_per_sample* up
    to *max_update* updates; stages are numbered from 1.

    Without *max_tokens* in a batch, or *lr*, the run's hold; without *memory*, the model's, where a
    cache has the length of a block.
    """

    number: int
    tokens_per_sample: int
    max_update: int
    max_tokens: int | None = None
    lr: float | None = None
    memory: int | None = None


def parse_stages(text: str) -> list[Stage]:
    """The stages that ``--stages`` asks for, e.g. ``128:140100,512:286000``; see :data:`SYNTAX`.

    Raises:
        UserError: *text* is malformed, or its updates do not grow.
    """
    stages: list[Stage] = []
    for number, part in enumerate(text.split(","), start=1):
        stage = _parse(number, part)
        if stage is None:
            raise UserError(f"`stages` {text}: {part.strip()!r} is not {SYNTAX}")
        if stages and stage.max_update <= stages[-1].max_update or stage.max_update == 0:
            raise UserError(f"`stages` {text}: updates count from the start of training, so they must increase")
        if stage.max_tokens is not None and stage.max_tokens < stage.tokens_per_sample:
            raise UserError(
                f"`stages` {text}: batches of {stage.max_tokens} tokens have no room for a block of "
                f"{stage.tokens_per_sample}; raise stage {number}'s TOKENS"
            )
        stages.append(stage)
    return stages


def _parse(number: int, text: str) -> Stage | None:
    """The stage that *text* describes; None if it is malformed."""
    match = _STAGE.fullmatch(re.sub(r"\s*([:+])\s*", r"\1", text.strip()))
    if match is None or int(match[1]) == 0:
        return None
    try:
        rate = float(match[5]) if match[5] else None
    except ValueError:
        return None
    if rate is not None and not 0 < rate < math.inf:
        return None
    memory, tokens = (int(match[group]) if match[group] else None for group in (2, 4))
    return Stage(number, int(match[1]), int(match[3]), tokens, rate, memory)


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
            f"`max_update` {cfg.max_update}: `stages` ends at update {stages[-1].max_update}; leave `max_update` out"
        )
    # Learned positions are a table: a longer block would read beyond it, hours after the start.
    rows = settings.model.max_target_positions if isinstance(settings.model, BlockModelConfig) else None
    limited = [stage for stage in stages if stage.max_tokens is None]
    for name, limit, of in (("max_tokens", settings.data.max_tokens, limited), ("max_target_positions", rows, stages)):
        longest = max((stage.tokens_per_sample for stage in of), default=0)
        if limit is not None and limit < longest:
            raise UserError(f"`{name}` {limit}: `stages` {cfg.stages} needs {longest}; raise it")
    if any(stage.lr is not None for stage in stages):
        _check_rates(settings)
    # Values that contradict a stage's are errors before the first stage, not after hours.
    for stage in stages:
        settings_at(settings, stages, stage)
    return stages


def _check_rates(settings: TrainingSettings) -> None:
    """Raise UserError if a stage's rate cannot replace ``--lr``: the schedule has its own, or it is
    not the peak."""
    name = settings.chosen.lr_scheduler
    if "lr" in LR_SCHEDULERS[name].restored_settings:
        raise UserError(f"`stages`: `lr_scheduler` {name} goes on from the rate before; leave the stages' LR out")
    if settings.flat.get("max_lr") is not None:
        raise UserError("`stages`: `lr` is the minimum with `max_lr`; leave the stages' LR or `max_lr` out")


def _memory(settings: TrainingSettings, tokens: int, longest: int) -> dict[str, object]:
    """Settings with which the model remembers *tokens*, at most the *longest* of a stage; without
    memory its blocks are shuffled, not passages."""
    for name in ("mixture", "document_mask"):
        if longest and settings.flat.get(name):
            raise UserError(f"`stages`: a memory cannot be used with `{name}`; leave +MEMORY out")
    found = settings.model.with_memory(tokens, longest) if isinstance(settings.model, ModelConfig) else None
    if found is None:
        raise UserError(
            f"`stages`: `arch` {settings.chosen.arch} has no memory of +{longest} tokens; leave +MEMORY out, or use a "
            "model with `rotary_fraction`, `position_infused_attention` or `mem_len`"
        )
    return found if tokens or settings.flat.get("streams") else {**found, "passage_tokens": None}


def stage_at(stages: list[Stage], updates: int) -> Stage:
    """The stage that the update after *updates* belongs to; the last one when all are done."""
    return next((stage for stage in stages if updates < stage.max_update), stages[-1])


def settings_at(settings: TrainingSettings, stages: list[Stage], stage: Stage) -> TrainingSettings:
    """*settings* as the command of *stage* would have them:
    cache and validation lengths follow the stage's blocks.

    Its number of tokens is the batch's only limit, so that ``--batch-size``, given or the default,
    does not lower it.
    """
    lengths = {s.tokens_per_sample for s in stages}
    changes: dict[str, object] = {"tokens_per_sample": stage.tokens_per_sample, "max_update": stages[-1].max_update}
    if stage.max_tokens is not None:
        changes |= {"max_tokens": stage.max_tokens, "batch_size": None}
    if stage.lr is not None:
        changes["lr"] = [stage.lr]
    # Other models have no cache that follows the length of blocks.
    if isinstance(settings.model, ModelConfig):
        changes |= settings.model.at_block_length(stage.tokens_per_sample, max(lengths))
    if stage.memory is not None:
        changes |= _memory(settings, stage.memory, max(s.memory or 0 for s in stages))
    limit = settings.data.max_tokens_valid
    if limit is not None:
        changes["max_tokens_valid"] = (
            stage.tokens_per_sample if limit in lengths else max(limit, stage.tokens_per_sample)
        )
    return settings.changed(**changes)
