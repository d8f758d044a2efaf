"""The lines of a run's log: which figures, at what speed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fairseq.data.iterator import EpochIterator
from fairseq.logging.figures import Meter
from fairseq.settings import OptimizationConfig
from fairseq.training.stages import Stage
from fairseq.training.trainer import Trainer


class Clock:
    """Seconds since it was made, and since the last lap; validations and saves are taken out.

    Args:
        meters: those of the run; what they hold already does not count as done since.
        token_share: percentage of the devices' peak that a token per second needs; None: not known.
    """

    def __init__(self, meters: Mapping[str, Meter] | None = None, token_share: float | None = None) -> None:
        self.token_share = token_share
        self.before = {name: (meter.tokens, meter.updates) for name, meter in (meters or {}).items()}
        self.start = self.last = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return max(time.perf_counter() - self.start, 1e-9)

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        return max(seconds, 1e-9)

    def skip(self, since: float) -> None:
        """Leave out what has passed *since* a moment of ``time.perf_counter()``."""
        passed = time.perf_counter() - since
        self.start += passed
        self.last += passed

    def speeds(self, name: str, meter: Meter, seconds: float) -> dict[str, float]:
        """Tokens and updates a second that *meter*, called *name*, counted in *seconds*; restored ones left out.

        ``mfu``, the model FLOPs utilisation in percent, is added where it is known.
        """
        tokens, updates = self.before[name]
        found = {"wps": (meter.tokens - tokens) / seconds, "ups": (meter.updates - updates) / seconds}
        return found if self.token_share is None else {**found, "mfu": self.token_share * found["wps"]}


def interval_line(trainer: Trainer, batches: EpochIterator, stage: Stage | None, clock: Clock) -> dict[str, Any]:
    """Figures of the updates since the last line, which are then forgotten."""
    meter = trainer.meters["train_inner"]
    report = meter.report(trainer.figures)
    speeds = clock.speeds("train_inner", meter, clock.lap())
    meter.reset()
    clock.before["train_inner"] = (0.0, 0)
    return _line(trainer, batches, stage, report, speeds)


def epoch_line(trainer: Trainer, batches: EpochIterator, stage: Stage | None, clock: Clock) -> dict[str, Any]:
    """Figures of an epoch."""
    meter = trainer.meters["train"]
    speeds = clock.speeds("train", meter, clock.elapsed())
    return _line(trainer, batches, stage, meter.report(trainer.figures), speeds)


def is_late(cfg: OptimizationConfig, wall: float) -> bool:
    """Return whether *wall* seconds of training exceed ``--stop-time-hours``."""
    return 0 < cfg.stop_time_hours * 3600 < wall


def seconds_left(line: Mapping[str, Any], cfg: OptimizationConfig, batches: int, wall: float) -> float | None:
    """Return the seconds to the end of the run at the speed of *line*, by the limit that comes first; None without one.

    Args:
        line: figures of the log.
        cfg: the limits.
        batches: batches in an epoch.
        wall: seconds of training so far.
    """
    limits = []
    if cfg.max_update:  # of the last stage, in a run with stages
        limits.append((cfg.max_update - line["num_updates"]) / line["ups"])
    if cfg.max_epoch:
        limits.append((cfg.max_epoch - line["update"]) * batches / cfg.update_freq[-1] / line["ups"])
    if cfg.stop_time_hours:
        limits.append(cfg.stop_time_hours * 3600 - wall)
    return max(min(limits), 0.0) if limits and line["ups"] > 0 else None


def stage_line(stage: Stage | None) -> dict[str, int]:
    """Number and length of the stage; nothing where a run has no stages."""
    return {} if stage is None else {"stage": stage.number, "tokens_per_sample": stage.tokens_per_sample}


def _line(
    trainer: Trainer,
    batches: EpochIterator,
    stage: Stage | None,
    report: dict[str, float],
    speeds: dict[str, float],
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "epoch": batches.epoch,
        "update": batches.epoch - 1 + batches.iterations_in_epoch / max(len(batches), 1),
        **stage_line(stage),
        **{name: report[name] for name in trainer.figures if name in report},
        **speeds,
        **{name: report[name] for name in ("wpb", "bsz")},
        "num_updates": trainer.num_updates,
        "lr": trainer.get_lr(),
        **{name: report[name] for name in ("gnorm", "clip") if name in report},
    }
    if trainer.scaler is not None:
        line["loss_scale"] = trainer.scaler.scale
    return line
