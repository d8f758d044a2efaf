"""Notes as carried state: taken in every forward pass, written after each update that counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fairseq.criterions.fairseq_criterion import FairseqCriterion, Sample
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.notes.dictionary import NoteDictionary
from fairseq.tasks.carried import CarriedState

Taken = tuple[tuple[Tensor, Tensor], ...]
"""For each batch of an update, sums and counts as :meth:`NoteDictionary.take` returns them."""


class NoteState(CarriedState):
    """The notes that the batches of an update took, until the update counts.

    The value is a :data:`Taken`, or None. The model reads its own table,
    the buffer ``model.notes.table``, which is saved with it,
    holds all notes between updates, and is kept across epochs.
    """

    name = "notes"

    def check(self, model: BaseFairseqModel, criterion: FairseqCriterion) -> None:
        """Raise UserError for a model with notes under a criterion that overrides ``forward``."""
        if not criterion.carries_state and dictionary_of(model) is not None:
            raise UserError(
                f"`criterion`: {type(criterion).__name__} overrides forward, so it cannot carry the model's notes; "
                "define compute_loss instead"
            )

    def advance(self, value: Taken | None, extra: Mapping[str, Any], sample: Sample) -> Taken:
        """Append the notes that the model returned as ``notes``."""
        notes = extra.get("notes")
        return (value or ()) if notes is None else (*(value or ()), notes)

    def commit(self, before: object, after: Taken | None, model: BaseFairseqModel, world: World) -> Taken:
        """Write the notes of all batches and ranks into
        the table; the next update starts with none."""
        notes = dictionary_of(model)
        if notes is not None:
            notes.write(*gather_notes(after or (), notes, world))
        return ()

    def skip(self, before: object, after: Taken | None) -> Taken:
        """Drop the notes: the table changes with the weights only."""
        return ()


def dictionary_of(model: BaseFairseqModel) -> NoteDictionary | None:
    """The note dictionary of *model*; None if it has none."""
    notes = getattr(model, "notes", None)
    return notes if isinstance(notes, NoteDictionary) else None


@torch.no_grad()
def gather_notes(written: Taken, notes: NoteDictionary, world: World) -> tuple[Tensor, Tensor]:
    """The notes of all batches of an update, in the order of ranks and batches; equal on all ranks.

    Only the rows of S occurrences are sent, [S, C].

    Returns:
        Sums [N, C] and counts [N], sparse, for :meth:`NoteDictionary.write`.
    """
    table = notes.table
    # A rank without a batch takes part in the gathering, with no rows.
    words = [sums._indices()[0] for sums, _ in written] or [table.new_empty(0, dtype=torch.int64)]
    values = [sums._values() for sums, _ in written] or [table[:0]]
    counts = [counts._values() for _, counts in written] or [table.new_empty(0, dtype=torch.int64)]
    word, value, count = world.gather_rows(torch.cat(words), torch.cat(values), torch.cat(counts))
    return (
        torch.sparse_coo_tensor(word[None], value, table.shape, check_invariants=False),
        torch.sparse_coo_tensor(word[None], count, table.shape[:1], check_invariants=False),
    )
