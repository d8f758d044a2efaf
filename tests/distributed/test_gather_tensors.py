"""Tensors of all ranks reach the first one's host in place, and rows of all ranks every device
without a wait."""

from __future__ import annotations

import time

import pytest
import runs
import torch
import torch.distributed as dist
from ranks import on_ranks

from fairseq import checkpoint
from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.notes.dictionary import NoteDictionary
from fairseq.notes.state import gather_notes
from fairseq.tasks import setup_task
from fairseq.training.state import TrainingState

ROWS = [3, 2, 0, 1]  # of each rank; the third has no tensors


def rows_of(rank):
    if not ROWS[rank]:
        return []
    values = torch.arange(3.0 * ROWS[rank]).view(3, -1).t() + 100 * rank  # not contiguous
    return [values, torch.full((ROWS[rank], 1), rank, dtype=torch.float16)]


def stack(world):
    received, receive = [], dist.recv

    def watched(piece, *arguments, **keywords):
        received.append(piece.untyped_storage().data_ptr())
        return receive(piece, *arguments, **keywords)

    dist.recv = watched
    stacked = world.stack_rows(rows_of(world.rank))
    inside = {tensor.untyped_storage().data_ptr() for tensor in stacked}
    return stacked, len(received), set(received) <= inside


def test_every_ranks_rows_arrive_in_order_and_in_their_place(tmp_path):
    (stacked, received, in_place), *others = on_ranks(stack, 4, tmp_path)
    wanted = [torch.cat([rows_of(rank)[i] for rank in (0, 1, 3)]) for i in (0, 1)]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(stacked, wanted, strict=True))
    assert received == 4 and in_place, "the first process holds the result and nothing beside it"
    assert [tensors for tensors, *_ in others] == [[], [], []]


def stack_of_some(world):
    of_second = world.stack_rows([torch.ones(2, 3)] if world.rank else [])
    return of_second, world.stack_rows([])


def test_the_first_process_or_all_of_them_may_have_no_rows(tmp_path):
    ((stacked,), none), others = on_ranks(stack_of_some, 2, tmp_path)
    assert torch.equal(stacked, torch.ones(2, 3))
    assert none == [] and others == ([], [])


def exchanged(world, folder):
    values = (world.gather({"rank": world.rank}), world.gather(world.rank, everywhere=True))
    shared = world.share(f"of rank {world.rank}")
    total = torch.tensor([1.0 + world.rank])
    same = world.sum(total) is total
    if world.rank == 1:
        time.sleep(0.1)
        (folder / "written").touch()
    world.barrier()
    return values, shared, total.item(), same, (folder / "written").exists()


def test_values_of_all_ranks_are_gathered_shared_and_summed_and_a_barrier_waits_for_all(tmp_path):
    rest = ("of rank 0", 3.0, True, True)
    first, second = on_ranks(exchanged, 2, tmp_path, tmp_path)
    assert first == (([{"rank": 0}, {"rank": 1}], [0, 1]), *rest)
    assert second == (([], [0, 1]), *rest)


def test_one_process_is_a_world_of_its_own():
    world, tensor = World(), torch.ones(2)
    assert world.is_first and world.gather("a") == world.gather("a", everywhere=True) == ["a"]
    assert world.share("a") == "a" and world.sum(tensor) is tensor and tensor.tolist() == [1, 1]
    assert world.gather_rows(tensor) == (tensor,)
    world.barrier()


def test_one_process_returns_its_own():
    (tensor,) = World().stack_rows([torch.ones(2)])
    assert torch.equal(tensor, torch.ones(2))


def gather(world):
    own = rows_of(world.rank) or [torch.empty(0, 3), torch.empty(0, 1, dtype=torch.float16)]
    return world.gather_rows(*own)


def test_rows_of_all_ranks_are_on_every_rank_in_order(tmp_path):
    wanted = [torch.cat([rows_of(rank)[i] for rank in (0, 1, 3)]) for i in (0, 1)]
    for gathered in on_ranks(gather, 4, tmp_path):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(gathered, wanted, strict=True))


