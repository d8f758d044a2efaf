"""``fairseq-train`` with the processor and wall-clock time of training beside each validation.

    python -m benchmarks.clocked_training CURVE.json DATA --arch … \
        --validate-interval-updates 50 --no-save

Takes the flags of ``fairseq-train`` with one validation split. Writes a JSON list with an object
for each validation: ``updates``, ``cpu`` and ``seconds`` from the first update on, without
validations, and the perplexity ``ppl``. CPU time is summed over all threads.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fairseq.config import options
from fairseq.training import loop
from fairseq.training.state import Requests, TrainingState
from fairseq_cli import train
from fairseq_cli.common import get_training_parser


class Recorder:
    """The curve of a run, from its updates and validations.

    Args:
        clock: returns CPU time and wall-clock time in seconds.
    """

    def __init__(self, clock: Any = lambda: (time.process_time(), time.perf_counter())) -> None:
        self.clock = clock
        self.curve: list[dict[str, float]] = []
        self.begin: tuple[float, float] | None = None  # of the first update, later by what validations took

    def install(self) -> None:
        """Record the updates and validations of every run of this process: one for each stage."""
        update, evaluate = loop.update, loop.evaluate

        def clocked_update(state: TrainingState, samples: Any, ask: Any = Requests) -> bool:
            if self.begin is None:
                self.begin = self.clock()
            return update(state, samples, ask)

        def clocked_validation(state: TrainingState, batches: Iterable[Any]) -> Any:
            before = self.clock()
            meter = evaluate(state, batches)
            self.validated(state.num_updates, meter.report(state.figures)["ppl"], before)
            return meter

        loop.update, loop.evaluate = clocked_update, clocked_validation

    def validated(self, updates: int, ppl: float, before: tuple[float, float]) -> None:
        """Record a validation that began at *before* and ends now."""
        begin, now = self.begin or before, self.clock()
        cpu, seconds = (b - a for a, b in zip(begin, before, strict=True))
        self.curve.append({"updates": updates, "cpu": cpu, "seconds": seconds, "ppl": ppl})
        self.begin = (begin[0] + now[0] - before[0], begin[1] + now[1] - before[1])


def main() -> None:
    """Train, and write the curve when training has ended."""
    path, *flags = sys.argv[1:]
    recorder = Recorder()
    recorder.install()
    train.main(options.parse_args_and_arch(get_training_parser(), flags))
    Path(path).write_text(json.dumps(recorder.curve), encoding="utf-8")


if __name__ == "__main__":
    main()
