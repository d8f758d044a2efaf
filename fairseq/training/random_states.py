"""Random states of all processes, as a checkpoint holds them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fairseq.distributed import World
from fairseq.modules import devices

logger = logging.getLogger(__name__)


def gather_random_states(world: World) -> list[dict[str, Tensor]]:
    """Return the states of every process, in rank order; to be called on all of them."""
    states = {"cpu": torch.get_rng_state()}
    if devices.is_accelerator(world.device):
        states[world.device.type] = devices.random_state(world.device)
    return world.gather(states, everywhere=True)


def restore_random_states(states: Sequence[Mapping[str, Tensor]] | None, world: World, source: str) -> None:
    """Restore this process's part of *states*; states of another number of processes are dropped
    with a line."""
    if states and len(states) != world.size:
        logger.info(
            "random states of %s are dropped: processes then %d, now %d; dropout starts from `seed`",
            source, len(states), world.size,
        )  # fmt: skip
    elif states:
        state = states[world.rank]
        torch.set_rng_state(state["cpu"].cpu())
        # A run that continues on another kind of device starts its random numbers from `seed`.
        if devices.is_accelerator(world.device) and world.device.type in state:
            devices.set_random_state(state[world.device.type], world.device)
