"""The training loop: a process trains stages, a stage epochs, an epoch updates; after an update a run may be saved."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

from fairseq.checkpoint import CheckpointManager
from fairseq.checkpoint.store import copied
from fairseq.config.settings import CheckpointConfig, TrainingSettings
from fairseq.criterions.fairseq_criterion import Sample
from fairseq.data.folders import check_validation
from fairseq.data.iterator import EpochIterator
from fairseq.distributed import Interruption, Job, World
from fairseq.errors import UserError
from fairseq.logging.progress import ProgressBar, RunProgress
from fairseq.logging.recorders import check_recorders, log_file, recording
from fairseq.system.terminal import closed_pipes, log_to_stderr
from fairseq.training import log, resumption, stages
from fairseq.training.due import Due
from fairseq.training.effective import check_outputs
from fairseq.training.length import with_max_update
from fairseq.training.log import Clock
from fairseq.training.nonfinite import NonFinite
from fairseq.training.profiling import Observer, profiling
from fairseq.training.run import Run
from fairseq.training.stop import describe_interruption, further
from fairseq.training.utilisation import token_share

logger = logging.getLogger(__name__)

RESETS_OFF = {field.name: False for field in fields(CheckpointConfig) if field.name.startswith("reset_")}
_FAILURE = "failure"


def training_job(settings: TrainingSettings) -> Job[TrainingSettings, None]:
    """Return the job of a training run, which :func:`fairseq.distributed.run` runs on as many processes as it needs."""
    if not settings.checkpoint.disable_validation:
        check_validation(settings.data_path, settings.data.valid_subset)
    return Job(run_process, settings, settings.common, settings.distributed)


def run_process(settings: TrainingSettings, world: World) -> None:
    """Train as one process of *world*, with a log on stderr; if a signal stops the run, exit with 128 + its number."""
    with Interruption() as interruption, closed_pipes(interruption.record_closed_pipe):
        log_to_stderr(logging.INFO if world.is_first else logging.ERROR)
        with log_file(settings.common.log_file if world.is_first else None):
            number = train(settings, world, interruption)
    if number:
        sys.exit(128 + number)


def train(settings: TrainingSettings, world: World, interruption: Interruption | None = None) -> int:
    """Train what *settings* describe, on one process of *world*: restore, run every stage that is left, save.

    Args:
        interruption: the signal that asks this process to stop; polled after each update.

    Returns:
        The number of the signal that stopped the run, the same on every rank; 0 if it ended by its settings.

    Raises:
        UserError: the settings, the data or the checkpoint are invalid.
    """
    started = time.perf_counter()  # of all stages
    interruption = interruption or Interruption()
    # One process names and writes checkpoints; of sharded ones the others write their parts into its folder.
    manager = CheckpointManager(settings.checkpoint) if world.is_first else None
    with manager.locked() if manager is not None else contextlib.nullcontext():
        # Before hours of training, and under the lock, so that no other run changes the folder meanwhile.
        if manager is not None:
            check_recorders(settings.common)
            check_outputs(settings)
        settings = with_max_update(settings, world.size)
        planned = stages.plan(settings)
        origin = resumption.first_origin(settings.checkpoint.finetune_from_model, settings.distributed, world, manager)
        settings = resumption.at_version(settings, (origin.state or {}).get("args") or {})
        while True:
            stage = stages.stage_at(planned, origin.updates_done(settings.checkpoint)) if planned else None
            of_stage = stages.settings_at(settings, planned, stage) if stage else settings
            run = Run(of_stage, world, manager, stage, interruption)
            resumption.begin(run, origin)
            settings = settings.changed(**{**run.inferred, **run.restored})
            # What is wrong with the data is found before anything is written.
            run.batches.open()
            # Once a run: the file describes all stages.
            if manager is not None and origin.kind != "stage":
                run.record_settings(settings, manager)
            train_stage(run)
            if run.stop.interrupted:
                number = max(world.gather(interruption.signal, everywhere=True))
                logger.info(describe_interruption(number, run.trainer.num_updates, settings.checkpoint))
                return number
            if stage is None or stage is planned[-1] or not run.stage_is_done():
                if end := run.describe_end(time.perf_counter() - started):
                    if steps := further(settings, sys.argv, run.task.evaluated_by == "eval_lm"):
                        logger.info(steps)
                    logger.info(end)
                return 0
            logger.info("stage %d is done after %d updates", stage.number, run.trainer.num_updates)
            # From here on the state is on the host alone: a device never holds the models and moments of two stages.
            origin = resumption.Origin("stage", copied(run.state_dict(), again=False), f"stage {stage.number}")
            # What opens the next data folder refers to the model.
            run.batches.close()
            del run
            # Wrapped modules refer to themselves, and so do frames that PyTorch's first optimizer leaves.
            gc.collect()
            settings = settings.changed(**RESETS_OFF)


def train_stage(run: Run) -> None:
    """Train the epochs of *run* until it reaches a limit."""
    run.describe()
    updates, read = run.trainer.num_updates, {run.settings.data.train_subset: run.batches}
    check_agreement(run.world, {**read, **run.validation}, updates)
    # A restored run may be late already; clocks differ between ranks.
    if run.cfg.stop_time_hours > 0:
        run.stopped |= bool(run.world.sum(torch.tensor(float(run.is_late()), device=run.world.device)))
    if (limit := run.limit()) and run.due is None:
        logger.info(limit.describe_nothing_to_do(updates))
    run.progress = RunProgress(updates, updates)
    with (
        recording(
            run.common if run.world.is_first else None, run.saving.save_dir, updates, not run.saving.no_save
        ) as run.record,
        profiling(run.window, run.saving.save_dir, run.world) as observed,
    ):
        # Folders of data take turns by epoch, so that one which differs may be reached after days.
        compared = run.batches.epoch
        if run.due is not None:
            logger.info("validation of update %d, before which the run was interrupted", updates)
            complete_update(run, run.due)
        while run.limit() is None:
            if run.batches.changes_data and run.batches.epoch != compared:
                check_agreement(run.world, read, run.trainer.num_updates)
            train_epoch(run, observed)
    run.saver.wait()


def check_agreement(world: World, splits: Mapping[str, EpochIterator], updates: int) -> None:
    """Raise UserError, the same on all processes, unless all are at the same update and read the same batches of data.

    To be called on every process. The data are opened, and must be readable. Processes exchange one number; only if
    those differ what it was computed from.
    """
    if world.size == 1:
        return
    facts: dict[str, Any]
    try:
        facts = {f"{split}: {name}": v for split, batches in splits.items() for name, v in batches.facts().items()}
        facts["updates so far"] = updates
    # Raised below on all processes: raised here, it would leave the others waiting.
    except UserError as error:
        facts = {_FAILURE: error.args[0]}
    # crc32, not hash(), which gives text another value in each process.
    if len(set(world.gather(zlib.crc32(repr(facts).encode()), everywhere=True))) == 1 and _FAILURE not in facts:
        return
    first, *others = everyone = world.gather(facts, everywhere=True)
    # Unreadable data explain every other difference.
    for rank, one in enumerate(everyone):
        if _FAILURE in one:
            raise UserError(facts.get(_FAILURE, f"rank {rank}: {one[_FAILURE]}"))
    for rank, other in enumerate(others, start=1):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                values = f"{other.get(name, 'missing')} on rank {rank}, {first.get(name, 'missing')} on rank 0"
                raise UserError(f"{name}: {values}; give all processes the same data and flags")


def train_epoch(run: Run, observed: Observer) -> None:
    """Train *run* to the end of its epoch, or to a limit."""
    batches, trainer, epoch = run.batches, run.trainer, run.batches.epoch
    # A resumed epoch goes on with its memory and sums.
    if batches.iterations_in_epoch == 0:
        run.task.restart()
        for meter in trainer.meters.values():
            meter.reset()
    trainer.begin_epoch(epoch)
    frequency = run.cfg.update_freq[min(epoch, len(run.cfg.update_freq)) - 1]
    clock = Clock(trainer.meters, token_share(trainer))
    done, total = math.ceil(batches.iterations_in_epoch / frequency), math.ceil(len(batches) / frequency)
    run.progress.total = log.total_updates(run.cfg, trainer.num_updates, batches)
    with run.bar(groups(batches, frequency), epoch, total, start=done, run=run.progress) as bar:
        for samples in bar:
            try:
                with observed(trainer.num_updates):
                    updated = trainer.train_step(samples, run.stop, batches.rebatch)
            except NonFinite as error:
                # The state is that before the update, so that what led to it can be repeated from the file.
                run.save_for_inspection(error.finding)
                raise
            if updated:
                line = bar.log(lambda: run.interval(clock), "train_inner", trainer.num_updates, run.seconds_left)
                run.record(line, "train_inner", trainer.num_updates)
            if updated or batches.end_of_epoch:
                after_update(run, epoch, bar, clock)
            if batches.end_of_epoch or (updated and run.limit() is not None):
                break
    # An epoch that a limit cut short stays where it is: the resumed run completes it.
    if batches.end_of_epoch:
        batches.load_state_dict({"epoch": epoch + 1, "iterations_in_epoch": 0})


def groups(batches: EpochIterator, size: int) -> Iterator[list[Sample | None]]:
    """The rest of the epoch in groups of *size* samples, one group an update, without reading ahead."""
    samples = iter(batches)
    for remaining in range(len(batches) - batches.iterations_in_epoch, 0, -size):
        yield list(itertools.islice(samples, min(size, remaining)))


def after_update(run: Run, epoch: int, bar: ProgressBar[list[Sample | None]], clock: Clock) -> None:
    """Log the line of an epoch at its end, validate and save, as far as these are due after this update."""
    end_of_epoch = run.batches.end_of_epoch
    if end_of_epoch:
        line = log.epoch_line(run.trainer, run.batches, run.stage, clock)
        run.record(bar.print({**line, **run.clocks(clock)}, tag="train"), "train", run.trainer.num_updates)
        # Before a checkpoint is saved: the next epoch begins elsewhere in the corpus.
        run.task.restart()
    # Validations and saves are no time of training.
    paused = time.perf_counter()
    complete_update(run, run.due_after_update(epoch, end_of_epoch), clock)
    # Speeds of the log are of training alone.
    clock.skip(paused)


def complete_update(run: Run, due: Due, clock: Clock | None = None) -> None:
    """Validate and save as far as these are *due*; a run that is asked to stop saves, and validates once resumed.

    A long validation, by the speed that *clock* has of training, follows a checkpoint, too: no work is lost in it.
    """
    metric, run.idle = None, False
    if due.validate:
        run.due = due
        saved = run.stop.interrupted or (due.save and clock is not None and run.expects_long_validation(clock))
        if saved:
            run.save(due)
        metric = None if run.stop.interrupted else run.validate(due.epoch)
        # Interrupted: the resumed run begins with this validation.
        if metric is None:
            if not saved:
                run.save(due)
            return
        run.due = None
    is_best, improves = run.best.is_worth_saving(metric), metric is not None and run.improves(metric)
    if metric is not None:
        run.best = run.best.validated(metric)
        run.check_patience()
    # After the validation, whose metric may lower the rate, and before the save that stores the rate.
    if due.end_of_epoch:
        run.trainer.end_epoch(due.epoch, metric)
    save = due.save or improves or run.stopped or run.stop.decided or run.stop.save_due
    if save:
        run.save(due, metric, is_best)
    # Both may take long: a signal that came meanwhile does not wait for another update.
    if (save or due.validate) and run.stop.poll() and not save:
        run.save(due, metric, is_best)
