"""The validation loop, the same in training and in ``fairseq-validate``."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fairseq.criterions.fairseq_criterion import Sample
from fairseq.distributed import World
from fairseq.logging.figures import Meter, NamedSums
from fairseq.modules.precision import Precision
from fairseq.tasks.carried import Carried
from fairseq.tasks.fairseq_task import FairseqTask, LossGraph
from fairseq.training.state import TrainingState


def evaluate(state: TrainingState, batches: Iterable[Sample | None]) -> Meter:
    """Return the sums over *batches* for the weights
    that a run validates and saves; see :func:`validate`."""
    with state.averaged():
        meter = validate(state.graph, state.task, batches, state.precision, state.world)
        # Without a backward pass sharded layers stay gathered.
        state.reducer.reset()
    return meter


@torch.no_grad()
def validate(
    graph: LossGraph, task: FairseqTask, batches: Iterable[Sample | None], precision: Precision, world: World
) -> Meter:
    """Return the sums over *batches* of one split, reduced over ranks.

    The state that training steps carry stays as it is: a validation begins with its own and drops
    it at the end.

    Args:
        graph: model and criterion; left in evaluation mode.
        batches: this rank's batches, None for an empty one; equally many on every rank.
    """
    graph.eval()
    meter = Meter(world.device)
    carried: Carried = {}
    for sample in batches:
        with precision.autocast(world.device):
            (_, sample_size, log), carried = task.step(graph, sample, carried, world.device)
        # Gathered: metrics such as F1 are computed from all predictions, not from sums.
        meter.add(NamedSums.of(log, sample_size, world.device, gather=True))
    meter.reduce(world)
    return meter
