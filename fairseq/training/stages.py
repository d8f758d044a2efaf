"""Staged training: short inputs first, longer ones later (Press et al. 2021, §4)."""

from __future__ import annotations

import argparse
import copy
import re
from dataclasses import dataclass

from fairseq.config import flag_name
from fairseq.errors import UserError


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
            raise UserError(f"--stages {text}: updates count from the start of training, so they must grow")
        stages.append(stage)
    return stages


def plan(args: argparse.Namespace) -> list[Stage]:
    """The stages of a run; a run without ``--stages`` has none.

    Raises:
        UserError: ``--stages`` is malformed or contradicts other flags.
    """
    if not args.stages:
        return []
    stages = parse_stages(args.stages)
    if args.max_update and args.max_update != stages[-1].max_update:
        raise UserError(
            f"--max-update {args.max_update}: --stages ends at update {stages[-1].max_update}; leave --max-update out"
        )
    longest = max(stage.tokens_per_sample for stage in stages)
    for name in ("max_tokens", "max_target_positions"):
        limit = getattr(args, name, None)
        if limit is not None and limit < longest:
            raise UserError(f"{flag_name(name)} {limit}: --stages {args.stages} needs {longest}; raise it")
    return stages


def stage_at(stages: list[Stage], updates: int) -> Stage:
    """The stage that the update after *updates* belongs to; the last one when all are done."""
    return next((stage for stage in stages if updates < stage.max_update), stages[-1])


def arguments(args: argparse.Namespace, stages: list[Stage], stage: Stage) -> argparse.Namespace:
    """*args* as the command of *stage* would have them: cache and validation lengths follow the stage's blocks."""
    staged = copy.copy(args)
    staged.tokens_per_sample = stage.tokens_per_sample
    staged.max_update = stages[-1].max_update
    if getattr(args, "tokens_from_prev", 0) > 0:
        staged.tokens_from_prev = stage.tokens_per_sample
    longest = max(s.tokens_per_sample for s in stages)
    if getattr(args, "decoder_learned_pos", False):
        staged.max_target_positions = longest
    if hasattr(args, "max_relative_length") and args.max_relative_length is None:
        staged.max_relative_length = longest + args.mem_len
    if args.max_tokens_valid is not None:
        lengths = {s.tokens_per_sample for s in stages}
        follows = args.max_tokens_valid in lengths
        staged.max_tokens_valid = (
            stage.tokens_per_sample if follows else max(args.max_tokens_valid, stage.tokens_per_sample)
        )
    return staged
