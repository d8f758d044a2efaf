"""Training: stages, their epochs, the updates of an epoch,
and what accompanies them as callbacks."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields

from fairseq.checkpoint import CheckpointManager
from fairseq.checkpoint.store import copied
from fairseq.config.registry import TASKS
from fairseq.config.settings import CheckpointConfig, TrainingSettings
from fairseq.criterions.fairseq_criterion import Sample
from fairseq.data.folders import check_validation
from fairseq.data.iterator import EpochIterator
from fairseq.distributed import Interruption, Job, World
from fairseq.logging.recorders import check_recorders, log_file
from fairseq.models.recipes import summary
from fairseq.system.terminal import closed_pipes, log_to_stderr
from fairseq.training import resume, stages
from fairseq.training.agreement import check_agreement
from fairseq.training.build import build_state
from fairseq.training.callbacks import Callback, callbacks_of
from fairseq.training.effective import check_outputs
from fairseq.training.state import TrainingState
from fairseq.training.stop import describe_interruption, log_end
from fairseq.training.update import update

logger = logging.getLogger(__name__)

RESETS_OFF = {field.name: False for field in fields(CheckpointConfig) if field.name.startswith("reset_")}


def training_job(settings: TrainingSettings) -> Job[TrainingSettings, None]:
    """Return the job of a training run, which :func:`fairseq.distributed.run` runs on as many
    processes as it needs."""
    if not settings.checkpoint.disable_validation and TASKS[settings.chosen.task].checks_splits:
        data = settings.data
        leaves_out = data.ignore_unused_valid_subsets or bool(data.combine_valid_subsets)
        check_validation(settings.data_path, data.valid_subset, leaves_out)
    return Job(run_process, settings, settings.common, settings.distributed)


def run_process(settings: TrainingSettings, world: World) -> None:
    """Train as one process of *world*, with a log on stderr; if a signal stops the run, exit with
    128 + its number."""
    with Interruption() as interruption, closed_pipes(interruption.record_closed_pipe):
        log_to_stderr(logging.INFO if world.is_first else logging.ERROR)
        with log_file(settings.common.log_file if world.is_first else None):
            number = train(settings, world, interruption)
    if number:
        sys.exit(128 + number)


def train(
    settings: TrainingSettings,
    world: World,
    interruption: Interruption | None = None,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Train what *settings* describe, on one process of *world*:
    restore, then run every stage that is left; callbacks validate, log and save.

    Args:
        interruption: the signal that asks this process to stop. Ranks vote on it in each update and
            stop after the next one that is applied, in a validation, or after a save.
        callbacks: further callbacks, the same objects in every stage.

    Returns:
        The number of the signal that stopped the run,
        the same on every rank; 0 if it ended by its settings.

    Raises:
        UserError: the settings, the data or the checkpoint are invalid.
    """
    started, interruption = time.perf_counter(), interruption or Interruption()
    # One process names and writes checkpoints;
    # of sharded ones the others write their parts into its folder.
    manager = CheckpointManager(settings.checkpoint) if world.is_first else None
    with manager.locked() if manager is not None else contextlib.nullcontext():
        # Before hours of training, and under the lock,
        # so that no other run changes the folder meanwhile.
        if manager is not None:
            check_recorders(settings.common)
            check_outputs(settings)
        origin = resume.choose(settings, world, manager)
        settings = resume.as_begun(settings, origin)
        settings = resume.at_version(settings, (origin.state or {}).get("args") or {})
        logger.info("%s", summary(settings))
        planned = stages.plan(settings)
        while True:
            stage = stages.stage_at(planned, origin.updates_done(settings.checkpoint)) if planned else None
            of_stage = stages.settings_at(settings, planned, stage) if stage else settings
            # In the first stage only: the file of settings describes all stages.
            recorded = settings if origin.kind != "stage" else None
            accompanying = callbacks_of(of_stage, world, stage, manager, interruption, callbacks, recorded)
            state = build_state(of_stage, world, stage)
            resume.begin(state, origin)
            settings = settings.changed(**{**state.inferred, **state.restored})
            # What is wrong with the data is found before anything is written.
            state.batches.open()
            before = state.num_updates
            train_stage(state, accompanying)
            if state.interrupted:
                number = max(world.gather(interruption.signal, everywhere=True))
                logger.info(describe_interruption(number, state.num_updates, settings.checkpoint))
                return number
            if stage is None or stage is planned[-1] or state.end is None or not state.end.ends_stage:
                if state.num_updates > before or state.metric is not None:
                    log_end(state, time.perf_counter() - started)
                return 0
            logger.info("stage %d is done after %d updates", stage.number, state.num_updates)
            # From here on the state is on the host alone: a device never holds the models and
            # moments of two stages.
            origin = resume.Origin("stage", copied(state.state_dict(), again=False), f"stage {stage.number}")
            # What opens the next data folder refers to the model.
            state.batches.close()
            del state, accompanying
            # Reference cycles in wrapped modules and in PyTorch's optimizer keep device memory.
            gc.collect()
            # Resets concern the file that the run began from.
            settings = settings.changed(**RESETS_OFF)


