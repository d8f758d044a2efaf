"""The lines of a run's log: which metrics, at what speed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from fairseq.config.settings import CheckpointConfig, CommonConfig, OptimizationConfig, TrainingSettings
from fairseq.data.iterator import EpochIterator
from fairseq.distributed import World
from fairseq.logging.progress import ProgressBar, progress_bar
from fairseq.logging.recorders import Record, recording
from fairseq.training.length import frequency, updates_left
from fairseq.training.stages import Stage
from fairseq.training.state import TrainingState

T = TypeVar("T")


class Reporter:
    """Shows metrics by progress bars, and writes them
    to the recorders; processes but the first do neither."""

    def __init__(
        self, common: CommonConfig, saving: CheckpointConfig, world: World, flat: Mapping[str, object] | None = None
    ) -> None:
        self.common, self.flat = common, flat
        self.saving = saving
        self.is_first = world.is_first
        self._record: Record = lambda values, tag, step: None

    @contextlib.contextmanager
    def recording(self, updates: int) -> Iterator[None]:
        """Open the recorders of a run that has made
        so many *updates*, inside the ``with`` block."""
        common, saving = self.common if self.is_first else None, self.saving
        with recording(common, saving.save_dir, updates, not saving.no_save, self.flat) as self._record:
            yield

    def record(self, values: Mapping[str, object] | None, tag: str, step: int) -> None:
        """Write *values*, what they are of (``train_inner``, ``train`` or a split), and step; None:
        no line is due."""
        self._record(values, tag, step)

    def bar(self, items: Iterable[T], epoch: int, total: int, **shown_at: Any) -> ProgressBar[T]:
        """Return *items* as a progress bar."""
        log_format = self.common.log_format or ("simple" if self.common.no_progress_bar else None)
        resolved = log_format if self.is_first else "none"
        interval = self.common.log_interval
        return progress_bar(items, log_format=resolved, log_interval=interval, epoch=epoch, total=total, **shown_at)


def interval_line(state: TrainingState, ends: bool = True) -> dict[str, object]:
    """Metrics of the updates since the interval began; if it *ends*, the next one begins.

    A line within the interval leaves its sums as they are,
    so that the line at its end is fairseq's.
    """
    meter, clock = state.meters["train_inner"], state.clock
    report = meter.report(state.figures)
    speeds = clock.speeds("train_inner", meter, clock.lap(ends))
    if ends:
        meter.reset()
        clock.before["train_inner"] = (0.0, 0)
    return _line(state, report, speeds)


def epoch_line(state: TrainingState) -> dict[str, object]:
    """Metrics of an epoch."""
    meter = state.meters["train"]
    speeds = state.clock.speeds("train", meter, state.clock.elapsed())
    return _line(state, meter.report(state.figures), speeds)


def validation_line(epoch: int, stage: Stage | None, report: Mapping[str, float], wps: float) -> dict[str, object]:
    """Metrics of a validation in fairseq's order: the speed before ``wpb`` and ``bsz``."""
    sizes = {name: report[name] for name in ("wpb", "bsz")}
    metrics = {name: value for name, value in report.items() if name not in sizes}
    return {"epoch": epoch, **stage_line(stage), **metrics, "wps": wps, **sizes}


def is_due(updates: int, interval: int) -> bool:
    """Return whether something that is done every *interval*
    updates, 0 never, follows update *updates*."""
    return interval > 0 and updates % interval == 0


def total_updates(cfg: OptimizationConfig, num_updates: int, batches: EpochIterator) -> int | None:
    """Return the updates of the whole run, by the limit that comes first; None without one.

    *batches* of training stand at the position that *num_updates* have reached; ``max_update`` is
    the last stage's.
    """
    limits = [cfg.max_update] if cfg.max_update else []
    if cfg.max_epoch:
        limits.append(num_updates + updates_left(cfg, batches, cfg.max_epoch, batches.known_counts()))
    return min(limits) if limits else None


def opening_lines(settings: TrainingSettings, num_updates: int, batches: EpochIterator) -> list[str]:
    """Return how much data an update and an epoch read,
    how long the run is, its precision and its folder."""
    cfg, common = settings.optimization, settings.common
    per_epoch = math.ceil(len(batches) / frequency(cfg, batches.epoch))
    sizes = getattr(batches.dataset, "sizes", None)
    tokens = int(sizes.sum()) if sizes is not None else 0
    data = f"{per_epoch:,} updates per epoch"
    if tokens and per_epoch:
        data = f"{tokens:,} tokens per epoch in {per_epoch:,} updates of {tokens // per_epoch:,}"
    total = total_updates(cfg, num_updates, batches)
    left = None if total is None else max(total - num_updates, 0)
    to_come = "no limit: Ctrl-C saves and ends" if left is None else f"{left:,} updates to come"
    if left is not None and per_epoch:
        to_come += f" ({left / per_epoch:.2g} epochs)"
    precision = "bfloat16" if common.bf16 else "float16" if common.fp16 else "float32"
    saved = "nothing is saved" if settings.checkpoint.no_save else f"saved in {settings.checkpoint.save_dir}"
    return [data, f"{to_come}; {precision}; {saved}"]


def seconds_left(line: Mapping[str, Any], cfg: OptimizationConfig, batches: EpochIterator, wall: float) -> float | None:
    """Return the seconds to the end of the run at the speed
    of *line*; see :func:`total_updates`."""
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


def _line(state: TrainingState, report: dict[str, float], speeds: dict[str, float]) -> dict[str, object]:
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
        "train_wall": state.clock.elapsed(),
        "wall": state.wall(),
    }
