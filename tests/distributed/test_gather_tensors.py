"""Tensors of all ranks reach the first one's host one after another, and only the writer of a checkpoint copies."""

from __future__ import annotations

import queue
from collections import defaultdict

import pytest
import runs
import torch
import torch.distributed as dist

from fairseq import checkpoint
from fairseq.distributed import World
from fairseq.tasks import setup_task
from fairseq.tasks.typed import training_settings
from fairseq.training.trainer import Trainer


@pytest.fixture
def headers(monkeypatch):
    """torch.distributed among ranks that take turns in one process: 1, 2, …, then 0; what they pickled."""
    sent = defaultdict(queue.Queue)
    pickled = []

    def gather_object(value, values=None):
        if values is None:
            pickled.append(value)
        else:
            values[:] = [value, *pickled]

    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "gather_object", gather_object)
    monkeypatch.setattr(dist, "send", lambda tensor, to: sent[len(pickled)].put(tensor))
    monkeypatch.setattr(dist, "recv", lambda buffer, rank: buffer.copy_(sent[rank].get_nowait()))
    return pickled


def test_every_ranks_rows_arrive_in_order_unpickled_and_in_their_place(headers, monkeypatch):
    own = {
        1: [torch.arange(6.0).view(2, 3), torch.ones(2, 1, dtype=torch.float16)],
        2: [],
        3: [torch.full((1, 3), 9.0), torch.zeros(1, 1, dtype=torch.float16)],
        0: [torch.zeros(3, 3).t(), torch.full((3, 1), 7, dtype=torch.float16)],
    }
    wanted = [torch.cat([own[rank][i] for rank in (0, 1, 3)]) for i in (0, 1)]
    received, receive = [], dist.recv
    monkeypatch.setattr(dist, "recv", lambda buffer, rank: received.append(buffer) or receive(buffer, rank))
    assert [World(rank, 4).stack_rows(own[rank]) for rank in (1, 2, 3)] == [[], [], []]
    stacked = World(0, 4).stack_rows(own[0])
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(stacked, wanted, strict=True))
    inside = {tensor.untyped_storage().data_ptr() for tensor in stacked}
    assert len(received) == 4 and {part.untyped_storage().data_ptr() for part in received} == inside, (
        "the first process holds the result and nothing beside it"
    )
    assert headers[0] == [((2, 3), torch.float32), ((2, 1), torch.float16)], "shapes alone are pickled"


def test_the_first_process_may_have_no_rows(headers):
    assert World(1, 2).stack_rows([torch.ones(2, 3)]) == []
    (stacked,) = World(0, 2).stack_rows([])
    assert torch.equal(stacked, torch.ones(2, 3))


def test_without_rows_nothing_is_stacked(headers):
    assert World(1, 2).stack_rows([]) == World(0, 2).stack_rows([]) == []


def test_one_process_returns_its_own():
    (tensor,) = World().stack_rows([torch.ones(2)])
    assert torch.equal(tensor, torch.ones(2))


def test_the_state_of_a_rank_that_does_not_write_copies_nothing(monkeypatch):
    args = runs.arguments(runs.SHORTFORMER, "--optimizer adam --average-weights-from 1")
    task = setup_task(args)
    trainer = Trainer(training_settings(args), task, task.build_model(args), task.build_criterion(args))

    copied = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copied.append(tensor.shape) or tensor)
    model = trainer.state_dict()["model"]
    assert not any(shape.numel() > 10 for shape in copied)  # the log's sums
    pointers = {p.data_ptr() for p in trainer.model.parameters()}
    assert {value.data_ptr() for value in model.values()} >= pointers


def test_tensors_of_a_device_are_saved_on_the_host_and_tied_ones_once(tmp_path, monkeypatch):
    from fairseq.checkpoint import store

    class Elsewhere(torch.Tensor):
        """A tensor that says it is on a device."""

        @property
        def device(self):
            return torch.device("cuda")

        def cpu(self):
            return torch.Tensor(self.tolist())

    tied = torch.ones(3).as_subclass(Elsewhere)
    moved = store._on_host({"model": {"a": tied, "b": tied}, "extra_state": {"x": [tied, 1]}})
    assert type(moved["model"]["a"]) is torch.Tensor and moved["model"]["a"] is moved["model"]["b"]
    checkpoint.save(tmp_path / "c.pt", {**moved, "args": {}})
    assert torch.equal(checkpoint.load(tmp_path / "c.pt")["model"]["a"], torch.ones(3))
