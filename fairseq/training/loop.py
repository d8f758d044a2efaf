"""Training: stages, their epochs, the updates of an epoch, and what follows an update."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from fairseq.checkpoint import CheckpointManager
from fairseq.checkpoint.manager import SavePoint
from fairseq.checkpoint.store import copied
from fairseq.config.registry import TASKS
from fairseq.config.settings import CheckpointConfig, OptimizationConfig, TrainingSettings
from fairseq.criterions.fairseq_criterion import Sample
from fairseq.data.folders import check_validation
from fairseq.data.iterator import EpochIterator
from fairseq.distributed import Interruption, Job, World
from fairseq.errors import UserError, counted, nearest
from fairseq.logging.recorders import check_recorders, log_file
from fairseq.models.recipes import summary
from fairseq.system.terminal import log_to_stderr
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.training import effective, resume, stages
from fairseq.training.agreement import check_agreement
from fairseq.training.build import build_state
from fairseq.training.hooks import Hook, registered_hooks
from fairseq.training.log import RunLog, describe_end, describe_interruption, validation_line
from fairseq.training.milestones import Milestones
from fairseq.training.nonfinite import FILE, NonFinite, NonFiniteReport, check_weights
from fairseq.training.profiler import Profiler, parse_window
from fairseq.training.saving import Saver
from fairseq.training.state import PendingWork, Requests, TrainingState
from fairseq.training.update import update
from fairseq.training.validation import evaluate, raw_sizes, report_of, sample, text_writer

logger = logging.getLogger(__name__)

RESETS_OFF = {field.name: False for field in fields(CheckpointConfig) if field.name.startswith("reset_")}
SIGNAL = "a signal"
SHORTEST = 1000
"""Fewest updates between two validations of a long run where the user gives no interval."""
POINTS, FEWEST, MOST_COST = 5, 100, 0.05
"""Validations of a run of at least FEWEST updates, as long as those before the last take at most
this share of its time."""
FORWARD = 1 / 3
"""Time of a token in validation, as a share of one in training."""


def training_job(settings: TrainingSettings) -> Job[TrainingSettings, None]:
    """Return the job of a training run, which :func:`fairseq.distributed.run` runs on as many
    processes as it needs."""
    if (
        not settings.checkpoint.disable_validation
        and TASKS[settings.chosen.task].load_dataset is FairseqTask.load_dataset
    ):
        data = settings.data
        leaves_out = data.ignore_unused_valid_subsets or bool(data.combine_valid_subsets)
        check_validation(settings.data_path, data.valid_subset, leaves_out)
    return Job(run_process, settings, settings.common, settings.distributed)


def run_process(settings: TrainingSettings, world: World) -> None:
    """Train as one process of *world*, with a log on stderr; if a signal stops the run, exit with
    128 + its number."""
    saving = settings.checkpoint
    with Interruption(saves=not (saving.no_save or saving.no_last_checkpoints)) as interruption:
        log_to_stderr(logging.INFO if world.is_first else logging.ERROR)
        with log_file(settings.common.log_file if world.is_first else None):
            number = train(settings, world, interruption)
    if number:
        sys.exit(128 + number)


def train(
    settings: TrainingSettings,
    world: World,
    interruption: Interruption | None = None,
    hooks: Sequence[Hook] = (),
) -> int:
    """Train what *settings* describe, on one process of *world*: restore, then run every stage that
    is left.

    Args:
        interruption: the signal that asks this process to stop; a command catches it, Python
            callers do not. All ranks stop after the next update that is applied, after a validation
            that is running, or after a save.
        hooks: beside the registered ones, the same objects in every stage.

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
        origin = resume.choose(settings, world, manager)
        settings = resume.as_begun(settings, origin)
        settings = resume.at_version(settings, (origin.state or {}).get("args") or {})
        planned = stages.plan(settings)
        while True:
            stage = stages.stage_at(planned, origin.updates_done(settings.checkpoint)) if planned else None
            of_stage = stages.settings_at(settings, planned, stage) if stage else settings
            state = build_state(of_stage, world, stage)
            run = Run(state, manager, interruption, [*registered_hooks(of_stage), *hooks])
            resume.begin(state, origin)
            # What the data or the checkpoint put in force holds for all stages.
            settings = settings.changed(**state.found)
            # What is wrong with the data is found before anything is written.
            state.batches.open()
            done, is_pending = state.num_updates, state.due is not None
            state.requests = Requests(late=run.asked_by_any(world.is_first and run.is_over_time()))
            # What is left of the last update comes first.
            state.end = None if is_pending else limit_reached(state, state.requests.late)
            if manager is not None and origin.kind != "stage":  # of all stages
                for line in summary(settings):
                    logger.info("%s", line)
                effective.record(settings, state.task, manager, has_work=state.end is None)
            run.train()
            if run.stopped:
                number = max(world.gather(interruption.signal, everywhere=True))
                logger.info("%s", describe_interruption(number, state.num_updates, settings.checkpoint))
                return number
            if stage is None or stage is planned[-1] or state.end != end_of_stages(state.cfg):
                if state.num_updates == done and not is_pending:
                    ends = f"{state.end} is reached after {counted(done, 'update')}"
                    logger.info("nothing to do: %s; change it to train on", ends)
                    return 0
                logger.info("%s is reached after %s", state.end, counted(state.num_updates, "update"))
                logger.info("%s", describe_end(state, time.perf_counter() - started))
                return 0
            logger.info("stage %d is done after %s", stage.number, counted(state.num_updates, "update"))
            # From here on the state is on the host alone: a device never holds the models and
            # moments of two stages.
            origin = resume.Origin("stage", copied(state.state_dict(), again=False), f"stage {stage.number}")
            # What opens the next data folder refers to the model.
            state.batches.close()
            del state, run
            # Reference cycles in wrapped modules and in PyTorch's optimizer keep device memory.
            gc.collect()
            # Resets concern the file that the run began from.
            settings = settings.changed(**RESETS_OFF)


