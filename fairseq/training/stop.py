"""Stopping early, by a signal or by the clock: all ranks agree on the update, and on the command that goes on."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fairseq.checkpoint.manager import LAST
from fairseq.distributed import World
from fairseq.logging.figures import NamedSums
from fairseq.settings import CheckpointConfig

_VOTES = ("votes_late", "votes_interrupted", "votes_save")
_ELSEWHERE = ("--restore-file", "--finetune-from-model")  # a run that goes on starts from its own checkpoint


class StopVote:
    """The ranks' decision to stop or to save, taken with every update's sums, in the same reduction.

    One process decides on the host, without any tensor. Several read the votes where reading costs nothing: on CPUs at
    once, on GPUs those of the update before, which the device has finished by then. Every rank reads the same votes.

    Args:
        world: the processes.
        wishes: returns whether this process is (out of time, interrupted, due to save); called once an update.
    """

    def __init__(self, world: World, wishes: Callable[[], tuple[bool, bool, bool]]) -> None:
        self.world = world
        self.wishes = wishes
        self.late = False
        self.interrupted = False
        self.save_due = False
        self.on_host = world.size == 1
        self.delayed = world.device.type == "cuda"
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None
        self._answered = False  # a checkpoint was saved after the pending votes were cast

    @property
    def decided(self) -> bool:
        """Return whether the run stops after this update."""
        return self.late or self.interrupted

    def saved(self) -> None:
        """Tell, on every rank after the same update, that a checkpoint was saved: wishes for one are answered."""
        self.save_due = False
        self._answered = self._pending is not None

    def reduced(self, sums: NamedSums) -> NamedSums:
        """Return *sums* reduced over ranks; the votes are cast and counted on the way."""
        wishes = self.wishes()
        if self.on_host:
            self.late, self.interrupted, self.save_due = wishes
            return sums
        votes = torch.tensor(wishes, dtype=sums.values.dtype).to(sums.values.device, non_blocking=True)
        with_votes = NamedSums((*sums.names, *_VOTES), torch.cat([sums.values, votes]), sums.rows)
        total = with_votes.reduced(self.world)
        self._count(total.values[len(sums.names) :])
        return NamedSums(sums.names, total.values[: len(sums.names)], total.rows)

    def _count(self, votes: Tensor) -> None:
        if not self.delayed:
            self._read(votes)
            return
        before, self._pending = self._pending, _start_copy(votes)
        if before is not None:
            before[1].synchronize()  # of the update before: the device is busy with this one meanwhile
            self._read(before[0])
            # These votes were cast before the checkpoint that the votes before them asked for.
            self.save_due = self.save_due and not self._answered
        self._answered = False

    def _read(self, votes: Tensor) -> None:
        self.late, self.interrupted, self.save_due = (bool(vote) for vote in votes.tolist())


def _start_copy(votes: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Start to copy *votes* from the device; return the copy, and what tells when it is complete."""
    copy = torch.empty(votes.shape, dtype=votes.dtype, pin_memory=True).copy_(votes, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return copy, copied


def describe_interruption(number: int, updates: int, saving: CheckpointConfig) -> str:
    """Return what the log says of a run that the signal *number* stopped after *updates*: how to go on."""
    for flag in ("no_save", "no_last_checkpoints"):
        if getattr(saving, flag):
            then = f"nothing to go on from was saved (--{flag.replace('_', '-')})"
            break
    else:
        then = f"saved {Path(saving.save_dir) / LAST}; to go on: {continuation(sys.argv)}"
    return f"stopped by {signal.Signals(number).name} after update {updates}; {then}"


def continuation(argv: Sequence[str]) -> str:
    """Return the command that goes on with a run which ``sys.argv`` *argv* started, without flags that restart it."""
    program, *words = argv
    path = Path(program)
    if path.parent.name == "fairseq_cli":
        start = ["python", "-m", f"fairseq_cli.{path.stem}"]
    else:
        start = ["python", program] if path.suffix == ".py" else [path.name]
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in _ELSEWHERE:
            skip = True
        elif not word.startswith(("--reset-", *(f"{flag}=" for flag in _ELSEWHERE))):
            kept.append(word)
    return shlex.join([*start, *kept])