def train_stage(state: TrainingState, callbacks: Sequence[Callback]) -> None:
    """Train *state* until a callback sets ``state.end``: at the end of the stage or of the run, or
    on entering it, when a restored run is there already."""
    read = {state.settings.data.train_subset: state.batches}
    check_agreement(state.world, {**read, **state.validation}, state.counts)
    with contextlib.ExitStack() as running:
        for callback in callbacks:
            running.enter_context(callback.running(state))
        if state.due.validate:
            logger.info("validation of update %d, in which the run was interrupted", state.num_updates)
            finish_update(state, callbacks)
        # Each epoch may read another folder: ranks compare each when they reach it.
        compared = state.batches.epoch
        while state.end is None:
            if state.batches.changes_data and state.batches.epoch != compared:
                check_agreement(state.world, read, state.counts)
            train_epoch(state, callbacks)


def train_epoch(state: TrainingState, callbacks: Sequence[Callback]) -> None:
    """Train *state* to the end of its epoch, or of the run."""
    state.begin_epoch()
    for callback in callbacks:
        callback.begin_epoch(state)
    batches, epoch = state.batches, state.batches.epoch
    for samples in groups(batches, state.frequency):
        for callback in callbacks:  # the position in the data is behind *samples* already
            callback.before_update(state)
        state.applied = update(state, samples)
        for callback in callbacks:  # one decides what is due, another whether a limit is reached
            callback.after_update(state)
        # After a skipped update nothing is due; a signal waits for the next one that is applied.
        if state.applied or batches.end_of_epoch:
            finish_update(state, callbacks)
        if batches.end_of_epoch or state.end is not None:
            break
    # Checkpoints of a complete epoch hold the start of the next one already. An epoch that a limit
    # cut short stays where it is: the resumed run completes it.
    if batches.end_of_epoch:
        batches.load_state_dict({"epoch": epoch + 1, "iterations_in_epoch": 0})


def finish_update(state: TrainingState, callbacks: Sequence[Callback]) -> None:
    """Do what is due after an update: validate, end the epoch if it is over, save."""
    for callback in callbacks:
        callback.validate(state)
    # A validation that a signal ended is still due: the state is saved as it is.
    if state.due.end_of_epoch and not state.due.validate:
        state.end_epoch()
    for callback in callbacks:
        callback.complete(state)


def groups(batches: EpochIterator, size: int) -> Iterator[list[Sample | None]]:
    """The rest of the epoch in groups of *size* batches, one per update. The position in the data
    counts the groups that were handed out."""
    samples = iter(batches)
    for remaining in range(len(batches) - batches.iterations_in_epoch, 0, -size):
        yield list(itertools.islice(samples, min(size, remaining)))
