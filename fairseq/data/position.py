"""Positions in an epoch: how much of it was read, on any number of processes.

A position counts *units* of the epoch, over all processes: blocks in the epoch's order, batches
where those are cut by size, steps of rows where rows continue each other. A checkpoint stores it
with the :class:`EpochLayout` of its run, from which another run, on more or fewer processes, finds
the position in its own.

Streams need as many rows in all (rows × processes), and their memory goes with them; batches cut by
size need the same limits. Other checkpoints are refused in the middle of an epoch, and none at its
start. Blocks of another size, as between stages, go on after the same share of the epoch. Whatever
is converted or dropped (memory, random states) is logged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fairseq.errors import UserError, counted

BLOCKS, BATCHES, NUMPY, STREAMS = "blocks", "batches", "fairseq", "streams"
SUM, SEQUENCE = 0, 1  # rules
RESET = "or give `reset_dataloader` to start at the first batch"


@dataclass(frozen=True)
class EpochLayout:
    """Units of an epoch, and the way processes read them."""

    # ``blocks``: in a random order, singly or in groups of similar size; ``batches``: cut by size;
    # ``fairseq``: cut by size, in NumPy's order; ``streams``: rows that continue each other.
    order: str
    units: int  # an epoch
    step: int  # units that all processes read in one iteration
    processes: int
    block_size: int  # tokens of the longest block
    # What must be equal for units to be the same: the rows in all of streams, a checksum of
    # batches, the number of blocks in a group (0: they are put in order singly).
    cut: int = 0
    seed: int = 0  # of a random order; 0 where there is none
    passage: int = 0  # blocks that a row of streams reads in the corpus's order; 0: all
    # What draws random orders, see :func:`order_generator`. Checkpoints of version 1.0 and of
    # fairseq have no rule.
    rule: int = SUM

    @property
    def batches(self) -> int:
        """Batches an epoch on each process."""
        return -(-self.units // self.step)

    def batches_read(self, read: int) -> int:
        """Return the batches of an epoch that are over once *read* units were read."""
        # Counted from the end: after a change of processes `read` need not be a multiple of the
        # step, and what is left must be right.
        return self.batches - -(-(self.units - read) // self.step)


FAIRSEQ = EpochLayout(NUMPY, units=0, step=1, processes=1, block_size=0)  # its checkpoints store none


def order_generator(rule: int, seed: int, epoch: int, *purpose: int) -> np.random.RandomState:
    """Return what draws the order of *epoch* for a *purpose*: by the rule ``SEQUENCE`` each seed,
    epoch and purpose has a generator of its own; by ``SUM`` seed and epoch are added.

    With sums, the third epoch of seed 1 has the order of the first one of seed 3.
    """
    if rule == SUM:
        return np.random.RandomState((seed + epoch) % 2**32)
    # The former class, whose permutations are the same in every version of NumPy.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch, *purpose])))


@dataclass(frozen=True)
class CheckpointOrigin:
    """Facts about the run that saved a checkpoint."""

    processes: int = 1  # where no layout was saved
    # Whether ``--tokens-per-sample`` was what it is now,
    # and no other stage of ``--stages`` saved it.
    same_length: bool = True

    @classmethod
    def of(cls, state: Mapping[str, Any], tokens_per_sample: int | None, stage: int | None = None) -> CheckpointOrigin:
        """Return the facts of a checkpoint's content,
        ours or fairseq's, for a run with *tokens_per_sample*.

        Its *stage* is numbered from 1, None without stages:
        batches of another stage may have other rows.
        """
        args = state.get("args") or {}
        extra = state.get("extra_state") or {}
        signature, before = extra.get("batches"), (extra.get("stage") or {}).get("number", stage)
        if not isinstance(signature, Mapping):
            return cls(int(args.get("distributed_world_size") or 1))
        same = signature.get("tokens_per_sample") == tokens_per_sample and before == (stage or before)
        return cls(same_length=same)


@dataclass(frozen=True)
class Position:
    """A position in a layout."""

    read: int  # units
    same_rows: bool  # whether each row continues where it stopped, so that its memory fits
    remark: str = ""  # for the log; empty if the position is as it was saved


def layout_of(stored: Mapping[str, Any]) -> EpochLayout:
    """Return the layout of a checkpoint's ``read``."""
    return EpochLayout(**{key: stored[key] for key in stored if key != "count"})