def gather_few(world):
    return [world.gather_rows(torch.full((rows, 1), world.rank))[0].flatten().tolist() for rows in (0, 1)]


def test_every_rank_may_have_one_row_or_none(tmp_path):
    assert on_ranks(gather_few, 2, tmp_path) == [[[], [0, 1]]] * 2


@pytest.fixture
def nccl(monkeypatch):
    """The second of two ranks with GPUs, whose collectives do nothing; the tensors and group of
    each of them."""
    calls = []

    def all_gather(gathered, own, group=None):
        calls.append((own.device.type, group))
        if own.device.type == "cpu":
            gathered[0].fill_(2)
            gathered[1].copy_(own)

    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: f"{backend}, {timeout}")
    monkeypatch.setattr(dist, "all_gather", all_gather)

    def gather_object(value, values=None):
        if values is not None:
            values[:] = [value, value]

    monkeypatch.setattr(dist, "gather_object", gather_object)
    monkeypatch.setattr(dist, "send", lambda tensor, to, group=None: calls.append((tensor.device.type, group)))
    monkeypatch.setattr(dist, "recv", lambda tensor, rank, group=None: calls.append((tensor.device.type, group)))
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, group: calls.append(group))
    return calls


def test_notes_of_several_ranks_are_gathered_and_written_without_waiting_for_the_device(nccl):
    notes = NoteDictionary(6, 4, note_half_window=1).to("meta")  # whose tensors have no values: reading one is an error
    spans = torch.zeros(3, 4, dtype=torch.int64, device="meta")
    taken = notes.take(torch.zeros(2, 5, 4, device="meta"), spans, torch.full((2,), 5, device="meta"), 2)
    sums, counts = gather_notes((taken,), notes, World(1, 2, torch.device("meta")))
    notes.write(sums, counts)
    assert sums._values().shape == (5, 4) and counts._values().device.type == "meta"
    assert [device for device, _ in nccl] == ["cpu", "meta", "meta", "meta"], "numbers of rows; words, sums, counts"


def test_numbers_of_rows_and_saved_rows_travel_between_hosts(nccl):
    world = World(1, 2, timeout=90)
    hosts = "gloo, 0:01:30"  # a process that hangs is noticed after --distributed-timeout there, too
    assert world.gather_rows(torch.ones(3, 1))[0].shape == (5, 1)
    assert nccl == [("cpu", hosts), ("cpu", None)], "counts, then rows"
    nccl.clear()
    world.stack_rows([torch.ones(2, 3), torch.ones(2)])
    assert nccl == [("cpu", hosts)] * 2, "no communicator for each pair of processes"
    nccl.clear()
    assert World(0, 2, timeout=90).stack_rows([torch.ones(2, 3)])[0].shape == (4, 3)
    assert nccl == [("cpu", hosts)]


def test_shared_values_travel_between_hosts_which_wait_for_files(nccl):
    World(1, 2, torch.device("cuda", 1), timeout=90).share("value")
    assert nccl == ["gloo, 1 day, 0:00:00"]


def test_the_state_of_a_rank_that_does_not_write_copies_nothing(monkeypatch):
    args = runs.arguments(runs.SHORTFORMER, "--optimizer adam --average-weights-from 1")
    task = setup_task(args)
    trainer = TrainingState(training_settings(args), task, task.build_model(args), task.build_criterion(args))

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
    moved = store.copied({"model": {"a": tied, "b": tied}, "extra_state": {"x": [tied, 1]}}, again=False)
    assert type(moved["model"]["a"]) is torch.Tensor and moved["model"]["a"] is moved["model"]["b"]
    checkpoint.save(tmp_path / "c.pt", {**moved, "args": {}})
    assert torch.equal(checkpoint.load(tmp_path / "c.pt")["model"]["a"], torch.ones(3))
