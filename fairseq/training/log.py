"""The log of a run: its lines, progress bar and recorders."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fairseq.checkpoint.manager import LAST
from fairseq.config.settings import CheckpointConfig, OptimizationConfig, TrainingSettings
from fairseq.data.iterator import EpochIterator
from fairseq.distributed import World
from fairseq.errors import counted
from fairseq.logging.figures import RunningSums
from fairseq.logging.progress import ProgressBar, RunProgress, progress_bar
from fairseq.logging.recorders import Record, recording
from fairseq.system.terminal import duration, printable
from fairseq.training.effective import plain_settings
from fairseq.training.length import frequency, total_updates
from fairseq.training.stages import Stage
from fairseq.training.state import TrainingState

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Clock:
    """Seconds since it was made, and since the last lap; validations and saves are taken out.

    Args:
        meters: the run's; what they hold already does not count as done since.
    """

    def __init__(self, meters: Mapping[str, RunningSums]) -> None:
        self.before = {name: (meter.tokens, meter.updates) for name, meter in meters.items()}
        self.start = self.last = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return max(time.perf_counter() - self.start, 1e-9)

    def lap(self, ends: bool = True) -> float:
        """Seconds since the last lap, which *ends* now or goes on."""
        now, last = time.perf_counter(), self.last
        self.last = now if ends else last
        return max(now - last, 1e-9)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the ``with`` block: speeds of the log are of training alone."""
        since = time.perf_counter()
        yield
        passed = time.perf_counter() - since
        self.start += passed
        self.last += passed

    def speeds(self, name: str, meter: RunningSums, seconds: float) -> dict[str, float]:
        """Tokens and updates a second that *meter*, called *name*,
        counted in *seconds*, without restored ones."""
        tokens, updates = self.before[name]
        return {"wps": (meter.tokens - tokens) / seconds, "ups": (meter.updates - updates) / seconds}


class RunLog:
    """The log of a run, or of one of its stages; processes but the first show nothing.

    Args:
        settings: of the run, or of the stage.
    """

    def __init__(self, settings: TrainingSettings, world: World) -> None:
        self.settings = settings
        self.is_first = world.is_first
        self.progress = RunProgress(0, 0)
        self.shown: RunningSums | None = None  # what the loss in the bar was made of, in the present interval
        self._record: Record = lambda values, tag, step: None

    @contextlib.contextmanager
    def recording(self, state: TrainingState) -> Iterator[None]:
        """Describe *state*, and open the recorders of its run in a ``with`` statement."""
        self.clock = Clock(state.meters)
        self.progress = RunProgress(state.num_updates, state.num_updates)
        for line in opening_lines(state):
            logger.info("%s", line)
        saving = self.settings.checkpoint
        common = self.settings.common if self.is_first else None
        # A setting such as `bf16` does not tell: a processor may compute in float32 instead.
        config = plain_settings(state.settings) | {"precision": state.precision.name(state.world.device)}
        with recording(common, saving.save_dir, state.num_updates, not saving.no_save, config) as self._record:
            yield

    def bar(self, items: Iterable[T], epoch: int, total: int, **shown_at: Any) -> ProgressBar[T]:
        """Return *items* as a progress bar."""
        common = self.settings.common
        log_format = common.log_format or ("simple" if common.no_progress_bar else None)
        return progress_bar(
            items,
            log_format=log_format if self.is_first else "none",
            log_interval=common.log_interval,
            epoch=epoch,
            total=total,
            **shown_at,
        )

    def epoch(self, state: TrainingState, updates: Iterable[T]) -> ProgressBar[T]:
        """Return the *updates* that are left of the epoch of *state* as a progress bar."""
        batches, size = state.batches, state.frequency
        self.clock = Clock(state.meters)
        self.progress.total = total_updates(state.cfg, state.num_updates, batches)
        done, total = math.ceil(batches.iterations_in_epoch / size), math.ceil(len(batches) / size)
        return self.bar(updates, batches.epoch, total, start=done, run=self.progress)

    def update(self, bar: ProgressBar[Any], state: TrainingState) -> None:
        """Show an update that was applied, where a line is due."""

        def line() -> dict[str, object]:
            ends = state.num_updates % self.settings.common.log_interval == 0
            if ends:
                self.shown = None
            return interval_line(state, self.clock, ends)

        shown = bar.log(
            line,
            "train_inner",
            state.num_updates,
            lambda line: seconds_left(line, state.cfg, state.batches, state.wall()),
        )
        self._record(shown, "train_inner", state.num_updates)
        if state.meters["train_inner"].updates:
            bar.show_loss(lambda: self._present_loss(state))

    def end_epoch(self, bar: ProgressBar[Any], state: TrainingState) -> None:
        """Show the metrics of an epoch."""
        self._record(bar.print(epoch_line(state, self.clock), tag="train"), "train", state.num_updates)

    def validation(self, bar: ProgressBar[Any], state: TrainingState, split: str, line: Mapping[str, object]) -> None:
        """Show the metrics of a validation of *split*."""
        self._record(bar.print(line, tag=split), split, state.num_updates)

    def sample(self, text: str, update: int) -> None:
        """Show a text that the model wrote."""
        logger.info("sample after update %d: %s", update, printable(text))

    def _present_loss(self, state: TrainingState) -> float:
        """Return the loss of the updates since the last call,
        in this interval; NaN if there are none."""
        meter = state.meters["train_inner"]
        recent = meter if self.shown is None else meter.since(self.shown)
        self.shown = meter.copy()
        return recent.report(state.figures).get("loss", math.nan)