def find(
    ours: EpochLayout, iterations: int, stored: Mapping[str, Any] | None, saved: CheckpointOrigin | None
) -> Position:
    """Return the position of a checkpoint's
    ``train_iterator`` within its epoch, in the layout *ours*.

    Args:
        iterations: its ``iterations_in_epoch``.
        stored: its ``read``; None in fairseq's.
        saved: who saved the checkpoint; None: this run, so that batches are what they were.

    Raises:
        UserError: the position is in the middle of an epoch that *ours* cannot continue.
    """
    if stored is not None:
        return _convert(ours, layout_of(stored), stored["count"], saved is None or saved.same_length)
    if saved is None:
        return Position(min(iterations * ours.step, ours.units), same_rows=True)
    step = saved.processes if ours.order == NUMPY else ours.step
    return Position(min(iterations * step, ours.units), same_rows=False)


def _convert(ours: EpochLayout, theirs: EpochLayout, read: int, same_length: bool) -> Position:
    # Units are counted over all processes, so the number of processes and their rows may change.
    here = dataclasses.replace(theirs, step=ours.step, processes=ours.processes)
    if here == ours:
        return Position(read, ours.order == STREAMS, _remark(ours, theirs, read))
    # The longest block may be a line that --tokens-per-sample
    # does not cut, and stay when shorter ones grow.
    if theirs.block_size != ours.block_size or not same_length:
        return _share(ours, read / theirs.units, theirs.block_size)
    cut = theirs.cut if ours.order == STREAMS else ours.cut
    if dataclasses.replace(here, seed=ours.seed, cut=cut) == ours and theirs.seed != ours.seed:
        return Position(read, False, f"`seed` {ours.seed} changes the order, some text may be read twice")
    if theirs.order == ours.order and theirs.passage != ours.passage:
        raise UserError(
            "`passage_tokens`: the checkpoint is in the middle of an epoch, which has the text in another order; "
            f"keep the flag as it was, {RESET}"
        )
    raise _elsewhere(ours, theirs.order, theirs.cut, f"{read} of {theirs.units} {_NAMES[theirs.order]}")


def _share(ours: EpochLayout, share: float, block_size: int | None = None) -> Position:
    """Return the position after the same share of an epoch
    with blocks or rows of another size, as between stages."""
    read = int(share * ours.units)
    reason = "rows read other parts of the text" if block_size == ours.block_size else "blocks have another size"
    remark = f"{reason}: continues after {100 * share:.3g}% of the epoch, some text may be read twice"
    # Batches of the rest of the epoch are whole ones.
    return Position(read - read % ours.step, False, remark)


_NAMES = {BLOCKS: "blocks", BATCHES: "batches", NUMPY: "batches", STREAMS: "blocks of each row"}


def _remark(ours: EpochLayout, theirs: EpochLayout, read: int) -> str:
    if (theirs.step, theirs.processes) == (ours.step, ours.processes):
        return ""
    return (
        f"{read} of {ours.units} {_NAMES[ours.order]} read by {counted(theirs.processes, 'process')}, "
        f"{theirs.step} at once; "
        f"continues with {counted(ours.processes, 'process')}, {ours.step} at once"
    )


def _elsewhere(ours: EpochLayout, order: str, cut: int, read: str) -> UserError:
    """The error for a position that *ours* does not have."""
    where = f"in the middle of an epoch ({read} read)"
    if order != ours.order:
        return UserError(
            f"checkpoint: {where}, of data in the order of {order}; these settings read {ours.order}; "
            f"keep those it was trained with, {RESET}"
        )
    if ours.order == STREAMS and cut != ours.cut:
        rows = f"{cut} rows" if cut else "another number of rows"
        return UserError(
            f"`batch_size`, `max_tokens`: the checkpoint is {where} by {rows} on all processes together, and "
            f"{ours.cut} rows read other parts of the text; keep rows × processes, {RESET}"
        )
    if cut != ours.cut:
        return UserError(
            f"`max_tokens`, `batch_size`, `required_batch_size_multiple`: the checkpoint is {where}, and its batches "
            f"were cut otherwise; keep its settings (on fewer processes raise `update_freq`), {RESET}"
        )
    return UserError(
        f"checkpoint: {where}, and this run's has {ours.units} {_NAMES[ours.order]}; "
        f"keep the data and settings it was trained with, {RESET}"
    )
