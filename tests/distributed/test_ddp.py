"""Gradients of several processes: reduced once an update, and drawn with dropout of their own."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from ranks import on_ranks

from fairseq.config.settings import training_settings
from fairseq.distributed import GradientReducer, World
from fairseq.logging.figures import RunningSums
from fairseq.training import loop, train

BACKENDS = ["c10d", "pytorch_ddp", "no_c10d", "legacy_ddp"]


def gradients(world: World) -> dict[str, list[torch.Tensor]]:
    """The gradient after each of an update's batches, and at its end, of each backend."""
    found = {}
    for backend in BACKENDS:
        linear = torch.nn.Linear(2, 1, bias=False)
        reducer = GradientReducer(linear, world, backend, 25, False)
        steps = []
        for number in range(2):
            with reducer.accumulate(last=number == 1):
                reducer.module(torch.full((1, 2), 10.0 * number + world.rank + 1)).sum().backward()
            steps.append(linear.weight.grad.clone())
        reducer.reduce()
        found[backend] = [*steps, linear.weight.grad.clone()]
    return found


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[torch.Tensor]]]:
    return on_ranks(gradients, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_last_batch_of_an_update_is_reduced_over_processes(of_ranks, backend: str) -> None:
    inputs = [[1.0, 11.0], [2.0, 12.0]]  # the gradient of a sum is the input
    mean = sum(map(sum, inputs)) / 2
    for rank, found in enumerate(of_ranks):
        first, last, end = found[backend]
        assert first.unique().tolist() == [inputs[rank][0]], "of this process alone"
        assert end.unique().tolist() == [mean]
        overlapped = backend in ("c10d", "pytorch_ddp")
        assert last.unique().tolist() == [mean if overlapped else sum(inputs[rank])], (
            "within the backward pass, or after"
        )


ROWS = [[[1, 2], [2]], [[4], []]]  # of a table, read by the batches of each rank


def gradients_of_rows(world: World) -> dict[str, list[torch.Tensor]]:
    """The gradient of a table of which an update reads single rows, after two updates of each
    backend; in the second only one rank reads any."""
    found: dict[str, list[torch.Tensor]] = {}
    for backend in BACKENDS:
        model = torch.nn.Sequential(torch.nn.Embedding(6, 2, sparse=True), torch.nn.Linear(2, 1))
        torch.nn.init.ones_(model[1].weight)
        reducer = GradientReducer(model, world, backend, 25, True)
        for rows in (ROWS[world.rank], [[1], []] if world.rank else [[], []]):
            model.zero_grad()
            for number in range(2):
                with reducer.accumulate(last=number == 1):
                    reducer.module(torch.tensor(rows[number], dtype=torch.long)).sum().backward()
            reducer.reduce()
            found.setdefault(backend, []).append(model[0].weight.grad)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_rows_are_those_of_all_processes(rows_of_ranks, backend: str) -> None:
    counts = torch.bincount(torch.tensor(sum(sum(ROWS, []), [])), minlength=6) / 2
    for found in rows_of_ranks:
        first, second = found[backend]
        assert first.is_sparse and first._nnz() == 3, "rows that were read, once each"
        assert first.to_dense()[:, 0].tolist() == counts.tolist()
        assert second.to_dense()[:, 0].tolist() == [0, 0.5, 0, 0, 0, 0]


@pytest.fixture(scope="module")
def rows_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[torch.Tensor]]]:
    return on_ranks(gradients_of_rows, 2, tmp_path_factory.mktemp("rows"))


def storages(world: World) -> list[int]:
    """The pieces of memory that hold the gradients of an update, after each of two updates."""
    linear = torch.nn.Linear(2, 1)
    reducer = GradientReducer(linear, world, "c10d", 25, False)
    counts = []
    for _ in range(2):
        with reducer.accumulate(last=True):
            reducer.module(torch.ones(1, 2)).sum().backward()
        counts.append(len({p.grad.untyped_storage().data_ptr() for p in linear.parameters()}))
        linear.zero_grad()
    return counts


