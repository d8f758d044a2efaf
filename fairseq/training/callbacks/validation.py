"""Validation of a run: its metrics, and the best of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from fairseq.data.iterator import EpochIterator
from fairseq.errors import UserError, nearest
from fairseq.training import log
from fairseq.training.callbacks.callback import Callback
from fairseq.training.clock import Clock
from fairseq.training.log import Reporter
from fairseq.training.state import TrainingState
from fairseq.training.validation import evaluate

T = TypeVar("T")


class Validation(Callback):
    """Validates on every split where it is due;
    the first split's *metric* decides which update is the best.

    A signal ends a validation after its batch. It stays due, and the resumed run begins with it.
    """

    def __init__(self, metric: str, max_steps: int | None, reporter: Reporter) -> None:
        self.metric = metric
        self.max_steps = max_steps
        self.reporter = reporter

    def validate(self, state: TrainingState) -> None:
        if not state.due.validate or state.interrupted:
            return
        with state.clock.paused():
            metric = self.measure(state)
        if metric is not None:
            state.due = replace(state.due, validate=False)
            state.metric, state.is_best = metric, state.best.is_worth_saving(metric)
            state.best = state.best.validated(metric)

    def measure(self, state: TrainingState) -> float | None:
        """Log the metrics of every split; return the first
        split's metric, None if a signal came meanwhile."""
        lines: list[tuple[dict[str, object], str]] = []
        metrics: list[float] = []
        for split, batches in state.validation.items():
            batches.load_state_dict({"epoch": 1, "iterations_in_epoch": 0})
            clock, steps = Clock(), self.steps(batches)
            samples = itertools.islice(batches, steps)
            with self.reporter.bar(samples, state.due.epoch, steps, prefix=f"valid on {split!r} subset") as bar:
                meter = evaluate(state, _until_interrupted(state, bar))
                if state.interrupted:
                    return None
                report = meter.report(state.figures)
                if self.metric not in report:
                    # Names of figures may be known only once they were logged.
                    near = nearest(self.metric, list(report))
                    raise UserError(f"`best_checkpoint_metric` {self.metric}: not a figure of validation; {near}")
                # As in fairseq, the first split alone decides which checkpoint is the best.
                best = report[self.metric] if metrics else state.best.better(report[self.metric])
                stats = log.validation_line(state.due.epoch, state.stage, report, meter.tokens / clock.elapsed())
                stats |= {"num_updates": state.num_updates, f"best_{self.metric}": best, "wall": state.wall()}
                lines.append((bar.print(stats, tag=split), split))
            metrics.append(report[self.metric])
        # Once all splits are done: a validation that is interrupted is repeated.
        for line, split in lines:
            self.reporter.record(line, split, state.num_updates)
        return metrics[0]

    def steps(self, batches: EpochIterator) -> int:
        """Return the number of *batches* of a split that a validation reads."""
        return min(len(batches), self.max_steps or len(batches))


def _until_interrupted(state: TrainingState, samples: Iterable[T]) -> Iterator[T]:
    for sample in samples:
        if state.votes.poll("interrupted"):
            return
        yield sample