class Run:
    """One stage of a run, or a run without stages, on one process.

    Args:
        state: as it is built; it is restored before :meth:`train`.
        manager: the checkpoints; None except on the first process.

    Attributes:
        stopped: whether a signal stopped it.

    Raises:
        UserError: a setting is invalid.
    """

    def __init__(
        self, state: TrainingState, manager: CheckpointManager | None, interruption: Interruption, hooks: Sequence[Hook]
    ) -> None:
        settings, world = state.settings, state.world
        self.state, self.manager, self.interruption, self.hooks = state, manager, interruption, hooks
        self.saving = settings.checkpoint
        self.saver = Saver(self.saving, settings.distributed, world, manager)
        self.milestones = Milestones(self.saving, settings.data_path, settings.data.train_subset)
        self.log = RunLog(settings, world)
        parse_window(settings.profiling.profile, settings.optimization.max_update)
        self.stopped = False
        self.saved_at = time.perf_counter()
        # Whether this run froze its objects; None: who has frozen others decides what is collected.
        self.frozen: bool | None = None if gc.get_freeze_count() else False

    def train(self) -> None:
        """Train until ``state.end`` says why not further: at the end of the stage or of the run, or
        on entering it, when a restored run is there already."""
        state, world = self.state, self.state.world
        splits = {state.settings.data.train_subset: state.batches}
        counts = {"updates so far": state.num_updates, "updates of the run": state.cfg.max_update}
        check_agreement(world, {**splits, **state.validation}, counts)
        # The number of updates may follow from the data.
        window = parse_window(state.settings.profiling.profile, state.cfg.max_update)
        self.profiler = Profiler(window if world.is_first else None, self.saving.save_dir, world.device)
        self.raw_sizes = raw_sizes(state.validation, state.settings.data_path)
        self.writer = text_writer(state)
        # Words or tokens, by which milestones are counted.
        self.amount_read = max(
            self.milestones.amount(state.batches), self.milestones.amount_at(state.restored_position)
        )
        if state.incomparable and state.end is None and self.manager is not None:
            # The next best would replace the file of one that cannot be compared with it.
            self.manager.set_best_aside()
        with self.log.recording(state):
            for hook in self.hooks:
                hook.on_start(state)
            with self.saver.completing():
                try:
                    if state.due is not None:
                        logger.info("validation of update %d, before which the run was interrupted", state.num_updates)
                        due, state.due = state.due, None
                        self.finish_update(due)
                    first = state.batches.epoch
                    while state.end is None:
                        # Each epoch may read another folder: ranks compare each when they reach it.
                        if state.batches.changes_data and state.batches.epoch != first:
                            check_agreement(world, splits, {"updates so far": state.num_updates})
                        self.epoch()
                except NonFinite as error:
                    # Weights, optimizer and carried state are as before the update, the position in
                    # the data is behind it: with the batches that the finding names, it can be
                    # repeated.
                    self.save_for_inspection(error.finding)
                    raise
                else:
                    self.profiler.finish(state.num_updates)
                finally:
                    self.profiler.drop()
                    if self.frozen:
                        gc.unfreeze()
            for hook in self.hooks:
                hook.on_end(state)

    def epoch(self) -> None:
        """Train to the end of the epoch, or of the run."""
        state, batches, epoch = self.state, self.state.batches, self.state.batches.epoch
        state.begin_epoch()
        # Of this epoch's data, whichever the run began or was resumed with.
        self.cost = validation_cost(state)
        # An iteration that is left early must not leave its thread behind.
        remaining = contextlib.closing(groups(batches, state.frequency))
        with remaining as updates, self.log.epoch(state, updates) as bar:
            for samples in bar:  # the position in the data is behind *samples* already
                self.profiler.before_update(state.num_updates)
                applied = update(state, samples, self.requests)
                if self.frozen is False:
                    # Model, optimizer and compiled code live as long as the run. To search them for
                    # garbage holds up this process, and all that wait for its gradients.
                    gc.collect()
                    gc.freeze()
                    self.frozen = True
                if applied:
                    for hook in self.hooks:
                        hook.on_update(state)
                    self.log.update(bar, state)
                if batches.end_of_epoch:
                    self.log.end_epoch(bar, state)
                # Within an epoch nothing is due after a skipped update; a signal waits for the next
                # one that is applied.
                if applied or batches.end_of_epoch:
                    state.end = state.end or limit_reached(state, state.requests.late)
                    # Resumed with other batches, a run may read some text again.
                    before, self.amount_read = self.amount_read, max(self.amount_read, self.milestones.amount(batches))
                    self.finish_update(self.due(self.milestones.passed(before, self.amount_read)))
                if batches.end_of_epoch or state.end is not None:
                    break
        # Checkpoints of a complete epoch hold the start of the next one already, see
        # EpochIterator.state_dict. An epoch that a limit cut short stays where it is: the resumed
        # run completes it.
        if batches.end_of_epoch:
            batches.load_state_dict({"epoch": epoch + 1, "iterations_in_epoch": 0})

    def due(self, milestone: str) -> PendingWork:
        """What is due after an update: at intervals of updates or epochs, and at the end of a run;
        by the text that was read, the checkpoint called *milestone*, if that is not empty."""
        state, saving, batches = self.state, self.saving, self.state.batches
        updates, epoch, ended, last = state.num_updates, batches.epoch, batches.end_of_epoch, state.end is not None
        interval = validation_interval(saving, state.cfg, math.ceil(len(batches) / state.frequency), self.cost)
        scheduled = interval > 0 and updates % interval == 0
        save = (
            bool(milestone)
            or last
            or (saving.save_interval_updates > 0 and updates % saving.save_interval_updates == 0)
            or (ended and epoch % saving.save_interval == 0)
            or (scheduled and saving.validate_interval_updates is None)
        )
        validate = last or scheduled or (epoch % saving.validate_interval == 0 if ended else save)
        # These weights were validated before an update that was skipped and ended the epoch.
        is_known = state.metric is not None
        validate = validate and bool(state.validation) and updates >= saving.validate_after_updates and not is_known
        return PendingWork(epoch, ended, validate, save, milestone)

    def finish_update(self, due: PendingWork) -> None:
        """Do what is *due* after an update: validate, end the epoch if it is over, save, stop."""
        state, asked = self.state, self.state.requests
        stop, keeps = asked.stop, False
        if due.validate and not stop:
            # A signal may have come since the ranks asked one another.
            stop = self.asked_by_any(self.interruption.signal > 0)
        if due.validate and stop and not self.saving.no_last_checkpoints:
            # It leaves no time for a validation: checkpoint_last.pt alone is written, and the
            # resumed run begins with what is due. A validation that has begun is completed.
            state.due = due
            self.save(due)
            state.end, self.stopped = SIGNAL, True
            return
        if due.validate and not stop:
            before = state.best, state.without_improvement
            try:
                keeps = self.validate(due.epoch)
                if state.metric is not None:
                    for hook in self.hooks:
                        hook.on_validate(state)
            except Exception:
                # The updates are made: the resumed run begins with this validation. Other processes
                # may not have met the error, and would not save with this one.
                if state.world.size == 1:
                    state.due, state.metric, (state.best, state.without_improvement) = due, None, before
                    self.save(due)
                raise
            stop = self.asked_by_any(self.interruption.signal > 0)
        if due.end_of_epoch:
            state.end_epoch(due.epoch)
        # A validation uses up patience, and may lower the rate.
        state.end = state.end or limit_reached(state, asked.late)
        if due.save or keeps or asked.save or stop or state.end is not None:
            self.save(due)
            # Saving takes long: a signal that came meanwhile does not wait for another update.
            stop = stop or self.asked_by_any(self.interruption.signal > 0)
        if stop:
            # Whatever else is reached: the message of any other limit would call the run complete.
            state.end, self.stopped = SIGNAL, True

    def validate(self, epoch: int) -> bool:
        """Log the metrics of every split. The first one decides, as in fairseq, which checkpoint is
        the best; return whether this one is to be saved for it."""
        state, name = self.state, self.saving.best_checkpoint_metric
        keeps = False
        state.graph.update_num = state.num_updates
        with self.log.clock.paused():
            for number, (split, batches) in enumerate(state.validation.items()):
                batches.load_state_dict({"epoch": 1, "iterations_in_epoch": 0})
                steps = min(len(batches), state.settings.data.max_valid_steps or len(batches))
                started, samples = time.perf_counter(), itertools.islice(batches, steps)
                with self.log.bar(samples, epoch, steps, prefix=f"valid on {split!r} subset") as bar:
                    meter = evaluate(state, bar)
                    report = report_of(meter, state.figures, self.raw_sizes.get(split))
                    if name not in report:
                        # Names of figures may be known only once they were logged.
                        near = nearest(name, list(report))
                        raise UserError(f"`best_checkpoint_metric` {name}: not a figure of validation; {near}")
                    speed = meter.tokens / max(time.perf_counter() - started, 1e-9)
                    line = validation_line(epoch, state.stage, report, speed) | {"num_updates": state.num_updates}
                    if number == 0:
                        keeps = state.validated(report[name])
                        line[f"best_{name}"] = report[name] if state.best is None else state.best
                    self.log.validation(bar, state, split, line | {"wall": state.wall()})
            if self.writer is not None and state.metric is not None and math.isfinite(state.metric):
                self.log.sample(sample(state, self.writer), state.num_updates)
        if not keeps and self.saving.keep_best_checkpoints > 0 and state.metric is not None:
            keeps = state.world.share(self.manager is not None and self.manager.is_among_best(state.metric))
        return keeps

    def save(self, due: PendingWork) -> None:
        """Save a checkpoint, on every process, under the names that :class:`CheckpointManager`
        gives to what is *due*.

        Raises:
            UserError: weights are not finite, or the checkpoint cannot be written.
        """
        state = self.state
        if self.saving.no_save:
            return
        with self.log.clock.paused():
            check_weights(dict(state.reducer.named_parameters()), state.world, state.num_updates)
            point = SavePoint(
                due.epoch,
                state.num_updates,
                end_of_epoch=due.end_of_epoch,
                is_best=due.validate and state.metric is not None and state.metric == state.best,
                figure=state.metric,
                milestone=due.milestone,
                before_validation=state.due is not None,
            )
            self.saver.save(state.state_dict(), point)
            self.saved_at = time.perf_counter()
            state.world.barrier()

    def save_for_inspection(self, finding: NonFiniteReport) -> None:
        """Save the state before an update that is not finite,
        and what is known of it, as ``nonfinite.pt``."""
        state = self.state
        if self.saving.no_save:
            return
        saved = state.state_dict()
        # Under the names that these files have always had.
        known = {"update": finding.update, "ids": finding.ids, "place": finding.location}
        saved["extra_state"]["nonfinite"] = known
        self.saver.save_as(FILE, saved, state.batches.epoch, state.num_updates)
        logger.error("saved %s for inspection", Path(self.saving.save_dir) / FILE)
        state.world.barrier()

    def requests(self) -> Requests:
        """Return what this process asks of all of them; the clock of the first one counts. Called
        while the device computes an update: the next batch is copied meanwhile."""
        self.state.batches.fetch()
        minutes = self.saving.save_interval_minutes
        is_first, unsaved = self.state.world.is_first, time.perf_counter() - self.saved_at
        return Requests(
            stop=self.interruption.signal > 0,
            save=is_first and 0 < minutes * 60 < unsaved,
            late=is_first and self.is_over_time(),
        )

    def is_over_time(self) -> bool:
        """Return whether training has taken longer than ``--stop-time-hours`` by this clock."""
        return 0 < self.state.cfg.stop_time_hours * 3600 < self.state.wall()

    def asked_by_any(self, wish: bool) -> bool:
        """Return whether any rank has the *wish*; to be called on all of them."""
        world = self.state.world
        return wish if world.size == 1 else bool(world.sum(torch.tensor(float(wish), device=world.device)))


