"""Notes of several batches and ranks are written as those of one batch, and only when the update
counts."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import on_ranks

from fairseq.criterions import FairseqCriterion
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.models import BaseFairseqModel
from fairseq.notes.dictionary import NoteDictionary
from fairseq.notes.state import NoteState, gather_notes

WORDS, DIM, RANKS = 6, 4, 3
# A word in two ranks, one twice in a batch, one rank without any.
SPANS = [[(0, 1, 3, 2), (1, 0, 1, 5)], [], [(0, 0, 2, 2), (0, 4, 5, 1), (1, 2, 3, 1)]]


class Model(BaseFairseqModel):
    """Nothing but notes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.notes = NoteDictionary(WORDS, DIM, note_half_window=1)


def batch(rank):
    hidden = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(rank))
    return hidden, torch.tensor(SPANS[rank], dtype=torch.int64).view(-1, 4), torch.tensor([5, 3])


def state_of_rank(world):
    model, state = Model(), NoteState()
    extra = {"notes": model.notes.take(*batch(world.rank))}
    value = state.advance(state.restart(None), extra, {}) if SPANS[world.rank] else None
    state.commit((), value, model, world)
    return model.state_dict()


@pytest.fixture(scope="module")
def one():
    """The state after the same batches on one process."""
    model, state = Model(), NoteState()
    value = state.restart(None)
    for rank in range(RANKS):
        value = state.advance(value, {"notes": model.notes.take(*batch(rank))}, {})
    assert state.commit((), value, model, World()) == ()
    return model


def test_several_batches_of_an_update_count_as_one(one):
    model = Model()
    notes = [(w, i) for rank in range(RANKS) for i, (*_, w) in enumerate(SPANS[rank])]
    assert one.notes.taken.tolist() == [sum(w == word for w, _ in notes) for word in range(WORDS)]
    assert int(one.notes.updates) == 1
    assert torch.equal(one.notes.table[0], model.notes.table[0])


def test_ranks_hold_the_same_table_as_one_process_to_the_last_bit(one, tmp_path):
    for rank, state in enumerate(on_ranks(state_of_rank, RANKS, tmp_path)):
        for name, value in one.state_dict().items():
            assert torch.equal(state[name], value), (rank, name)


def test_an_update_that_is_not_committed_leaves_the_table(one):
    model, state = Model(), NoteState()
    before = copy.deepcopy(model.state_dict())
    state.advance((), {"notes": model.notes.take(*batch(0))}, {})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_update_without_rare_words_ages_every_note():
    model = Model()
    before = model.notes.table.clone()
    NoteState().commit((), None, model, World())
    assert int(model.notes.updates) == 1 and torch.equal(model.notes.table, before)


def test_what_is_gathered_holds_touched_rows_only():
    model = Model()
    sums, counts = gather_notes((model.notes.take(*batch(2)),), model.notes, World())
    assert sums._values().shape == (3, DIM) and counts._nnz() == 3


def test_a_criterion_that_runs_the_model_its_own_way_is_rejected():
    criterion = FairseqCriterion(None)
    NoteState().check(Model(), criterion)
    criterion.carries_state = False
    with pytest.raises(UserError, match="define compute_loss"):
        NoteState().check(Model(), criterion)
