"""A run: what is trained, its state between updates, and its validations, checkpoints and limits."""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from fairseq.checkpoint import CheckpointManager
from fairseq.checkpoint.manager import SavePoint
from fairseq.config.fields import differ, parse_dict, shown
from fairseq.config.settings import TrainingSettings
from fairseq.data.iterator import EpochIterator
from fairseq.data.position import SavedBy
from fairseq.distributed import Interruption, World
from fairseq.distributed.sharding import build_device
from fairseq.errors import UserError, nearest
from fairseq.logging.progress import ProgressBar, RunProgress, progress_bar
from fairseq.logging.recorders import Record
from fairseq.models.loading import check_settings, stored_settings
from fairseq.modules import noise
from fairseq.tasks import FairseqTask, setup_task
from fairseq.tasks.dictionary_digest import check_dictionary, check_save_dir, dictionary_of
from fairseq.training import log
from fairseq.training.best import Best, fingerprint, measured_by_fairseq
from fairseq.training.due import Due, validation_interval
from fairseq.training.effective import SETTINGS_FILE, describe, write_settings
from fairseq.training.log import Clock
from fairseq.training.milestones import Milestones
from fairseq.training.nonfinite import FILE, Finding, check_weights
from fairseq.training.profiling import parse_window
from fairseq.training.saving import Saver
from fairseq.training.stages import Stage
from fairseq.training.stop import Limit, StopVote, describe_end, evaluation
from fairseq.training.trainer import Trainer

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONG = 30.0
"""Seconds that a validation takes before which a run is saved; SLURM's time between SIGTERM and SIGKILL."""


