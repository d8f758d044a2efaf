"""A run: epochs of updates, validations and checkpoints, from the first or a restored update to the last."""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from fairseq import checkpoint, config
from fairseq.checkpoint import CheckpointManager
from fairseq.config import parse_dict
from fairseq.criterions.fairseq_criterion import Sample
from fairseq.data.iterator import EpochIterator
from fairseq.distributed import World
from fairseq.errors import UserError, nearest
from fairseq.logging.progress import progress_bar
from fairseq.settings import CheckpointConfig, CommonConfig, DataConfig, OptimizationConfig
from fairseq.tasks import FairseqTask, setup_task
from fairseq.training import stages
from fairseq.training.stages import Stage
from fairseq.training.trainer import Trainer

logger = logging.getLogger(__name__)

VALIDATION_FIGURES = ("loss", "nll_loss", "ppl", "wpb", "bsz")


def train(args: argparse.Namespace, world: World) -> None:
    """Train what *args* describe, on one process of *world*: restore, run every stage that is left, save.

    Raises:
        UserError: the settings, the data or the checkpoint are not what they should be.
    """
    planned = stages.plan(args)
    options = config.extract(CheckpointConfig, args)
    manager = CheckpointManager(options) if world.is_first else None
    path = world.share(str(manager.restore_path() or "") if manager is not None else None)
    state = checkpoint.load(path) if path else None
    source = path
    stage = None
    while True:
        if planned:
            stage = stages.stage_at(planned, _updates(state, options))
        run = Run(stages.arguments(args, planned, stage) if stage else args, world, manager, stage)
        if state is not None:
            run.restore(state, source)
            state = None
        run.train()
        if stage is None or stage is planned[-1] or not run.stage_is_done():
            return
        logger.info("stage %d is done after %d updates", stage.number, run.trainer.num_updates)
        state, source = run.state_dict(), f"stage {stage.number}"
        args = _without_resets(args)
        options = config.extract(CheckpointConfig, args)