def groups(batches: EpochIterator, size: int) -> Generator[list[Sample | None], None, None]:
    """The rest of the epoch in groups of *size* batches, one per update. The position in the data
    counts the groups that were handed out."""
    samples = iter(batches)
    for remaining in range(len(batches) - batches.iterations_in_epoch, 0, -size):
        yield list(itertools.islice(samples, min(size, remaining)))


def limit_reached(state: TrainingState, is_late: bool) -> str | None:
    """Return the limit that is reached, None while training goes on; the same on all ranks, which
    agree on what *is_late*."""
    cfg, updates, batches = state.cfg, state.num_updates, state.batches
    between = batches.end_of_epoch or batches.iterations_in_epoch == 0
    epochs = batches.epoch if batches.end_of_epoch else batches.epoch - 1
    stop_lr, patience = state.lr_scheduler.stop_lr, state.settings.checkpoint.patience
    if 0 < patience <= state.without_improvement:
        return f"`patience` {patience}"
    if is_late:
        return f"`stop_time_hours` {cfg.stop_time_hours:g}"
    if state.stage is not None and state.stage.max_update <= updates:
        return end_of_stages(cfg)
    all_made = 0 < cfg.max_update <= updates
    if all_made and not state.length_from_data:
        return f"`max_update` {cfg.max_update}"
    # A number of updates that follows from the data is that of the epochs.
    if all_made or 0 < cfg.max_epoch <= epochs:
        return f"`max_epoch` {cfg.max_epoch}"
    # As in fairseq, a rate that is reached within an epoch lets the epoch be completed.
    if between and updates > 0 and state.get_lr() <= stop_lr:
        return f"`{'min_lr' if cfg.stop_min_lr is None else 'stop_min_lr'}` {stop_lr:g}"
    return None