class Run:
    """One stage of a run, or a run without stages.

    Args:
        settings: of the run, or of *stage*.
        manager: the checkpoints; None except on the first process.
        interruption: the signal that asks this process to stop.

    Attributes:
        settings: those in force: of the run, with what the task inferred from the data and what was restored.
        inferred: the settings that the task inferred, such as the classes of a table.
        restored: those that a restored state put in place of the ones given, by name.
        due: what was left to do after the last update when the run was interrupted; None: nothing.
        measured: what validations measure, see :func:`~fairseq.training.best.fingerprint`; None where none is known.
        idle: nothing was done yet.
        record: writes metrics to the recorders, while the run trains.
    """

    record: Record

    def __init__(
        self,
        settings: TrainingSettings,
        world: World,
        manager: CheckpointManager | None,
        stage: Stage | None,
        interruption: Interruption,
    ) -> None:
        self.world = world
        self.stage = stage
        self.cfg = settings.optimization
        self.saving = settings.checkpoint
        self.common = settings.common
        self.max_update = stage.max_update if stage else self.cfg.max_update
        # Used after hours only, so that mistakes in them are found now.
        parse_dict("`optimizer_overrides`", self.saving.optimizer_overrides)
        self.window = parse_window(settings.profiling.profile, self.cfg.max_update)
        data = settings.data
        splits = [split.strip() for split in data.valid_subset.split(",")]
        if not all(splits):
            raise UserError(f"`valid_subset` {data.valid_subset!r}: empty name; `disable_validation` skips validation")
        self.milestones = Milestones(self.saving, settings.data_path, data.train_subset)
        # Here and not at start-up: what other stages drew must not change the initial values of this one.
        torch.manual_seed(self.common.seed)
        noise.use_generator(noise.GENERATORS[0])
        self.task: FairseqTask = setup_task(settings)
        # What the task changed while it was set up; a plug-in that writes to its namespace changed nothing here.
        before = settings.flat
        self.inferred = {n: value for n, value in self.task.settings.flat.items() if value is not before.get(n)}
        self.restored: dict[str, Any] = {}
        self.settings = settings = settings.changed(**self.inferred) if self.inferred else settings
        with build_device(settings.distributed, world):
            model = self.task.build_model(settings)
        criterion = self.task.build_criterion(settings)
        # From here on processes differ: the parameters are the same on all, dropout is not.
        if world.rank > 0:
            torch.manual_seed(self.common.seed + world.rank)
        self.manager = manager
        self.saver = Saver(settings.checkpoint, settings.distributed, world, manager)
        self.trainer = Trainer(settings, self.task, model, criterion, world)
        self.batches = self._iterator(data.train_subset, training=True)
        self.validation: dict[str, EpochIterator] = {}
        if not self.saving.disable_validation:
            self.validation = {split: self._iterator(split, training=False) for split in splits}
        self.best = Best(self.saving.maximize_best_checkpoint_metric)
        self.due: Due | None = None
        self.measured: dict[str, Any] | None = None
        metric, known = self.saving.best_checkpoint_metric, [*self.trainer.figures, "wpb", "bsz"]
        if metric not in known:
            raise UserError(f"`best_checkpoint_metric` {metric}: not a figure of validation; {nearest(metric, known)}")
        self.started = time.perf_counter()
        self.trained_before = 0.0
        self.progress = RunProgress(0, 0)
        self.idle = True
        self.stopped = False
        self.saved_at = self.started
        self.stop = StopVote(world, lambda: (self.is_late(), interruption.signal > 0, self.save_is_due()))

    def restore(self, state: dict[str, Any], source: str, *, adopt: bool = False) -> None:
        """Continue from a loaded checkpoint, called *source* in messages; see :meth:`Trainer.load_state_dict`."""
        check_dictionary(state, source, dictionary_of(self.task))
        extra = state.get("extra_state") or {}
        rows = 0
        if not self.saving.reset_dataloader and "train_iterator" in extra:
            length = self.task.batch_settings().get("tokens_per_sample")
            saved = SavedBy.of(state, length, self.stage.number if self.stage else None)
            same_rows = self.batches.load_state_dict(extra["train_iterator"], saved)
            # After the batches, whose position may be earlier than the one that was saved.
            self.milestones.restore(extra["train_iterator"], self.batches)
            rows = self.batches.sampler.rows if same_rows and self._memory_fits(extra.get("batches") or {}) else 0
            if not rows and self.trainer.model.memory_length and self.batches.iterations_in_epoch:
                logger.info("%s: memory dropped, because rows, segments or memory have another length", source)
        stored, model = state.get("args") or {}, self.trainer.model
        # First, because it names the setting by which parameters have other names or shapes.
        check_settings(model, stored, self.settings.model, source, self.settings.extensions)
        in_force = self.trainer.load_state_dict(state, source, self.saving, rows, adopt=adopt)
        # The rate of the epoch that the run is in, or has ended: a limit may be reached by it.
        within = self.batches.iterations_in_epoch > 0
        self.trainer.begin_epoch(max(1, self.batches.epoch if within else self.batches.epoch - 1))
        flat = self.settings.flat
        self.restored = {n: value for n, value in in_force.items() if n in flat and differ(flat[n], value)}
        self.settings = self.settings.changed(**self.restored)
        if not self.saving.reset_meters:
            self.trained_before = float(extra.get("previous_training_time") or 0.0)
            if not self.saving.reset_optimizer:
                self._restore_best(extra, stored)
            self.check_patience()
        if extra.get("due") and not (self.saving.reset_dataloader or self.saving.reset_optimizer):
            self.due = Due.of(extra["due"])
        logger.info("restored %s: epoch %d, update %d", source, self.batches.epoch, self.trainer.num_updates)

    def record_settings(self, settings: TrainingSettings, manager: CheckpointManager) -> None:
        """Log the *settings* of all stages and write them and the dictionary to the checkpoint folder.

        A run with nothing to do leaves the file, like the checkpoints, with the settings of the last update.
        """
        dictionary = dictionary_of(self.task)
        if dictionary is not None and dictionary.path is not None:
            check_save_dir(manager.folder, dictionary)
            manager.keep_dictionary(dictionary.path)
        logger.info("settings: %s", describe(settings))
        # A run with nothing to do must not replace the settings of the run that made the checkpoints.
        if not self.saving.no_save and (self.due is not None or self.limit() is None):
            write_settings(settings, manager.folder / SETTINGS_FILE)

    def describe_end(self, seconds: float) -> str | None:
        """Return the last message of a run of *seconds* that ended by its settings; None if no update was made."""
        limit, updates = self.limit(), self.trainer.num_updates
        if limit is None or self.idle:
            return None
        best = None if self.best.value is None else (self.saving.best_checkpoint_metric, self.best.value)
        following = evaluation(self.settings, self.task.evaluated_by, sys.argv)
        return describe_end(limit, updates, seconds, best, following)

    def stage_is_done(self) -> bool:
        """Return whether the run ended because its stage is complete, so that the next stage follows."""
        if self.stage is None or self.stopped or self.stop.decided:
            return False
        return self.trainer.num_updates >= self.stage.max_update

    def state_dict(self) -> dict[str, Any]:
        """Return everything a run needs to continue; to be called on every process."""
        state = {"args": self.stored_settings(), **self.trainer.state_dict()}
        state["extra_state"].update(
            train_iterator=self.batches.state_dict(),
            batches=self.batches_signature(),
            previous_training_time=self.wall(),
            **self.best.state_dict(),
        )
        if self.measured is None and self.validation:
            self.measured = self._fingerprint()
        if self.measured is not None:
            state["extra_state"]["validation"] = self.measured
        if self.due is not None:
            state["extra_state"]["due"] = self.due.state_dict()
        if self.stage is not None:
            names = ("number", "tokens_per_sample", "max_update")
            state["extra_state"]["stage"] = {name: getattr(self.stage, name) for name in names}
        return state

    def stored_settings(self) -> dict[str, Any]:
        """Return the settings in force, as a checkpoint stores them."""
        return stored_settings(self.settings.flat, self.trainer.model)

    def wall(self) -> float:
        """Return seconds of training so far, restored ones included."""
        return self.trained_before + time.perf_counter() - self.started

    def save_for_inspection(self, finding: Finding) -> None:
        """Save the state before an update that is not finite, and what is known of it, as ``nonfinite.pt``."""
        if self.saving.no_save:
            return
        state = self.state_dict()
        # Under the names that these files have always had.
        known = {"update": finding.update, "ids": finding.ids, "place": finding.location}
        state["extra_state"]["nonfinite"] = known
        self.saver.save_as(FILE, state, self.batches.epoch, self.trainer.num_updates)
        logger.error("saved %s for inspection", Path(self.saving.save_dir) / FILE)
        self.world.barrier()

    def due_after_update(self, epoch: int, end_of_epoch: bool) -> Due:
        """Return what is due after the last update, which was of *epoch*; to be called once."""
        updates, saving = self.trainer.num_updates, self.saving
        frequency = self.cfg.update_freq[min(epoch, len(self.cfg.update_freq)) - 1]
        interval = validation_interval(saving, self.cfg, math.ceil(len(self.batches) / frequency))
        scheduled = log.is_due(updates, interval)
        last = self.end() is not None
        save = (
            self.milestones.passed(self.batches)
            or last
            or log.is_due(updates, saving.save_interval_updates)
            or (end_of_epoch and epoch % saving.save_interval == 0)
            or (scheduled and saving.validate_interval_updates is None)
        )
        validate = last or scheduled or (epoch % saving.validate_interval == 0 if end_of_epoch else save)
        validate = validate and bool(self.validation) and updates >= saving.validate_after_updates
        return Due(epoch, end_of_epoch, validate, save, self.milestones.name or "")

    def save(self, due: Due, metric: float | None = None, is_best: bool = False) -> None:
        """Save a checkpoint, on every process, after a validation that gave *metric* or without one (None).

        Raises:
            UserError: weights are not finite, or the checkpoint cannot be written.
        """
        if self.saving.no_save:
            return
        updates = self.trainer.num_updates
        check_weights(dict(self.trainer.reducer.named_parameters()), self.world, updates)
        state = self.state_dict()
        state["extra_state"]["val_loss"] = metric
        point = SavePoint(due.epoch, updates, due.end_of_epoch, is_best, metric, due.milestone, self.due is not None)
        self.saver.save(state, point)
        self.saved_at = time.perf_counter()
        self.stop.saved()
        self.world.barrier()

    def improves(self, metric: float) -> bool:
        """Return whether *metric* is the best so far, or among the best that are kept; on every process."""
        if self.best.improved_by(metric) or self.saving.keep_best_checkpoints <= 0:
            return self.best.improved_by(metric)
        return self.world.share(self.manager is not None and self.manager.is_among_best(metric))

    def expects_long_validation(self, clock: Clock) -> bool:
        """Return whether the next validation may take longer than :data:`LONG`, as the first process sees it."""
        speed = clock.speeds("train", self.trainer.meters["train"], clock.elapsed())["ups"]
        steps = sum(map(self.validation_steps, self.validation.values()))
        # By training's speed: a forward pass takes a third, batches of validation may be larger.
        return self.world.share(speed > 0 and steps / (speed * self.cfg.update_freq[0]) > LONG)

    def validation_steps(self, batches: EpochIterator) -> int:
        """Return the number of *batches* of a split that a validation reads."""
        return min(len(batches), self.settings.data.max_valid_steps or len(batches))

    def validate(self, epoch: int) -> float | None:
        """Validate on every split; return the first split's ``--best-checkpoint-metric``, None if interrupted."""
        metric = self.saving.best_checkpoint_metric
        lines: list[tuple[dict[str, Any], str]] = []
        values: list[float] = []
        for split, batches in self.validation.items():
            batches.load_state_dict({"epoch": 1, "iterations_in_epoch": 0})
            clock, steps = Clock(), self.validation_steps(batches)
            with self.bar(itertools.islice(batches, steps), epoch, steps, prefix=f"valid on {split!r} subset") as bar:
                meter = self.trainer.validate(self._until_interrupted(bar))
            if self.stop.interrupted:
                return None
            report = meter.report(self.trainer.figures)
            # As in fairseq, the first split alone decides which checkpoint is the best.
            best = report[metric] if values else self.best.better(report[metric])
            stats = log.validation_line(epoch, self.stage, report, meter.tokens / clock.elapsed())
            stats |= {"num_updates": self.trainer.num_updates, f"best_{metric}": best, "wall": self.wall()}
            lines.append((bar.print(stats, tag=split), split))
            values.append(report[metric])
        # Once all splits are done: a validation that is interrupted is repeated.
        for line, split in lines:
            self.record(line, split, self.trainer.num_updates)
        return values[0]

    def _until_interrupted(self, samples: Iterable[T]) -> Iterator[T]:
        for sample in samples:
            if self.stop.poll():
                return
            yield sample

    def is_late(self) -> bool:
        """Return whether training has taken longer than ``--stop-time-hours``, by this process's clock."""
        return 0 < self.cfg.stop_time_hours * 3600 < self.wall()

    def save_is_due(self) -> bool:
        """Return whether the last save is ``--save-interval-minutes`` ago, by this process's clock."""
        return 0 < self.saving.save_interval_minutes * 60 < time.perf_counter() - self.saved_at

    def _restore_best(self, extra: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        """Restore the best metric, unless it was measured otherwise than this run's will be."""
        self.measured = extra.get("validation")
        if self.validation:
            before = self.measured or measured_by_fairseq(stored)
            self.measured = now = self._fingerprint()
            # Of a run of fairseq not all is known.
            names = sorted(now.keys() | before.keys() if extra.get("validation") else now.keys() & before.keys())
            if changed := [name for name in names if differ(now.get(name), before.get(name))]:
                text = ", ".join(f"`{n}` {shown(now.get(n))} (was {shown(before.get(n))})" for n in changed)
                logger.info("best validation: starts anew, because it measures something else: %s", text)
                if self.manager is not None:
                    self.manager.set_best_aside((extra.get("stage") or {}).get("number"))
                return
        self.best = self.best.restored(extra)

    def _fingerprint(self) -> dict[str, Any]:
        split, batches = next(iter(self.validation.items()))
        return fingerprint(self.settings, split, batches)

    def check_patience(self) -> None:
        """Stop the run after ``--patience`` validations without improvement."""
        if 0 < self.saving.patience <= self.best.without_improvement:
            logger.info("stopping: %d validations without improvement", self.best.without_improvement)
            self.stopped = True

    def limit(self) -> Limit | None:
        """Return why training ends here, None while it goes on; equal on all ranks."""
        # First: the message of any other limit would call the run complete.
        return Limit("a signal") if self.stop.interrupted else self.end()

    def end(self) -> Limit | None:
        """Return the setting by which training ends here, whether it is interrupted or not."""
        cfg, updates = self.cfg, self.trainer.num_updates
        between = self.batches.end_of_epoch or self.batches.iterations_in_epoch == 0
        epochs = self.batches.epoch if self.batches.end_of_epoch else self.batches.epoch - 1
        stop_lr = self.trainer.lr_scheduler.stop_lr
        if self.stopped and 0 < self.saving.patience <= self.best.without_improvement:
            return Limit(f"`patience` {self.saving.patience}")
        if self.stopped or self.stop.late:
            return Limit(f"`stop_time_hours` {cfg.stop_time_hours:g}")
        if 0 < self.max_update <= updates:
            return Limit(f"the end of `stages` {cfg.stages}" if self.stage else f"`max_update` {self.max_update}")
        if 0 < cfg.max_epoch <= epochs:
            return Limit(f"`max_epoch` {cfg.max_epoch}")
        # As in fairseq, a rate that is reached within an epoch lets the epoch be completed.
        if between and updates > 0 and self.trainer.get_lr() <= stop_lr:
            return Limit(f"`{'min_lr' if cfg.stop_min_lr is None else 'stop_min_lr'}` {stop_lr:g}", "lower")
        return None

    def interval(self, clock: Clock) -> dict[str, Any]:
        """Return the log's line of the updates since the last interval ended."""
        ends = log.is_due(self.trainer.num_updates, self.common.log_interval)
        return {**log.interval_line(self.trainer, self.batches, self.stage, clock, ends), **self.clocks(clock)}

    def seconds_left(self, line: Mapping[str, Any]) -> float | None:
        """Return the seconds to the end of the run at the speed of *line*; None without a limit."""
        return log.seconds_left(line, self.cfg, self.batches, self.wall())

    def clocks(self, clock: Clock) -> dict[str, float]:
        """Return the seconds of the epoch and of the whole run, as the log has them."""
        return {"train_wall": clock.elapsed(), "wall": self.wall()}

    def _iterator(self, split: str, training: bool) -> EpochIterator:
        return self.task.iterator(
            split,
            self.trainer.model,
            self.trainer.criterion,
            training=training,
            rank=self.world.rank,
            world_size=self.world.size,
            device=self.world.device,
        )

    def bar(self, items: Iterable[T], epoch: int, total: int, **shown_at: Any) -> ProgressBar[T]:
        """Return *items* as a progress bar; processes but the first show none."""
        log_format = self.common.log_format or ("simple" if self.common.no_progress_bar else None)
        resolved = log_format if self.world.is_first else "none"
        interval = self.common.log_interval
        return progress_bar(items, log_format=resolved, log_interval=interval, epoch=epoch, total=total, **shown_at)

    def batches_signature(self) -> dict[str, Any]:
        """Settings of the batches that memory depends on, and that earlier versions locate a position by."""
        return {
            "batches": len(self.batches),
            **self.task.batch_settings(),
            "memory_length": self.trainer.model.memory_length,
            "processes": self.world.size,
        }

    def _memory_fits(self, signature: Mapping[str, Any]) -> bool:
        """Return whether row memory saved under *signature* fits the rows of this run."""
        here = self.batches_signature()
        names = ("tokens_per_sample", "memory_length", "shuffled_with")
        return all(signature.get(name) == here.get(name) for name in names)

    def describe(self) -> None:
        """Log the sizes of model and data, and where the run computes."""
        model = self.trainer.model
        count = sum(p.numel() for p in model.parameters())
        stage = f", stage {self.stage.number} ({self.stage.tokens_per_sample} tokens)" if self.stage else ""
        logger.info(
            "%s: %s parameters, %d batches per epoch on %s%s%s",
            self.settings.chosen.arch,
            f"{count:,}",
            len(self.batches),
            self.world.device,
            f" × {self.world.size} processes" if self.world.size > 1 else "",
            stage,
        )
