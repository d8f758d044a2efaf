"""Agreement of all processes on the data that they read, before they train on them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from fairseq.data.iterator import EpochIterator
from fairseq.distributed import World
from fairseq.errors import UserError

_FAILURE = "failure"


def check_agreement(world: World, splits: Mapping[str, EpochIterator], counts: Mapping[str, int]) -> None:
    """Raise UserError, the same on all processes, unless all have the same *counts*, such as
    updates, and read the same batches of data.

    To be called on every process. The data are opened, and must be readable. Processes exchange one
    number; only if those differ what it was computed from.
    """
    if world.size == 1:
        return
    facts: dict[str, Any]
    try:
        facts = {
            f"{split}: {name}": v for split, batches in splits.items() for name, v in batches.fingerprint().items()
        }
        facts |= counts
    # Raised below on all processes: raised here, it would leave the others waiting.
    except UserError as error:
        facts = {_FAILURE: error.args[0]}
    # crc32, not hash(), which gives text another value in each process.
    if len(set(world.gather(zlib.crc32(repr(facts).encode()), everywhere=True))) == 1 and _FAILURE not in facts:
        return
    first, *others = everyone = world.gather(facts, everywhere=True)
    # Unreadable data explain every other difference.
    for rank, one in enumerate(everyone):
        if _FAILURE in one:
            raise UserError(facts.get(_FAILURE, f"rank {rank}: {one[_FAILURE]}"))
    for rank, other in enumerate(others, start=1):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                values = f"{other.get(name, 'missing')} on rank {rank}, {first.get(name, 'missing')} on rank 0"
                raise UserError(f"{name}: {values}; give all processes the same data and flags")