def opening_lines(state: TrainingState) -> list[str]:
    """Return the size of the model, how much data an update and an epoch read, how long the run is,
    its precision and its folder."""
    settings, batches, world = state.settings, state.batches, state.world
    count = sum(p.numel() for p in state.model.parameters())
    processes = f" × {world.size} processes" if world.size > 1 else ""
    stage = f", stage {state.stage.number} ({state.stage.tokens_per_sample} tokens)" if state.stage else ""
    model = f"{settings.chosen.arch}: {count:,} parameters on {world.device}{processes}{stage}"
    per_epoch = math.ceil(len(batches) / frequency(state.cfg, batches.epoch))
    sizes = getattr(batches.dataset, "sizes", None)
    tokens = int(sizes.sum()) if sizes is not None else 0
    data = f"{counted(per_epoch, 'update')} per epoch"
    if tokens and per_epoch:
        data = f"{tokens:,} tokens per epoch in {counted(per_epoch, 'update')} of {tokens // per_epoch:,}"
    total = total_updates(state.cfg, state.num_updates, batches)
    to_come = "no limit: it ends with Ctrl-C"
    if total is not None:
        left = max(total - state.num_updates, 0)
        to_come = f"{counted(left, 'update')} to come" + (f" ({left / per_epoch:.2g} epochs)" if per_epoch else "")
    no_save, save_dir = settings.checkpoint.no_save, settings.checkpoint.save_dir
    saved = "nothing is saved" if no_save else f"saved in {save_dir}"
    return [model, data, f"{to_come}; {state.precision.name(world.device)}; {saved}"]


def interval_line(state: TrainingState, clock: Clock, ends: bool = True) -> dict[str, object]:
    """Metrics of the updates since the interval began; if it *ends*, the next one begins.

    A line within the interval leaves its sums as they are,
    so that the line at its end is fairseq's.
    """
    meter = state.meters["train_inner"]
    report = meter.report(state.figures)
    speeds = clock.speeds("train_inner", meter, clock.lap(ends))
    if ends:
        meter.reset()
        clock.before["train_inner"] = (0.0, 0)
    return _line(state, report, speeds, clock)


def epoch_line(state: TrainingState, clock: Clock) -> dict[str, object]:
    """Metrics of an epoch."""
    meter = state.meters["train"]
    speeds = clock.speeds("train", meter, clock.elapsed())
    return _line(state, meter.report(state.figures), speeds, clock)


def validation_line(epoch: int, stage: Stage | None, report: Mapping[str, float], wps: float) -> dict[str, object]:
    """Metrics of a validation in fairseq's order: the speed before ``wpb`` and ``bsz``."""
    sizes = {name: report[name] for name in ("wpb", "bsz")}
    metrics = {name: value for name, value in report.items() if name not in sizes}
    return {"epoch": epoch, **stage_line(stage), **metrics, "wps": wps, **sizes}


def stage_line(stage: Stage | None) -> dict[str, int]:
    """Number and length of the stage; nothing where a run has no stages."""
    return {} if stage is None else {"stage": stage.number, "tokens_per_sample": stage.tokens_per_sample}


def _line(state: TrainingState, report: dict[str, float], speeds: dict[str, float], clock: Clock) -> dict[str, object]:
    batches = state.batches
    # fairseq's order, which scripts that read its logs rely on.
    return {
        "epoch": batches.epoch,
        "update": batches.epoch - 1 + batches.iterations_in_epoch / max(len(batches), 1),
        **stage_line(state.stage),
        **{name: value for name, value in report.items() if name not in ("wpb", "bsz", "gnorm", "clip")},
        **speeds,
        **{name: report[name] for name in ("wpb", "bsz")},
        "num_updates": state.num_updates,
        "lr": state.get_lr(),
        **{name: report[name] for name in ("gnorm", "clip") if name in report},
        **({"loss_scale": state.scaler.scale} if state.scaler is not None else {}),
        "train_wall": clock.elapsed(),
        "wall": state.wall(),
    }


def seconds_left(line: Mapping[str, Any], cfg: OptimizationConfig, batches: EpochIterator, wall: float) -> float | None:
    """Return the seconds to the end of the run at the speed of *line*; None where that is not
    known."""
    if line["ups"] <= 0:
        return None
    total = total_updates(cfg, line["num_updates"], batches)
    limits = [] if total is None else [(total - line["num_updates"]) / line["ups"]]
    # The clock of the run goes on where the restored run stopped it.
    if cfg.stop_time_hours:
        limits.append(cfg.stop_time_hours * 3600 - wall)
    return max(min(limits), 0.0) if limits else None


def describe_end(state: TrainingState, seconds: float) -> str:
    """Return the last message of a run of *seconds* that ended by its settings."""
    metric = state.settings.checkpoint.best_checkpoint_metric
    result = "no validation" if state.best is None else f"best validation {metric} {state.best:.4g}"
    return f"done training in {seconds:.1f} seconds ({duration(seconds)}); {result}"


def describe_interruption(number: int, updates: int, saving: CheckpointConfig) -> str:
    """Return what the log says of a run that the signal
    *number* stopped after *updates*: how to go on."""
    if saving.no_save or saving.no_last_checkpoints:
        then = f"nothing to go on from was saved (`{'no_save' if saving.no_save else 'no_last_checkpoints'}`)"
    else:
        # These flags would begin anew.
        begins = saving.restore_file != LAST or saving.finetune_from_model or saving.reset_optimizer
        without = " without `restore_file`, `finetune_from_model` and `reset_optimizer`" if begins else ""
        then = f"saved {Path(saving.save_dir) / LAST}"
        if saving.no_save_optimizer_state:
            then += "; `no_save_optimizer_state`: the same command begins at update 0 with its weights"
        else:
            then += f"; the same command{without} goes on from there"
    return f"stopped by {signal.Signals(number).name} after update {updates}; {then}"