class Run:
    """One stage of a run, or all of it: what ``fairseq-train`` does between restoring and its end.

    Args:
        args: the settings, those of *stage* if there is one.
        world: the processes.
        manager: the checkpoints; None except on the first process.
        stage: the stage, in staged training.
    """

    def __init__(
        self, args: argparse.Namespace, world: World, manager: CheckpointManager | None, stage: Stage | None
    ) -> None:
        self.args = args
        self.world = world
        self.manager = manager
        self.stage = stage
        self.cfg = config.extract(OptimizationConfig, args)
        self.saving = config.extract(CheckpointConfig, args)
        self.common = config.extract(CommonConfig, args)
        self.max_update = stage.max_update if stage else self.cfg.max_update
        data = config.extract(DataConfig, args)
        _check(self.saving, data)
        torch.manual_seed(self.common.seed)
        self.task: FairseqTask = setup_task(args)
        model = self.task.build_model(args)
        criterion = self.task.build_criterion(args)
        if world.rank > 0:
            torch.manual_seed(self.common.seed + world.rank)
        self.trainer = Trainer(args, self.task, model, criterion, world)
        self.batches = self._iterator(data.train_subset, training=True)
        self.validation: dict[str, EpochIterator] = {}
        if not self.saving.disable_validation:
            self.validation = {split: self._iterator(split, training=False) for split in _splits(data)}
        self.best: float | None = None
        self.without_improvement = 0
        self.started = time.perf_counter()
        self.trained_before = 0.0
        self.stopped = False

    def restore(self, state: dict[str, Any], source: str) -> None:
        """Go on from a loaded checkpoint, called *source* in messages."""
        extra = state.get("extra_state") or {}
        same_batches = extra.get("batches") == self._batches_signature()
        self.trainer.load_state_dict(state, source, same_batches)
        if not self.saving.reset_dataloader and "train_iterator" in extra:
            self.batches.load_state_dict(extra["train_iterator"])
        if not self.saving.reset_meters:
            self.trained_before = float(extra.get("previous_training_time") or 0.0)
            self.without_improvement = int(extra.get("without_improvement") or 0)
            self.best = None if self.saving.reset_optimizer else extra.get("best")
            if self.manager is not None:
                self.manager.best = None if self.best is None else extra.get("best_saved", self.best)
            self._stop_without_patience()
        logger.info("restored %s: epoch %d, update %d", source, self.batches.epoch, self.trainer.num_updates)

    def train(self) -> None:
        """Epochs until a limit is reached."""
        self._describe()
        if self._at_limit():
            logger.info("nothing left to do after %d updates: a limit is reached", self.trainer.num_updates)
        while not self._at_limit():
            self._train_epoch()
        self.trainer.check_finite()

    def stage_is_done(self) -> bool:
        """Whether the run ended because the stage's updates are done, not for good."""
        return self.stage is not None and not self.stopped and self.trainer.num_updates >= self.stage.max_update

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from; on every process."""
        state = self.trainer.state_dict()
        place = self.batches.state_dict()
        if self.batches.end_of_epoch:
            place = {**place, "epoch": place["epoch"] + 1, "iterations_in_epoch": 0}
        state["extra_state"].update(
            train_iterator=place,
            batches=self._batches_signature(),
            previous_training_time=self.wall(),
            without_improvement=self.without_improvement,
            best=self.best,
        )
        if self.stage is not None:
            state["extra_state"]["stage"] = {
                "number": self.stage.number,
                "tokens_per_sample": self.stage.tokens_per_sample,
                "max_update": self.stage.max_update,
            }
        return state

    def wall(self) -> float:
        """Seconds of training so far, restored ones included."""
        return self.trained_before + time.perf_counter() - self.started

    def _train_epoch(self) -> None:
        epoch, trainer = self.batches.epoch, self.trainer
        if self.batches.iterations_in_epoch == 0:
            self.task.clear_memory("train")
            trainer.sums["train"].reset()
            trainer.sums["train_inner"].reset()
        trainer.begin_epoch(epoch)
        frequency = self.cfg.update_freq[min(epoch, len(self.cfg.update_freq)) - 1]
        clock = _Clock({name: (trainer.sums[name].tokens, trainer.sums[name].updates) for name in trainer.sums})
        done = math.ceil(self.batches.iterations_in_epoch / frequency)
        groups = _groups(self.batches, frequency)
        with self._bar(groups, epoch, math.ceil(len(self.batches) / frequency), start=done) as bar:
            for samples in bar:
                updated = trainer.train_step(samples)
                if updated:
                    bar.log(lambda: self._inner_stats(clock), tag="train_inner", step=trainer.num_updates)
                if updated or self.batches.end_of_epoch:
                    self._validate_and_save(epoch, bar, clock)
                if self.batches.end_of_epoch or self._at_limit():
                    break
        if self.batches.end_of_epoch:
            self.batches.load_state_dict({"epoch": epoch + 1, "iterations_in_epoch": 0})

    def _validate_and_save(self, epoch: int, bar: Any, clock: _Clock) -> None:
        updates, saving, end_of_epoch = self.trainer.num_updates, self.saving, self.batches.end_of_epoch
        if end_of_epoch:
            bar.print(self._epoch_stats(clock), tag="train", step=updates)
            self.task.clear_memory("train")
        last = self._at_limit()
        save = (
            last or _is_due(updates, saving.save_interval_updates) or end_of_epoch and epoch % saving.save_interval == 0
        )
        validate = (
            (save and not end_of_epoch)
            or last
            or _is_due(updates, saving.validate_interval_updates)
            or (end_of_epoch and epoch % saving.validate_interval == 0)
        )
        paused = time.perf_counter()
        figure = self._validate(epoch) if validate and self.validation else None
        if figure is not None:
            self._note_improvement(figure)
            self._stop_without_patience()
        if end_of_epoch:
            self.trainer.end_epoch(epoch, figure)
        if (save or self.stopped) and not saving.no_save:
            self._save(epoch, updates, end_of_epoch, figure)
        clock.skip(paused)

    def _save(self, epoch: int, updates: int, end_of_epoch: bool, figure: float | None) -> None:
        self.trainer.check_finite()
        state = self.state_dict()
        if self.manager is not None:
            for path in self.manager.save(
                state, epoch=epoch, updates=updates, end_of_epoch=end_of_epoch, val_loss=figure
            ):
                logger.info("saved %s (epoch %d, update %d)", path, epoch, updates)
        self.world.barrier()

    def _validate(self, epoch: int) -> float:
        """The first validation split's figure that decides which checkpoint is the best."""
        figures: list[float] = []
        for split, batches in self.validation.items():
            batches.load_state_dict({"epoch": 1, "iterations_in_epoch": 0})
            sums = self.trainer.sums["valid"]
            sums.reset()
            self.task.clear_memory(split)
            clock = _Clock()
            with (
                self.trainer.averaged(),
                self._bar(batches, epoch, len(batches), prefix=f"valid on {split!r} subset") as bar,
            ):
                for sample in bar:
                    self.trainer.valid_step(sample, split)
            self.task.clear_memory(split)
            report = sums.report()
            better = max if self.saving.maximize_best_checkpoint_metric else min
            metric = self.saving.best_checkpoint_metric
            figure = report[metric]
            stats = {"epoch": epoch, **self._stage_stats(), **report, "wps": sums.tokens / clock.elapsed()}
            stats.update(num_updates=self.trainer.num_updates, wall=self.wall())
            stats[f"best_{metric}"] = figure if self.best is None or figures else better(figure, self.best)
            bar.print(stats, tag=split, step=self.trainer.num_updates)
            figures.append(figure)
        return figures[0]

    def _note_improvement(self, figure: float) -> None:
        sign = -1.0 if self.saving.maximize_best_checkpoint_metric else 1.0
        if not math.isnan(figure) and (self.best is None or sign * figure < sign * self.best):
            self.best = figure
            self.without_improvement = 0
        else:
            self.without_improvement += 1

    def _stop_without_patience(self) -> None:
        if 0 < self.saving.patience <= self.without_improvement:
            logger.info("stopping: %d validations without a better one", self.without_improvement)
            self.stopped = True

    def _at_limit(self) -> bool:
        """Whether training ends here; the same on every process."""
        between = self.batches.end_of_epoch or self.batches.iterations_in_epoch == 0
        epochs = self.batches.epoch if self.batches.end_of_epoch else self.batches.epoch - 1
        updates = self.trainer.num_updates
        if self.cfg.stop_time_hours > 0 and not self.stopped:
            late = torch.tensor(float(self.wall() > self.cfg.stop_time_hours * 3600), device=self.world.device)
            self.stopped = bool(self.world.sum(late))
        return (
            self.stopped
            or 0 < self.cfg.max_epoch <= epochs
            or 0 < self.max_update <= updates
            or (between and updates > 0 and self.trainer.get_lr() <= self.cfg.min_lr)
        )

    def _inner_stats(self, clock: _Clock) -> dict[str, Any]:
        sums = self.trainer.sums["train_inner"]
        stats = self._stats(sums.report(), *self._speeds("train_inner", clock, clock.lap()), clock)
        sums.reset()
        clock.before["train_inner"] = (0.0, 0)
        return stats

    def _epoch_stats(self, clock: _Clock) -> dict[str, Any]:
        report = self.trainer.sums["train"].report()
        return self._stats(report, *self._speeds("train", clock, clock.elapsed()), clock)

    def _speeds(self, name: str, clock: _Clock, seconds: float) -> tuple[float, float]:
        """Tokens and updates a second of what was done since *clock* was started, restored sums left out."""
        tokens, updates = clock.before[name]
        sums = self.trainer.sums[name]
        return (sums.tokens - tokens) / seconds, (sums.updates - updates) / seconds

    def _stats(self, report: dict[str, float], wps: float, ups: float, clock: _Clock) -> dict[str, Any]:
        self.trainer.check_finite()
        epoch = self.batches.epoch
        stats: dict[str, Any] = {
            "epoch": epoch,
            "update": epoch - 1 + self.batches.iterations_in_epoch / max(len(self.batches), 1),
            **self._stage_stats(),
            **{name: report[name] for name in ("loss", "nll_loss", "ppl")},
            "wps": wps,
            "ups": ups,
            **{name: report[name] for name in ("wpb", "bsz")},
            "num_updates": self.trainer.num_updates,
            "lr": self.trainer.get_lr(),
            **{name: report[name] for name in ("gnorm", "clip") if name in report},
        }
        if self.trainer.scaler is not None:
            stats["loss_scale"] = self.trainer.scaler.scale
        return {**stats, "train_wall": clock.elapsed(), "wall": self.wall()}

    def _stage_stats(self) -> dict[str, int]:
        if self.stage is None:
            return {}
        return {"stage": self.stage.number, "tokens_per_sample": self.stage.tokens_per_sample}

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

    def _bar(self, items: Any, epoch: int, total: int, prefix: str | None = None, start: int = 0) -> Any:
        log_format = self.common.log_format or ("simple" if self.common.no_progress_bar else None)
        return progress_bar(
            items,
            log_format=log_format if self.world.is_first else "none",
            log_interval=self.common.log_interval,
            epoch=epoch,
            prefix=prefix,
            total=total,
            start=start,
            tensorboard_logdir=self.common.tensorboard_logdir if self.world.is_first else None,
        )

    def _batches_signature(self) -> dict[str, Any]:
        """What must be equal for a memory to fit the rows of the batches after it."""
        shuffled = getattr(self.args, "shuffle_lines", False)
        return {
            "batches": len(self.batches),
            "tokens_per_sample": getattr(self.args, "tokens_per_sample", None),
            "memory_length": self.trainer.model.memory_length,
            "processes": self.world.size,
            **({"shuffled_with": self.common.seed} if shuffled else {}),
        }

    def _describe(self) -> None:
        model = self.trainer.model
        count = sum(p.numel() for p in model.parameters())
        stage = f", stage {self.stage.number} ({self.stage.tokens_per_sample} tokens)" if self.stage else ""
        logger.info(
            "%s: %s parameters, %d batches an epoch on %s%s%s",
            getattr(self.args, "arch", type(model).__name__),
            f"{count:,}",
            len(self.batches),
            self.world.device,
            f" × {self.world.size} processes" if self.world.size > 1 else "",
            stage,
        )


