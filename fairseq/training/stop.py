"""The end of a run: its limits, the ranks' decision to stop before them, and the commands that follow."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from fairseq.checkpoint.manager import BEST, LAST
from fairseq.config.settings import CheckpointConfig, TrainingSettings
from fairseq.data.folders import data_folders
from fairseq.distributed import World
from fairseq.logging.figures import NamedSums
from fairseq.system.lookup import exists, is_file

_VOTES = ("votes_late", "votes_interrupted", "votes_save")
# A run that goes on starts from its own checkpoint.
_ELSEWHERE = ("--restore-file", "--finetune-from-model")


class StopVote:
    """The ranks' decision to stop or to save, taken with every update's sums, in the same reduction.

    One process decides on the host, without any tensor. Several read the votes where reading costs nothing: on CPUs at
    once, on GPUs the previous update's, which the device has finished by then. Every rank reads the same votes.

    Args:
        wishes: returns whether this process is (out of time, interrupted, due to save); called once an update.
    """

    def __init__(self, world: World, wishes: Callable[[], tuple[bool, bool, bool]]) -> None:
        self.world = world
        self.wishes = wishes
        self.late = self.interrupted = self.save_due = False
        self.on_host = world.size == 1
        self.delayed = world.device.type == "cuda"
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None
        # A checkpoint was saved after the pending votes were cast.
        self._answered = False

    @property
    def decided(self) -> bool:
        """Return whether the run stops after this update."""
        return self.late or self.interrupted

    def saved(self) -> None:
        """Tell, on every rank after the same update, that a checkpoint was saved: wishes for one are answered."""
        self.save_due = False
        self._answered = self._pending is not None

    def poll(self) -> bool:
        """Vote between two updates, on every rank; return whether the run is interrupted."""
        # The other wishes wait for an update: they last.
        late, save_due = self.late, self.save_due
        self.reduced(NamedSums((), torch.zeros(0, dtype=torch.float64, device=self.world.device), {}))
        self.late, self.save_due = late, save_due
        return self.interrupted

    def reduced(self, sums: NamedSums) -> NamedSums:
        """Return *sums* reduced over ranks; the votes are cast and counted on the way."""
        wishes = self.wishes()
        if self.on_host:
            self.late, self.interrupted, self.save_due = wishes
            return sums
        # In the reduction of the sums: one of their own would synchronise processes twice an update.
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
            # Of the update before: the device is busy with this one meanwhile.
            before[1].synchronize()
            self._read(before[0])
            # These votes were cast before the checkpoint that the votes before them asked for.
            self.save_due = self.save_due and not self._answered
        self._answered = False

    def _read(self, votes: Tensor) -> None:
        self.late, self.interrupted, self.save_due = (bool(vote) for vote in votes.tolist())


def _start_copy(votes: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Start to copy *votes* from the device; return the copy, and what tells when it is complete."""
    # Pinned: a copy to pageable memory blocks the host.
    copy = torch.empty(votes.shape, dtype=votes.dtype, pin_memory=True).copy_(votes, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return copy, copied


@dataclass(frozen=True)
class Limit:
    """A *setting*, flag and value, that ends training, and the *remedy* that lets training go on."""

    setting: str
    remedy: str = "raise"

    def describe_nothing_to_do(self, updates: int) -> str:
        """Return the message of a run that is complete before its first update."""
        return f"nothing to do: {self.setting} is reached after {updates} updates; {self.remedy} it to train on"


def describe_end(
    limit: Limit, updates: int, seconds: float, best: tuple[str, float] | None, following: str | None
) -> str:
    """Return the last message of a run that *limit* ended after *seconds*.

    Args:
        best: name and value of the best validation metric; None without a validation.
        following: the command to use next; None where nothing was saved.
    """
    parts = [
        f"done training in {seconds:.1f} seconds ({timedelta(seconds=round(seconds))})",
        f"{limit.setting} is reached after {updates} updates",
        f"best validation {best[0]} {best[1]:.4g}" if best is not None else "no validation",
    ]
    return "; ".join([*parts, *([f"next: {following}"] if following else [])])


def evaluation(settings: TrainingSettings, command: str, argv: Sequence[str]) -> str | None:
    """Return the command that evaluates the best checkpoint of a run, or else the last; None if there is none.

    *command* is the module of :mod:`fairseq_cli` that evaluates checkpoints of the task.
    """
    folder, data = Path(settings.checkpoint.save_dir), settings.data
    path = next((folder / name for name in (BEST, LAST) if exists(folder / name)), None)
    if settings.checkpoint.no_save or path is None:
        return None
    words = [*_program(argv[0], command), settings.data_path, "--path", str(path)]
    split = data.valid_subset.split(",")[0].strip()
    if command == "eval_lm":
        # A folder without a test split: what there is to evaluate is the validation split.
        first = data_folders(settings.data_path)[0]
        words += [] if exists(first / f"{data.gen_subset}.idx") else ["--gen-subset", split]
    elif split != "valid":
        words += ["--valid-subset", split]
    if settings.common.user_dir is not None:
        words += ["--user-dir", settings.common.user_dir]
    return shlex.join(words)


def further(settings: TrainingSettings, argv: Sequence[str], generates: bool) -> str | None:
    """Return what can be done with a run that has ended, beside its evaluation; None where nothing was saved."""
    if settings.checkpoint.no_save:
        return None
    folder = settings.checkpoint.save_dir
    curves = shlex.join([*_program(argv[0], "plot"), folder])
    text = shlex.join([*_program(argv[0], "interactive"), folder])
    return f"write text: {text}; draw curves: {curves}" if generates else f"draw curves: {curves}"


def describe_interruption(number: int, updates: int, saving: CheckpointConfig) -> str:
    """Return what the log says of a run that the signal *number* stopped after *updates*: how to go on."""
    if saving.no_save or saving.no_last_checkpoints:
        then = f"nothing to go on from was saved (`{'no_save' if saving.no_save else 'no_last_checkpoints'}`)"
    else:
        then = f"saved {Path(saving.save_dir) / LAST}; to go on: {continuation(sys.argv)}"
    return f"stopped by {signal.Signals(number).name} after update {updates}; {then}"


def continuation(argv: Sequence[str]) -> str:
    """Return the command that goes on with a run which ``sys.argv`` *argv* started, without flags that restart it."""
    program, *words = argv
    path = Path(program)
    if path.parent.name == "fairseq_cli":
        command = ["python", "-m", f"fairseq_cli.{path.stem}"]
    else:
        command = ["python", program] if path.suffix == ".py" else [path.name]
    remaining = iter(words)
    for word in remaining:
        if word in _ELSEWHERE:
            next(remaining, None)  # its value
        elif not word.startswith(("--reset-", *(f"{flag}=" for flag in _ELSEWHERE))):
            command.append(word)
    return shlex.join(command)


def _program(program: str, command: str) -> list[str]:
    """The words that start *command*, a module of :mod:`fairseq_cli`, in the way *program* was started."""
    path = Path(program)
    if path.parent.name == "fairseq_cli":
        return ["python", "-m", f"fairseq_cli.{command}"]
    if path.suffix == ".py" and is_file(path.parent / f"{command}.py"):
        return ["python", str(path.parent / f"{command}.py")]
    return [f"fairseq-{command.replace('_', '-')}"]
