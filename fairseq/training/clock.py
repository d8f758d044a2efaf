"""The clock of an epoch, from which the speeds of the log follow."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from fairseq.logging.figures import Meter


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

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the ``with`` block: speeds of the log are of training alone."""
        since = time.perf_counter()
        yield
        passed = time.perf_counter() - since
        self.start += passed
        self.last += passed

    def speeds(self, name: str, meter: Meter, seconds: float) -> dict[str, float]:
        """Tokens and updates a second that *meter*, called *name*,
        counted in *seconds*, without restored ones.

        ``mfu``, the model FLOPs utilisation in percent, is added where it is known.
        """
        tokens, updates = self.before[name]
        speeds = {"wps": (meter.tokens - tokens) / seconds, "ups": (meter.updates - updates) / seconds}
        return speeds if self.token_share is None else {**speeds, "mfu": self.token_share * speeds["wps"]}
