"""Decisions of all ranks, such as to stop or to save,
taken in the reduction of an update's sums."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fairseq.distributed import World
from fairseq.logging.figures import NamedSums
from fairseq.modules import devices


class Votes:
    """Decisions by name: one is taken when any rank wishes so, on every rank after the same update.

    One process decides on the host, without any tensor. Several read the votes where reading costs
    nothing: on CPUs at once, on GPUs the previous update's, which the device has finished by then.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.on_host = world.size == 1
        self.delayed = devices.is_accelerator(world.device)
        self._wishes: dict[str, Callable[[], bool]] = {}
        self._results: dict[str, bool] = {}
        self._pending: tuple[Tensor, torch.Event] | None = None
        # Decisions that were carried out after the pending votes were cast.
        self._answered: set[str] = set()

    def register(self, name: str, wish: Callable[[], bool]) -> None:
        """Let *wish*, asked once per update, decide on *name*
        for this rank; in the same order on every rank."""
        self._wishes[name] = wish
        self._results[name] = False

    def __getitem__(self, name: str) -> bool:
        """Return whether *name* is decided, the same on every rank."""
        return self._results.get(name, False)

    def answer(self, name: str) -> None:
        """Tell, on every rank after the same update, that what *name* decided is done."""
        self._results[name] = False
        if self._pending is not None:
            self._answered.add(name)

    def reduced(self, sums: NamedSums) -> NamedSums:
        """Return *sums* reduced over ranks; the votes are cast and counted on the way."""
        wishes, sums = [wish() for wish in self._wishes.values()], sums.gathered(self.world)
        if self.on_host:
            self._results = dict(zip(self._wishes, wishes, strict=True))
            return sums
        # In the reduction of the sums: one of their own
        # would synchronise processes twice per update.
        votes = torch.tensor(wishes, dtype=sums.values.dtype).to(sums.values.device, non_blocking=True)
        names = tuple(f"vote_{name}" for name in self._wishes)
        total = NamedSums((*sums.names, *names), torch.cat([sums.values, votes]), sums.rows).reduced(self.world)
        self._count(total.values[len(sums.names) :])
        return NamedSums(sums.names, total.values[: len(sums.names)], total.rows)

    def poll(self, name: str) -> bool:
        """Vote between two updates, on every rank; return whether *name* is decided."""
        before = self._results
        self.reduced(NamedSums((), torch.zeros(0, dtype=torch.float64, device=self.world.device), {}))
        # Other wishes last until the next update, which decides on them.
        self._results = {**before, name: self[name]}
        return self[name]

    def _count(self, votes: Tensor) -> None:
        if not self.delayed:
            self._read(votes)
            return
        before, self._pending = self._pending, devices.start_copy(votes)
        if before is not None:
            # Of the update before: the device is busy with this one meanwhile.
            before[1].synchronize()
            self._read(before[0])
            # These votes were cast before what the votes before them asked for was done.
            self._results |= dict.fromkeys(self._answered, False)
        self._answered = set()

    def _read(self, votes: Tensor) -> None:
        self._results = {name: bool(vote) for name, vote in zip(self._wishes, votes.tolist(), strict=True)}