def test_gradients_are_views_of_their_bucket(tmp_path: Path) -> None:
    assert on_ranks(storages, 2, tmp_path) == [[1, 1], [1, 1]]


class Buffered(torch.nn.Module):
    """A parameter that is used, one that is not, one that is not trained, and a buffer."""

    scale: torch.Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.used = torch.nn.Parameter(torch.full((2,), value))
        self.unused = torch.nn.Parameter(torch.full((3,), value))
        self.frozen = torch.nn.Parameter(torch.full((2,), value), requires_grad=False)
        self.register_buffer("scale", torch.tensor(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.used * self.frozen * self.scale * x).sum()


def replicated(world: World) -> dict[str, Any]:
    found = {}
    for backend in BACKENDS:
        module = Buffered(world.rank + 2.0)
        reducer = GradientReducer(module, world, backend, 25, find_unused_parameters=True)
        start = {name: value.clone() for name, value in module.state_dict().items()}
        module.scale.fill_(world.rank + 1.0)
        with reducer.accumulate(last=True):
            reducer.module(torch.ones(2)).backward()
        reducer.reduce()
        names = [name for name, _ in reducer.named_parameters()]
        found[backend] = start, names, module.used.grad, module.unused.grad, module.scale.item()
    return found


def test_processes_start_with_the_values_of_the_first_and_keep_their_own_buffers(tmp_path: Path) -> None:
    for rank, of_rank in enumerate(on_ranks(replicated, 2, tmp_path)):
        for backend, (start, names, used, unused, scale) in of_rank.items():
            assert {value.unique().item() for value in start.values()} == {2.0}
            assert names == ["used", "unused"]
            assert used.tolist() == [2.0 * (1 + 2) / 2] * 2 and scale == rank + 1
            assert unused is None, f"{backend}: decay and momentum would move it"


class Switched(torch.nn.Module):
    """Rank 0 uses the first parameter, rank 1 both."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.both, self.second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.both * x).sum() + ((self.second * x).sum() if self.rank == 1 else 0.0)


def switched(world: World) -> dict[str, list[float]]:
    found = {}
    for backend in BACKENDS:
        module = Switched(world.rank)
        reducer = GradientReducer(module, world, backend, 25, find_unused_parameters=True)
        with reducer.accumulate(last=True):
            reducer.module(torch.ones(2)).backward()
        reducer.reduce()
        assert module.second.grad is not None
        found[backend] = module.second.grad.tolist()
    return found


def test_a_parameter_that_one_process_used_has_the_mean_gradient_on_all(tmp_path: Path) -> None:
    assert on_ranks(switched, 2, tmp_path) == [{backend: [0.5, 0.5] for backend in BACKENDS}] * 2


class Wrapped(torch.nn.Module):
    """In place of torch's DistributedDataParallel: what it was called with."""

    def __init__(self, module: torch.nn.Module, **settings: Any) -> None:
        super().__init__()
        self.settings = settings


class Older(Wrapped):
    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Any = "unset",
        bucket_cap_mb: int = 0,
        find_unused_parameters: Any = "unset",
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        super().__init__(module, device_ids=device_ids, mb=bucket_cap_mb, unused=find_unused_parameters)
        assert gradient_as_bucket_view
        self.buffers_are_sent = broadcast_buffers


class Newer(Wrapped):
    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Any = "unset",
        bucket_cap_mb: int = 0,
        find_unused_parameters: Any = "unset",
        forward_sync_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        super().__init__(module, device_ids=device_ids, mb=bucket_cap_mb, unused=find_unused_parameters)
        assert gradient_as_bucket_view
        self.buffers_are_sent = forward_sync_buffers


@pytest.mark.parametrize("release", [Older, Newer])
@pytest.mark.parametrize("device, ids", [("cpu", None), ("cuda:1", [torch.device("cuda:1")])])
def test_the_reduction_has_the_processs_device_and_the_buckets_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, release: Any, device: str, ids: Any
) -> None:
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", release)
    world = World(0, 2, torch.device(device))
    wrapped = GradientReducer(torch.nn.Linear(1, 1), world, "c10d", 7, True).module
    assert wrapped.settings == {"device_ids": ids, "mb": 7, "unused": True} and not wrapped.buffers_are_sent


