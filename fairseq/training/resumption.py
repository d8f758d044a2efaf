"""Settings of a run that resumes: those that differ from its checkpoint's, and which of the two are in force."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fairseq.config.fields import differ, shown
from fairseq.config.settings import CheckpointConfig, DistributedConfig, ProfileConfig, TrainingSettings
from fairseq.training import stages
from fairseq.training.trainer import Trainer

logger = logging.getLogger(__name__)

LONGEST = 100  # items of a list, characters of a value

# Where a run computes, what it writes, shows and validates, and when it ends. An update is the same but for rounding,
# with two exceptions: another number of processes changes its batches, which is logged with the random states that
# are dropped then, and max_update is the length of some schedules, whose rates the log has.
_APART = {
    *(field.name for cls in (CheckpointConfig, DistributedConfig, ProfileConfig) for field in dataclasses.fields(cls)),
    *("data", "user_dir", "cpu", "compile", "no_apex", "num_workers", "dataset_impl", "oom_retry"),
    *("max_epoch", "max_update", "stop_time_hours", "stages"),
    *("log_format", "log_interval", "no_progress_bar", "tensorboard_logdir", "metrics_file", "log_file"),
    *("wandb_project", "valid_subset", "gen_subset", "max_tokens_valid", "batch_size_valid", "max_valid_steps"),
}


def log_differences(trainer: Trainer, given: TrainingSettings, stored: Mapping[str, Any], source: str) -> None:
    """Log one warning with the settings that differ from those of the checkpoint; nothing where none does.

    Args:
        trainer: restored from the checkpoint; it has the settings in force.
        given: the settings that the user gave.
        stored: those in the checkpoint, which may be of another version or of fairseq.
        source: the checkpoint.
    """
    now, restored = trainer.stored_settings(), trainer.restored
    names = sorted(now.keys() & stored.keys() - _APART - _of_stages(given))
    names = [name for name in names if _is_flat(now[name]) and _is_flat(stored[name])]
    changed = [name for name in names if differ(now[name], stored[name])]
    kept = [name for name in sorted(restored) if name not in changed]
    parts = []
    if changed:
        lines = (f"`{name}` {_short(now[name])} (was {_short(stored[name])})" for name in changed)
        parts.append(f"in force, other than in the checkpoint: {', '.join(lines)}")
    if kept:
        asked = given.flat
        lines = (f"`{name}` {_short(restored[name])} (not {_short(asked[name])})" for name in kept)
        parts.append(f"in force as in the checkpoint: {', '.join(lines)}; {_ways_out(kept)}")
    if parts:
        logger.warning("%s: settings %s", source, "; ".join(parts))


def _of_stages(settings: TrainingSettings) -> set[str]:
    """Names of the settings that follow the stage; none without stages."""
    planned = stages.plan(settings)
    of_each = [stages.settings_at(settings, planned, stage).flat for stage in planned]
    return {name for values in of_each for name in values if values[name] != of_each[0].get(name)}


def _ways_out(kept: Sequence[str]) -> str:
    """The flags that put other values of the settings *kept* in force."""
    ways = ["`reset_lr_scheduler` for another `lr`"] if "lr" in kept else []
    if set(kept) - {"lr"}:
        ways.append("`optimizer_overrides` or `reset_optimizer` for new ones")
    return ", ".join(ways)


def _short(value: Any) -> str:
    return shown(value)[:LONGEST]


def _is_flat(value: Any) -> bool:
    """Return whether *value* is one, or a short list, of those that flags have: checkpoints may hold anything."""
    items = value if isinstance(value, list | tuple) else [value]
    return len(items) <= LONGEST and all(item is None or isinstance(item, bool | int | float | str) for item in items)
