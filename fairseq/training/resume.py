"""Resuming: choose and read a checkpoint,
restore the state from it, report settings that differ."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fairseq import checkpoint
from fairseq.checkpoint import CheckpointManager
from fairseq.checkpoint.manager import find_checkpoint
from fairseq.config.fields import format_value, values_differ
from fairseq.config.settings import (
    CheckpointConfig,
    DistributedConfig,
    ProfileConfig,
    TrainingSettings,
    training_settings,
)
from fairseq.distributed import World
from fairseq.distributed.sharding import is_sharded, shard_of
from fairseq.errors import UserError
from fairseq.models.architectures.transformer_lm import resumed
from fairseq.models.loading import check_settings, load_fitting
from fairseq.models.recipes import ENDS, ONE_OF, recipe_of
from fairseq.tasks.dictionary_digest import check_dictionary, dictionary_of
from fairseq.training import stages
from fairseq.training.state import TrainingState

logger = logging.getLogger(__name__)

LONGEST = 100  # items of a list, characters of a value

# Where a run computes, what it writes, shows and validates, and when it ends. An update is the same
# but for rounding, with two exceptions: another number of processes changes its batches, which is
# logged with the random states that are dropped then, and max_update is the length of some
# schedules, whose rates the log has.
IGNORED_ON_RESUME = {
    *(field.name for cls in (CheckpointConfig, DistributedConfig, ProfileConfig) for field in dataclasses.fields(cls)),
    *("data", "user_dir", "cpu", "compile", "no_apex", "num_workers", "dataset_impl", "batch_chunk"),
    *("max_epoch", "max_update", "stop_time_hours", "stages"),
    *("log_format", "log_interval", "no_progress_bar", "tensorboard_logdir", "metrics_file", "log_file"),
    *(
        "wandb_project",
        "valid_subset",
        "gen_subset",
        "max_tokens_valid",
        "batch_size_valid",
        "max_valid_steps",
    ),
}


@dataclasses.dataclass
class Origin:
    """What a stage goes on from: a checkpoint,
    the weights of another run, the stage before, or nothing.

    Attributes:
        state: of a checkpoint, its file or the stage; None once the run has it, so that training
            does not hold it.
        source: the file or the stage, as messages call it.
    """

    kind: Literal["checkpoint", "weights", "stage", "nothing"] = "nothing"
    state: dict[str, Any] | None = None
    source: str = ""

    def updates(self, options: CheckpointConfig) -> int:
        """The updates behind a run that goes on from here."""
        state = self.state or {}
        if self.kind == "weights" or options.reset_optimizer or state.get("last_optimizer_state") is None:
            return 0
        return int((state.get("optimizer_history") or [{}])[-1].get("num_updates", 0))

    def updates_done(self, options: CheckpointConfig) -> int:
        """The updates that nothing is left of: without the last one where its validation is due."""
        updates = self.updates(options)
        return updates - 1 if updates and ((self.state or {}).get("extra_state") or {}).get("due") else updates


def choose(settings: TrainingSettings, world: World, manager: CheckpointManager | None) -> Origin:
    """Choose and read what a run goes on from, the same file
    on every process; *manager* of the first process."""
    model, distributed = settings.checkpoint.finetune_from_model, settings.distributed
    rows = shard_of(distributed, world) if is_sharded(distributed, world) else None
    # Chosen by one process, so that all read the same file.
    chosen = world.share(_newest_good(manager.restore_paths()) if manager is not None else "")
    origin = Origin()
    if chosen:
        origin = Origin("checkpoint", checkpoint.load(chosen, rows), chosen)
    elif model:
        path = str(find_checkpoint(model))
        origin = Origin("weights", checkpoint.load(path, rows, only="model"), path)
    world.barrier()  # processes read at different speeds
    return origin


def _newest_good(paths: Sequence[Path]) -> str:
    """The first of *paths* that can be read and agrees with its checksums, "" if there are none;
    UserError, of the first one, if none is good."""
    first: UserError | None = None
    for path in paths:
        try:
            checkpoint.verify(path)
            checkpoint.load(path, only="model")
        except UserError as error:
            first = first or error
            if len(paths) > 1:
                logger.error("%s", error.args[0])
        else:
            if first is not None:
                logger.warning("%s: restored instead of %s", path, paths[0].name)
            return str(path)
    if first is not None:
        raise first
    return ""


def begin(state: TrainingState, origin: Origin) -> None:
    """Let *state* go on from *origin*, which gives its content away."""
    saved, origin.state = origin.state or {}, None
    match origin.kind:
        case "checkpoint" if state.model.lacks_head(saved["model"]):
            if not state.settings.checkpoint.reset_optimizer:
                advice = "`reset_optimizer` begins a new one with its weights"
                raise UserError(f"{origin.source}: lacks the head of this model; {advice}")
            check_settings(state.model, saved.get("args") or {}, state.settings.model, origin.source)
            _load_weights(state, saved, origin.source)
        case "checkpoint":
            with restoring(origin.source):
                requested = state.settings
                rates = [group["lr"] for group in (saved.get("last_optimizer_state") or {}).get("param_groups") or []]
                restored = restore(state, saved, origin.source)
                log_differences(state, requested, restored, saved.get("args") or {}, origin.source, rates)
        case "weights":
            _load_weights(state, saved, origin.source)
        # Not within restoring(): a state of this process
        # that cannot be restored is a bug, not a bad file.
        case "stage":
            restore(state, saved, origin.source, adopt=True)
    state.world.barrier()  # what is mapped was read only now
    state.plan()


def restore(state: TrainingState, saved: Mapping[str, Any], source: str, *, adopt: bool = False) -> dict[str, object]:
    """Continue from the checkpoint *saved*, called *source*; see
    :meth:`TrainingState.load_state_dict`."""
    try:
        check_dictionary(saved, source, dictionary_of(state.task))
    except UserError as error:
        raise UserError(f"{error.args[0]}, or another `save_dir`: the data have changed") from None
    stored, folder = saved.get("args") or {}, state.settings.checkpoint.save_dir
    try:
        # First, because it names the setting by which parameters have other names or shapes.
        check_settings(state.model, stored, state.settings.model, source, state.settings.extensions)
        restored = state.load_state_dict(saved, source, adopt=adopt)
    except UserError as error:
        if os.path.abspath(os.path.dirname(source)) == os.path.abspath(folder) and (other := _differing(state, stored)):
            # What differs first may be a parameter's shape, or a setting that nobody gave.
            raise UserError(f"`save_dir` {folder}: holds another run, {other}; choose another `save_dir`") from None
        raise error
    logger.info("restored %s: epoch %d, update %d", source, state.batches.epoch, state.num_updates)
    return restored


def _differing(state: TrainingState, stored: Mapping[str, object]) -> str:
    """The architecture of the run that has the settings
    *stored*, or its sizes, where this run has others."""
    settings = state.settings
    if stored.get("arch", settings.chosen.arch) != settings.chosen.arch:
        return f"of {stored['arch']}"
    # Lengths, which are the task's too, may change in a run.
    names = vars(settings.model).keys() - (vars(settings.task).keys() if settings.task is not None else ())
    sizes = {name: value for name, value in vars(settings.model).items() if name in names and type(value) is int}
    others = [name for name, value in sizes.items() if values_differ(value, stored.get(name, value))]
    return "with " + ", ".join(f"`{name}` {_short(stored[name])}" for name in others[:3]) if others else ""


def _load_weights(state: TrainingState, saved: Mapping[str, Any], source: str) -> None:
    check_dictionary(saved, source, dictionary_of(state.task))
    load_fitting(state.model, saved["model"], source)


def at_version(settings: TrainingSettings, stored: Mapping[str, object]) -> TrainingSettings:
    """*settings* with the architecture as the version meant it that *stored* a checkpoint's
    settings."""
    values = resumed(settings.chosen.arch, settings.model, stored)
    if values:
        text = ", ".join(f"{name}={value}" for name, value in values.items())
        logger.info("`arch` %s as in the checkpoint, of a former version: %s", settings.chosen.arch, text)
    return settings.changed(**values)


def as_begun(settings: TrainingSettings, origin: Origin) -> TrainingSettings:
    """*settings* in which the run that *origin* goes on with keeps what it was begun with, where
    the recipe of the architecture says otherwise: another version may have another recipe."""
    stored, options = (origin.state or {}).get("args") or {}, settings.checkpoint
    if origin.kind != "checkpoint" or options.reset_optimizer or options.reset_lr_scheduler:
        return settings
    if stored.get("arch", settings.chosen.arch) != settings.chosen.arch:
        return settings  # which has another recipe, and perhaps another task
    recipe = {name for name, source in settings.origins.items() if source == f"recipe of {settings.chosen.arch}"}
    # Where a recipe has rows a batch, a run may have tokens.
    others = {name for group in ONE_OF if recipe & set(group) for name in group if name not in recipe}
    # And where its schedule ends with the published run, a run of 1.0 did not end it with its own.
    others |= {*ENDS} & recipe_of(settings.chosen.arch).keys()
    names = recipe | {name for name in others if settings.origins.get(name) == "default"}
    kept = {name: stored[name] for name in names - IGNORED_ON_RESUME if name in stored}
    if all(value == settings.flat.get(name) for name, value in kept.items()):
        return settings
    begun = training_settings(argparse.Namespace(**{**settings.flat, **kept}))
    # The schedule may be another one, with settings of its own.
    flat = {**vars(begun.optimizer), **vars(begun.lr_scheduler), **begun.flat}
    return dataclasses.replace(begun, flat=flat, origins={**settings.origins, **dict.fromkeys(kept, origin.source)})


@contextlib.contextmanager
def restoring(path: str) -> Iterator[None]:
    """Turn any failure to restore the checkpoint at *path*
    into a UserError: its content may be of any kind."""
    try:
        yield
    # The parts that restore themselves do not know the file that they come from.
    except UserError as error:
        if str(error).startswith("checkpoint: "):
            raise UserError(f"{path}: {error.args[0].removeprefix('checkpoint: ')}") from None
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"{path}: its training state cannot be restored ({reason}); use another checkpoint, or its weights alone "
            "with `finetune_from_model`"
        ) from error


def log_differences(
    state: TrainingState,
    requested: TrainingSettings,
    restored: Mapping[str, object],
    stored: Mapping[str, object],
    source: str,
    rates: Sequence[float] = (),
) -> None:
    """Log one warning with the settings of *state* that differ from the checkpoint's, and the ones
    *restored* in place of those *requested*; nothing without any.

    Those *stored* in the checkpoint may be of another version or of fairseq. *rates* are those of
    its optimizer: a complete run whose learning rate rises again gets another warning.
    """
    now = state.stored_settings()
    names = sorted(now.keys() & stored.keys() - IGNORED_ON_RESUME - _of_stages(requested))
    # A stored setting may be of any kind and length.
    names = [name for name in names if _is_flat(now[name]) and _is_flat(stored[name])]
    changed = [name for name in names if values_differ(now[name], stored[name])]
    retained = [name for name in sorted(restored) if name not in changed]
    parts = []
    if changed:
        lines = (f"`{name}` {_short(now[name])} (was {_short(stored[name])})" for name in changed)
        parts.append(f"in force, other than in the checkpoint: {', '.join(lines)}")
    if retained:
        lines = (f"`{name}` {_short(restored[name])} (not {_short(requested.flat[name])})" for name in retained)
        ways = ["`reset_lr_scheduler` for another `lr`"] if "lr" in retained else []
        if set(retained) - {"lr"}:
            ways.append("`optimizer_overrides` or `reset_optimizer` for new ones")
        parts.append(f"in force as in the checkpoint: {', '.join(lines)}; {', '.join(ways)}")
    if parts:
        logger.warning("%s: settings %s", source, "; ".join(parts))
    was_complete = bool(rates) and "lr" not in changed and stored.get("max_update") == state.num_updates
    if was_complete and state.get_lr() > 1.5 * rates[0]:
        logger.warning(
            "%s: this run was complete; it goes on, and its learning rate rises again, to %.3g; for a new run, choose "
            "another `save_dir`",
            source, state.get_lr(),
        )  # fmt: skip


def _of_stages(settings: TrainingSettings) -> set[str]:
    """Names of the settings that follow the stage; none without stages."""
    planned = stages.plan(settings)
    of_each = [stages.settings_at(settings, planned, stage).flat for stage in planned]
    return {name for values in of_each for name in values if values[name] != of_each[0].get(name)}


def _short(value: object) -> str:
    return format_value(value)[:LONGEST]


def _is_flat(value: object) -> bool:
    """Return whether *value* is one, or a short list,
    of those that flags have: checkpoints may hold anything."""
    items = value if isinstance(value, list | tuple) else [value]
    return len(items) <= LONGEST and all(item is None or isinstance(item, bool | int | float | str) for item in items)