def test_gradients_are_reduced_in_buckets_of_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[int] = []

    def all_reduce(flat: torch.Tensor) -> None:
        reduced.append(flat.numel() * flat.element_size())
        flat.mul_(2).add_(2)  # of another process, whose gradients are greater by 2

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, rank: None)
    monkeypatch.setattr(World, "any", lambda self, flags: [True] * len(flags))  # the other process used all
    half = 1 << 17  # numbers of 4 bytes in half a MB
    sizes = [half, half, 2 * half, half - 1, half + 2, 3]
    module = torch.nn.ParameterList([torch.full((size,), 1.0 * number) for number, size in enumerate(sizes)])
    for parameter in module[1:]:
        parameter.grad = parameter.detach().clone().view(-1)
    GradientReducer(module, World(0, 2), "no_c10d", 1, False).reduce()
    mega = 1 << 20
    assert reduced == [mega, mega, mega + 4, 12]
    assert [parameter.grad.unique().tolist() for parameter in module] == [[number + 1.0] for number in range(6)]


def test_one_process_reduces_nothing() -> None:
    for backend in BACKENDS:
        linear = torch.nn.Linear(1, 1)
        reducer = GradientReducer(linear, World(), backend, 25, False)
        with reducer.accumulate(last=False):
            reducer.module(torch.ones(1)).backward()
        reducer.reduce()
        assert reducer.module is linear and linear.bias.grad.tolist() == [1.0]


def drawn(world: World, folder: Path) -> list[float]:
    """The next random numbers after an update with dropout, of batches that have one shape on all
    processes."""
    flags = [runs.BASELINE, "--dropout 0.2 --max-update 1 --no-save --disable-validation --save-dir", folder]
    train(training_settings(runs.arguments(*flags)), world)
    return torch.rand(4).tolist()


def test_processes_draw_other_dropout_masks(tmp_path: Path) -> None:
    numbers = on_ranks(drawn, 3, tmp_path, tmp_path / "run")  # two could differ by what building the model draws
    assert len({tuple(of_rank) for of_rank in numbers}) == 3


def collectives(world: World, folder: Path) -> tuple[list[str], list[str]]:
    """What the processes exchange from one update to the next beside the gradients, and in a
    validation of several batches, up to its sums."""
    calls: list[str] = []
    starts: list[int] = []
    for name in ("all_reduce", "all_gather", "all_gather_object", "gather_object", "broadcast", "barrier"):
        function = getattr(dist, name)
        counted = lambda *args, name=name, function=function, **kwargs: calls.append(name) or function(*args, **kwargs)  # noqa: E731
        setattr(dist, name, counted)
    update, evaluate = loop.update, loop.evaluate

    def started_update(*args: Any) -> bool:
        starts.append(len(calls))
        return update(*args)

    def validated(*args: Any) -> RunningSums:
        before = len(calls)
        meter = evaluate(*args)
        in_validation.extend(calls[before:])
        return meter

    in_validation: list[str] = []
    loop.update, loop.evaluate = started_update, validated
    flags = f"{runs.BASELINE} --max-update 4 --no-save --max-tokens-valid 16 --max-valid-steps 3 --save-dir {folder}"
    with contextlib.redirect_stdout(io.StringIO()):
        train(training_settings(runs.arguments(flags)), world)
    return calls[starts[2] : starts[3]], in_validation


def test_an_update_exchanges_its_sums_once_and_a_validation_at_its_end(tmp_path: Path) -> None:
    assert on_ranks(collectives, 2, tmp_path, tmp_path / "run") == [(["all_reduce"], ["all_reduce"])] * 2
