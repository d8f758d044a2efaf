"""Gradients of several processes: reduced once an update, and drawn with dropout of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
import torch
from ranks import on_ranks

from fairseq.distributed import GradientReducer, World
from fairseq.tasks.typed import training_settings
from fairseq.training import train

BACKENDS = ["c10d", "no_c10d"]


def gradients(world: World) -> dict[str, list[torch.Tensor]]:
    """The gradient after each of an update's batches, and at its end, of each backend."""
    found = {}
    for backend in BACKENDS:
        linear = torch.nn.Linear(2, 1, bias=False)
        reducer = GradientReducer(linear, world, backend)
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
        first, _, end = found[backend]
        assert first.unique().tolist() == [inputs[rank][0]], "of this process alone"
        assert end.unique().tolist() == [mean]


def drawn(world: World, folder: Path) -> list[float]:
    """The next random numbers after an update with dropout, of batches that have one shape on all processes."""
    flags = [runs.BASELINE, "--dropout 0.2 --max-update 1 --no-save --disable-validation --save-dir", folder]
    train(training_settings(runs.arguments(*flags)), world)
    return torch.rand(4).tolist()


def test_processes_draw_other_dropout_masks(tmp_path: Path) -> None:
    numbers = on_ranks(drawn, 3, tmp_path, tmp_path / "run")  # two could differ by what building the model draws
    assert len({tuple(of_rank) for of_rank in numbers}) == 3
