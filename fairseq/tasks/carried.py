"""Carried state: a value that one training step hands
to the next, owned by the task and saved in checkpoints.

``forward`` takes it as keyword arguments and returns its successor in ``extra``. The values of an
update are provisional until the update is applied. An update may be skipped for gradients that
overflowed after a finite forward pass: memory goes on with the text, what changes with the weights
does not. After a forward pass that is not finite, the state is unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq.criterions.fairseq_criterion import FairseqCriterion, Sample
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.modules.memory import Memory, keep_rows

Carried = Mapping[str, Any]
"""Values by the name of their kind."""


class CarriedState:
    """Base of the kinds of carried state: functions that use, advance, commit and save values,
    which it does not hold.

    To add a kind, override what differs and list the class in ``kinds`` of a task; trainer, loss
    graph and checkpoints need no change. By default a value is None at the start of an epoch, and
    no checkpoint has it.
    """

    name: str
    """Key of the value in the task and in checkpoints."""

    def check(self, model: BaseFairseqModel, criterion: FairseqCriterion) -> None:
        """Raise UserError if model and criterion cannot carry this state."""

    def inputs(self, value: Any, sample: Sample) -> dict[str, object]:
        """Keyword arguments of the model's ``forward`` on *sample*."""
        return {}

    def advance(self, value: Any, extra: Mapping[str, Any], sample: Sample) -> Any:
        """The value after a forward pass on *sample* that returned *extra*."""
        raise NotImplementedError

    def commit(self, before: object, after: Any, model: BaseFairseqModel, world: World) -> Any:
        """The initial value of the next update, after this one counted; may reduce over ranks."""
        return after

    def skip(self, before: object, after: Any) -> Any:
        """The initial value of the next update, after this one was not applied though its forward
        pass was finite."""
        return after

    def restart(self, value: object) -> Any:
        """The value at the beginning of an epoch."""

    def save(self, value: Any, world: World) -> Any:
        """Plain values and CPU tensors for a checkpoint,
        complete on rank 0; called on every rank."""

    def load(self, saved: Any, rows: int, world: World) -> Any:
        """The value in *saved*; *rows* is the number of rows of a batch on one rank."""


class Chunks(NamedTuple):
    """The memory of a batch of which some chunks have been read: of all rows, and of those after
    them."""

    before: Memory | None
    after: list[Memory]


class RowMemory(CarriedState):
    """The memory of rows that continue each other from batch to batch (Shortformer's cache,
    Transformer-XL's memory).

    The value is a :data:`~fairseq.modules.memory.Memory` of this rank's rows, or None at a start.
    In checkpoints it is the rows of all ranks, in rank order, [rows, M, C] a layer. Ranks have
    separate rows, so that nothing is reduced, and a skipped update keeps its memory: the weights
    did not change, and the next segment follows this one.
    """

    name = "memory"

    def check(self, model: BaseFairseqModel, criterion: FairseqCriterion) -> None:
        if not criterion.carries_state and model.memory_length:
            raise UserError(
                f"`criterion`: {type(criterion).__name__} overrides forward, so it cannot carry the model's memory "
                "(`tokens_from_prev`, `mem_len`); define compute_loss instead"
            )

    def inputs(self, value: Memory | Chunks | None, sample: Sample) -> dict[str, object]:
        """The memory of the rows that *sample* has;
        exhausted rows are dropped from the end of the batch."""
        before = value.before if isinstance(value, Chunks) else value
        memory = keep_rows(before, sample["nsentences"], sample.get("first_row", 0))
        # Left out and not passed as None: a model without memory need not have the argument.
        return {} if memory is None else {"memory": memory}

    def advance(
        self, value: Memory | Chunks | None, extra: Mapping[str, Any], sample: Sample
    ) -> Memory | Chunks | None:
        memory: Memory | None = extra.get("memory")
        if memory is None or "first_row" not in sample:
            return memory
        before, after = (value.before, value.after) if isinstance(value, Chunks) else (value, [])
        after = [*after, memory]
        if not sample["is_last"]:
            return Chunks(before, after)
        # A chunk that holds the corpus's last block alone may be shorter. Its row ends here.
        complete = [chunk for chunk in after if chunk[0].size(1) == after[0][0].size(1)]
        return [torch.cat(rows) for rows in zip(*complete, strict=True)]

    def save(self, value: Memory | None, world: World) -> list[Tensor]:
        """The rows of all ranks, a tensor a layer; [] without memory."""
        return world.stack_rows(value or [])

    def load(self, saved: Sequence[Any], rows: int, world: World) -> Memory | None:
        """This rank's part of the saved rows."""
        if any(not isinstance(layer, Tensor) or layer.dim() != 3 or layer.shape != saved[0].shape for layer in saved):
            raise UserError("checkpoint: its memory is not a tensor (rows, tokens, channels) a layer; use another")
        # Rows lie in rank order; another number of processes
        # with as many rows in all finds the same ones.
        first = world.rank * rows
        local = [layer[first : first + rows].to(world.device) for layer in saved]
        # A rank behind the last saved row has none: exhausted rows were dropped.
        return local if local and local[0].size(0) else None
