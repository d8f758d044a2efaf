"""Updates with a loss or gradients that are infinite or NaN:
where they begin, and how many are skipped."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fairseq.criterions.fairseq_criterion import Sample
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.modules import devices
from fairseq.modules.precision import Precision
from fairseq.tasks.fairseq_task import FairseqTask, LossGraph
from fairseq.training.gradients import LossScaler, values_of

logger = logging.getLogger(__name__)

FILE = "nonfinite.pt"
MOST_IDS = 8


@dataclass(frozen=True)
class NonFiniteReport:
    """An update with a loss or gradients that are not finite.

    Attributes:
        update: its number, from 1.
        ids: examples of its batches, of all ranks.
        location: the first value that is not finite, and its rank if there are
            several; empty if none was found.
    """

    update: int
    ids: list[int]
    location: str

    def __str__(self) -> str:
        ids = " ".join(map(str, self.ids[:MOST_IDS])) + (" …" if len(self.ids) > MOST_IDS else "")
        where = f"first in {self.location}" if self.location else "which a second forward pass did not show"
        return f"update {self.update}: loss or gradients are infinite or NaN, {where}; examples {ids}"


class NonFinite(UserError):
    """Training cannot go on: too many updates with a loss or gradients that are not finite.

    *reason* says why it is one too many; empty if the first one is.
    """

    def __init__(self, finding: NonFiniteReport, reason: str, advice: str) -> None:
        super().__init__(f"{finding}{f' ({reason})' if reason else ''}; {advice}")
        self.finding = finding


@dataclass
class NonFiniteUpdates:
    """The updates that were skipped because their loss or gradients are not finite."""

    allowed: int
    count: int = 0

    def skip(self, finding: NonFiniteReport) -> None:
        """Count a skipped update; raise NonFinite if it is one too many."""
        self.count += 1
        if self.count > self.allowed:
            before = f"{self.allowed} were skipped before" if self.allowed else ""
            raise NonFinite(finding, before, "lower `lr`, set `clip_norm` or skip such updates with `skip_nonfinite`")
        logger.warning("%s; skipped %d of %d", finding, self.count, self.allowed)


def check_scale(scaler: LossScaler, find: Callable[[], NonFiniteReport]) -> None:
    """Raise NonFinite if no other loss scale can help after an update that overflowed."""
    # The passes are repeated only for a message that ends the run: most overflows need no more than
    # a lower scale.
    if (reason := scaler.exhausted()) is not None:
        advice = "resume from an earlier checkpoint with a lower `lr` or `clip_norm`, or train with `bf16`"
        raise NonFinite(find(), reason, advice)


def check_weights(parameters: Mapping[str, nn.Parameter], world: World, update: int) -> None:
    """Raise UserError if a weight is infinite or NaN on any rank: no command would load a
    checkpoint with it.

    To be called on every process, with the model's
    *parameters* by name, or this rank's parts of them.
    """
    parts = {name: value.detach() for name, value in parameters.items() if value.numel()}
    largest = torch.stack(list(torch._foreach_norm(list(parts.values()), math.inf))) if parts else torch.zeros(1)
    finite = torch.isfinite(largest).tolist()  # one wait for the device
    bad = next((name for name, is_finite in zip(parts, finite, strict=False) if not is_finite), None)
    if names := [name for name in world.gather(bad, everywhere=True) if name]:
        raise UserError(
            f"update {update}: the weights {names[0]} are infinite or NaN, so they are not saved; resume from the "
            "checkpoint before with a lower `lr` or `clip_norm`"
        )


def find(
    graph: LossGraph,
    task: FairseqTask,
    samples: Sequence[Sample | None],
    parameters: Mapping[str, nn.Parameter],
    precision: Precision,
    world: World,
    update: int,
) -> NonFiniteReport:
    """Return where an update that was not applied is not finite, the same on every rank.

    The weights are checked, then a second forward pass, without gradients, then the gradients.
    Dropout draws other random numbers than in the first pass. *parameters* of *graph* are given by
    name, or this rank's parts of them, with their gradients.
    """
    ids = [number for sample in samples if sample is not None and "id" in sample for number in sample["id"].tolist()]
    first = next((f"the weights {name}" for name, value in parameters.items() if not _is_finite(value)), None)
    # On every rank: layers may be gathered.
    bad = _second_pass(graph, task, samples, precision, world)
    # The backward pass comes to the last parameters first.
    gradients = [(name, values_of(p.grad)) for name, p in reversed(list(parameters.items())) if p.grad is not None]
    first = first or bad or next((f"the gradient of {name}" for name, grad in gradients if not _is_finite(grad)), None)
    gathered = world.gather((ids, first), everywhere=True)
    parts = [part if world.size == 1 else f"{part} on rank {rank}" for rank, (_, part) in enumerate(gathered) if part]
    return NonFiniteReport(update, [number for numbers, _ in gathered for number in numbers], parts[0] if parts else "")


def _second_pass(
    graph: LossGraph, task: FairseqTask, samples: Sequence[Sample | None], precision: Precision, world: World
) -> str | None:
    """The first output that is not finite; None if all are."""
    bad: list[str] = []

    def report(name: str, module: nn.Module, inputs: object, output: object) -> None:
        # Only the first counts: what is computed from it is not finite either.
        if not bad and not all(_is_finite(value) for value in _tensors(output)):
            bad.append(name)

    handles = [module.register_forward_hook(partial(report, name)) for name, module in graph.named_modules()]
    carried = task.carried
    try:
        # The next update must draw what it would have drawn. Hooks run in eager mode only, not
        # inside compiled code.
        same_numbers = devices.same_random_numbers(world.device)
        with torch.no_grad(), same_numbers, torch.compiler.set_stance("force_eager"):
            for sample in samples:
                with precision.autocast(world.device):
                    _, carried = task.step(graph, sample, carried, world.device)
    finally:
        for handle in handles:
            handle.remove()
    return (f"the output of {bad[0]}" if bad[0] else "the loss") if bad else None


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(torch.isfinite(value.detach()).all())


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []
