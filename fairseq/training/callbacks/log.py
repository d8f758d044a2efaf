"""Lines of the log and the recorders, and the progress bar of training."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Iterator

from fairseq.logging.figures import Meter
from fairseq.logging.progress import ProgressBar, RunProgress
from fairseq.training import log
from fairseq.training.callbacks.callback import Callback
from fairseq.training.log import Reporter
from fairseq.training.state import TrainingState
from fairseq.training.utilisation import token_share

logger = logging.getLogger(__name__)


class Log(Callback):
    """Describes the run, and shows the metrics of intervals and of epochs."""

    def __init__(self, reporter: Reporter, arch: str) -> None:
        self.reporter = reporter
        self.arch = arch
        self.progress = RunProgress(0, 0)
        self.shown: Meter | None = None  # what the loss in the bar was made of, in the present interval
        self.bar: ProgressBar[None] | None = None
        self.steps: Iterator[None] = iter(())

    @contextlib.contextmanager
    def running(self, state: TrainingState) -> Iterator[None]:
        self.describe(state)
        if state.end is not None:
            logger.info(state.end.describe_nothing_to_do(state.num_updates))
        self.progress = RunProgress(state.num_updates, state.num_updates)
        with self.reporter.recording(state.num_updates):
            try:
                yield
            finally:
                self._close()

    def begin_epoch(self, state: TrainingState) -> None:
        batches, size = state.batches, state.frequency
        state.clock.token_share = token_share(state)
        self.progress.total = log.total_updates(state.cfg, state.num_updates, batches)
        done, total = math.ceil(batches.iterations_in_epoch / size), math.ceil(len(batches) / size)
        self.bar = self.reporter.bar(itertools.repeat(None), batches.epoch, total, start=done, run=self.progress)
        self.steps = iter(self.bar)

    def before_update(self, state: TrainingState) -> None:
        next(self.steps)

    def after_update(self, state: TrainingState) -> None:
        assert self.bar is not None
        updates = state.num_updates
        if state.applied:
            line = self.bar.log(
                lambda: self.interval(state),
                "train_inner",
                updates,
                lambda line: log.seconds_left(line, state.cfg, state.batches, state.wall()),
            )
            self.reporter.record(line, "train_inner", updates)
            if state.meters["train_inner"].updates:
                self.bar.show_loss(lambda: self.present_loss(state))
        if state.batches.end_of_epoch:
            self.reporter.record(self.bar.print(log.epoch_line(state), tag="train"), "train", updates)

    def complete(self, state: TrainingState) -> None:
        if state.batches.end_of_epoch:
            self._close()

    def interval(self, state: TrainingState) -> dict[str, object]:
        """Return the line of the updates since the last interval ended."""
        ends = log.is_due(state.num_updates, self.reporter.common.log_interval)
        if ends:
            self.shown = None
        return log.interval_line(state, ends)

    def present_loss(self, state: TrainingState) -> float:
        """Return the loss of the updates since the last call,
        in this interval; NaN if there are none."""
        meter = state.meters["train_inner"]
        recent = meter if self.shown is None else meter.since(self.shown)
        self.shown = meter.copy()
        return recent.report(state.figures).get("loss", math.nan)

    def describe(self, state: TrainingState) -> None:
        """Log the sizes of model and data, and where the run computes."""
        count = sum(p.numel() for p in state.model.parameters())
        stage = f", stage {state.stage.number} ({state.stage.tokens_per_sample} tokens)" if state.stage else ""
        logger.info(
            "%s: %s parameters on %s%s%s",
            self.arch,
            f"{count:,}",
            state.world.device,
            f" × {state.world.size} processes" if state.world.size > 1 else "",
            stage,
        )
        for line in log.opening_lines(state.settings, state.num_updates, state.batches):
            logger.info(line)

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