class _Clock:
    """Seconds since it was made, and since the last lap; validations and saves are taken out.

    Args:
        before: (tokens, updates) that sums held when it was made, by name.
    """

    def __init__(self, before: dict[str, tuple[float, int]] | None = None) -> None:
        self.before = before or {}
        self.start = self.last = time.perf_counter()

    def elapsed(self) -> float:
        return max(time.perf_counter() - self.start, 1e-9)

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        return max(seconds, 1e-9)

    def skip(self, since: float) -> None:
        """Leave out what has passed *since* a moment of ``time.perf_counter()``."""
        passed = time.perf_counter() - since
        self.start += passed
        self.last += passed


def _groups(batches: EpochIterator, size: int) -> Iterator[list[Sample | None]]:
    """What is left of the epoch in runs of *size* samples, one an update; nothing is read ahead of them."""
    samples = iter(batches)
    for left in range(len(batches) - batches.iterations_in_epoch, 0, -size):
        yield list(itertools.islice(samples, min(size, left)))


def _is_due(updates: int, interval: int) -> bool:
    return interval > 0 and updates % interval == 0


def _splits(data: DataConfig) -> list[str]:
    return [split.strip() for split in data.valid_subset.split(",")]


def _check(saving: CheckpointConfig, data: DataConfig) -> None:
    """Find now what would otherwise only be found after hours.

    Raises:
        UserError: a setting of validation or checkpoints cannot be.
    """
    metric = saving.best_checkpoint_metric
    if metric not in VALIDATION_FIGURES:
        raise UserError(f"--best-checkpoint-metric {metric}: no such figure; {nearest(metric, VALIDATION_FIGURES)}")
    if not all(_splits(data)):
        raise UserError(f"--valid-subset {data.valid_subset!r}: a name is empty; --disable-validation does without")
    parse_dict("--optimizer-overrides", saving.optimizer_overrides)


def _updates(state: dict[str, Any] | None, options: CheckpointConfig) -> int:
    if state is None or options.reset_optimizer or state.get("last_optimizer_state") is None:
        return 0
    return int((state.get("optimizer_history") or [{}])[-1].get("num_updates", 0))


def _without_resets(args: argparse.Namespace) -> argparse.Namespace:
    """*args* for a later stage of the same run, which goes on from the one before."""
    kept = {name: value for name, value in vars(args).items() if not name.startswith("reset_")}
    return argparse.Namespace(**kept, **{name: False for name in vars(args) if name.startswith("reset_")})