def end_of_stages(cfg: OptimizationConfig) -> str:
    """The limit that ends a stage."""
    return f"the end of `stages` {cfg.stages}"


def validation_interval(saving: CheckpointConfig, cfg: OptimizationConfig, epoch_updates: int, cost: float) -> int:
    """Updates between validations within epochs of *epoch_updates*; 0: none.

    If the user asks for no interval and epochs do not end more often, a long run is validated and
    saved ten times, and a shorter one up to five times. *cost* is the time of a validation as a
    share of an epoch's.
    """
    if saving.validate_interval_updates is not None:
        return saving.validate_interval_updates
    if saving.save_interval_updates or saving.save_interval_words or saving.save_interval_tokens:
        return 0
    updates = cfg.max_update or (cfg.max_epoch or 1) * epoch_updates
    interval = max(SHORTEST, math.ceil(updates / 10))
    # Whoever counts epochs expects a validation after each.
    if updates >= FEWEST and not cfg.stages and cfg.max_epoch < 2:
        affordable = 1 + MOST_COST * updates / epoch_updates / cost if cost else POINTS
        interval = min(interval, math.ceil(updates / min(POINTS, int(affordable))))
    return interval if interval < min(updates, epoch_updates) else 0


def validation_cost(state: TrainingState) -> float:
    """The time of a validation, by its tokens, as a share of that of an epoch; 0 where datasets
    have no sizes."""
    train, *valid = (
        int(getattr(batches.dataset, "sizes", np.empty(0)).sum())
        for batches in (state.batches, *state.validation.values())
    )
    return FORWARD * sum(valid) / train if train else 0.0
