"""The lines of a run's log: which metrics, at what speed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from fairseq.config.settings import OptimizationConfig
from fairseq.data.iterator import EpochIterator
from fairseq.logging.figures import Meter
from fairseq.training.stages import Stage
from fairseq.training.trainer import Trainer


class Clock:
    """Seconds since it was made, and since the last lap; validations and saves are taken out.

    Args:
        meters: the run's; what they hold already does not count as done since.
        token_share: percentage of the devices' peak that a token per second needs; None: not known.
    """

    def __init__(self, meters: Mapping[str, Meter] | None = None, token_share: float | None = None) -> None:
        self.token_share = token_share
        self.before = {name: (meter.tokens, meter.updates) for name, meter in (meters or {}).items()}
        self.start = self.last = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return max(time.perf_counter() - self.start, 1e-9)

    def lap(self, ends: bool = True) -> float:
        """Seconds since the last lap, which *ends* now or goes on."""
        now = time.perf_counter()
        seconds = now - self.last
        if ends:
            self.last = now
        return max(seconds, 1e-9)

    def skip(self, since: float) -> None:
        """Leave out what has passed *since* a moment of ``time.perf_counter()``."""
        passed = time.perf_counter() - since
        self.start += passed
        self.last += passed

    def speeds(self, name: str, meter: Meter, seconds: float) -> dict[str, float]:
        """Tokens and updates a second that *meter*, called *name*, counted in *seconds*, without restored ones.

        ``mfu``, the model FLOPs utilisation in percent, is added where it is known.
        """
        tokens, updates = self.before[name]
        speeds = {"wps": (meter.tokens - tokens) / seconds, "ups": (meter.updates - updates) / seconds}
        return speeds if self.token_share is None else {**speeds, "mfu": self.token_share * speeds["wps"]}


def interval_line(
    trainer: Trainer, batches: EpochIterator, stage: Stage | None, clock: Clock, ends: bool = True
) -> dict[str, Any]:
    """Metrics of the updates since the interval began; if it *ends*, the next one begins.

    A line within the interval leaves its sums as they are, so that the line at its end is fairseq's.
    """
    meter = trainer.meters["train_inner"]
    report = meter.report(trainer.figures)
    speeds = clock.speeds("train_inner", meter, clock.lap(ends))
    if ends:
        meter.reset()
        clock.before["train_inner"] = (0.0, 0)
    return _line(trainer, batches, stage, report, speeds)


def epoch_line(trainer: Trainer, batches: EpochIterator, stage: Stage | None, clock: Clock) -> dict[str, Any]:
    """Metrics of an epoch."""
    meter = trainer.meters["train"]
    speeds = clock.speeds("train", meter, clock.elapsed())
    return _line(trainer, batches, stage, meter.report(trainer.figures), speeds)


def validation_line(epoch: int, stage: Stage | None, report: Mapping[str, float], wps: float) -> dict[str, Any]:
    """Metrics of a validation in fairseq's order: the speed before ``wpb`` and ``bsz``."""
    sizes = {name: report[name] for name in ("wpb", "bsz")}
    metrics = {name: value for name, value in report.items() if name not in sizes}
    return {"epoch": epoch, **stage_line(stage), **metrics, "wps": wps, **sizes}


def is_due(updates: int, interval: int) -> bool:
    """Return whether something that is done every *interval* updates, 0 never, follows update *updates*."""
    return interval > 0 and updates % interval == 0


def total_updates(cfg: OptimizationConfig, num_updates: int, batches: EpochIterator) -> int | None:
    """Return the updates of the whole run, by the limit that comes first; None without one.

    *batches* of training stand at the position that *num_updates* have reached; ``max_update`` is the last stage's.
    """
    limits = [cfg.max_update] if cfg.max_update else []
    if cfg.max_epoch:
        frequency = cfg.update_freq[min(batches.epoch, len(cfg.update_freq)) - 1]
        # The last group of an epoch is an update, however few batches it has.
        rest = math.ceil((len(batches) - batches.iterations_in_epoch) / frequency)
        later = max(cfg.max_epoch - batches.epoch, 0) * math.ceil(len(batches) / cfg.update_freq[-1])
        limits.append(num_updates + rest + later)
    return min(limits) if limits else None


def seconds_left(line: Mapping[str, Any], cfg: OptimizationConfig, batches: EpochIterator, wall: float) -> float | None:
    """Return the seconds to the end of the run at the speed of *line*; see :func:`total_updates`."""
    if line["ups"] <= 0:
        return None
    total = total_updates(cfg, line["num_updates"], batches)
    limits = [] if total is None else [(total - line["num_updates"]) / line["ups"]]
    # The clock of the run goes on where the restored run stopped it.
    if cfg.stop_time_hours:
        limits.append(cfg.stop_time_hours * 3600 - wall)
    return max(min(limits), 0.0) if limits else None


def stage_line(stage: Stage | None) -> dict[str, int]:
    """Number and length of the stage; nothing where a run has no stages."""
    return {} if stage is None else {"stage": stage.number, "tokens_per_sample": stage.tokens_per_sample}


def _line(
    trainer: Trainer, batches: EpochIterator, stage: Stage | None, report: dict[str, float], speeds: dict[str, float]
) -> dict[str, Any]:
    # fairseq's order, which scripts that read its logs rely on.
    return {
        "epoch": batches.epoch,
        "update": batches.epoch - 1 + batches.iterations_in_epoch / max(len(batches), 1),
        **stage_line(stage),
        **{name: report[name] for name in trainer.figures if name in report},
        **speeds,
        **{name: report[name] for name in ("wpb", "bsz")},
        "num_updates": trainer.num_updates,
        "lr": trainer.get_lr(),
        **{name: report[name] for name in ("gnorm", "clip") if name in report},
        **({"loss_scale": trainer.scaler.scale} if trainer.scaler is not None else {}),
    }
