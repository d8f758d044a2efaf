"""Where a value that is not finite is found first: weights, outputs of modules, the loss,
gradients; on which rank."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mistakes import user_error
from ranks import in_threads
from torch import Tensor, nn

from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.modules import devices
from fairseq.training.nonfinite import NonFinite, NonFiniteReport, NonFiniteUpdates, check_scale, check_weights, find


class Tied(nn.Module):
    """Three layers, of which the last one has the weights of the first; returns a dict with the
    middle in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.last = nn.Linear(2, 2)
        self.last.weight = self.first.weight
        self.norm = nn.LayerNorm(2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"steps": [(self.second(self.norm(self.first(x))), 3)], "last": self.last(x)}


class Graph(nn.Module):
    """A model, and what is computed from its output outside of any module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = Tied()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        output = self.model(x)
        loss: Tensor = (output["last"] + output["steps"][0][0]).sum() * self.factor
        return loss


class Task(SimpleNamespace):
    """Steps that count themselves in what they carry."""

    carried: Any = 0

    def step(self, graph: Graph, sample: Any, carried: int, device: torch.device) -> tuple[Any, int]:
        assert not torch.is_grad_enabled() and carried == self.steps and device == torch.device("cpu")
        assert self.autocasts == self.steps + 1, "in the precision of training"
        self.steps += 1
        return (graph(sample["x"] if sample else torch.zeros(1, 2)), 1, {}), carried + 1


FINE = {"id": torch.tensor([4, 5]), "x": torch.ones(2, 2)}
BAD = {"id": torch.tensor([7]), "x": torch.tensor([[1.0, torch.inf]])}


def place(graph: Graph, *samples: Any, world: World | None = None, parameters: Any = None) -> NonFiniteReport:
    """What is found in *graph* after an update of *samples*."""
    named = dict(graph.named_parameters()) if parameters is None else parameters
    task: Any = Task(steps=0, autocasts=0)

    def autocast(device: torch.device) -> Any:
        task.autocasts += 1
        return torch.autocast(device.type, enabled=False)

    precision: Any = SimpleNamespace(autocast=autocast)
    state, hooks = torch.get_rng_state(), [len(module._forward_hooks) for module in graph.modules()]
    finding = find(graph, task, samples, named, precision, world or World(), 9)  # type: ignore[arg-type]
    assert task.steps == len(samples), "all batches, as some may wait for others to take part"
    assert torch.equal(torch.get_rng_state(), state) and task.carried == 0
    assert [len(module._forward_hooks) for module in graph.modules()] == hooks
    return finding


def test_weights_are_named_before_what_they_spoil() -> None:
    graph = Graph()
    with torch.no_grad():
        graph.model.second.bias[1] = torch.nan
        graph.model.norm.weight[0] = torch.inf
    graph.model.first.bias.grad = torch.tensor([torch.nan, 0.0])
    assert place(graph, FINE) == NonFiniteReport(9, [4, 5], "the weights model.second.bias")


def test_the_first_module_whose_output_is_not_finite_is_named_in_any_batch() -> None:
    assert place(Graph(), FINE, None, BAD) == NonFiniteReport(9, [4, 5, 7], "the output of model.first")
    graph = Graph()
    graph.model.norm.register_forward_hook(lambda *args: args[-1] * torch.nan)
    graph.model.first.bias.grad = torch.tensor([torch.nan, 0.0])
    assert place(graph, FINE).location == "the output of model.norm"


@pytest.mark.parametrize("wrap", [lambda x: {"a": 1, "b": [x]}, lambda x: ("text", (x,)), lambda x: [None, {"c": x}]])
def test_values_are_found_in_any_nesting_of_an_output(wrap: Any) -> None:
    graph = Graph()
    graph.model.register_forward_hook(
        lambda module, inputs, output: {**output, "more": wrap(torch.tensor([torch.nan]))}
    )
    assert place(graph, FINE).location == "the output of model"
    graph.model._forward_hooks.clear()
    graph.model.register_forward_hook(lambda module, inputs, output: {**output, "more": wrap(torch.tensor([1]))})
    assert place(graph, FINE).location == ""


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_second_pass_is_not_compiled_and_leaves_the_random_state_of_its_device(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    context = lambda value: asked.append(value) or contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(devices, "same_random_numbers", context)
    monkeypatch.setattr(torch.compiler, "set_stance", context)
    graph: Any = Graph()
    task: Any = SimpleNamespace(carried=0, step=lambda graph, sample, carried, device: (graph(sample["x"]), carried))
    precision: Any = SimpleNamespace(autocast=lambda device: contextlib.nullcontext())
    device = torch.device(kind)
    find(graph, task, [FINE], dict(graph.named_parameters()), precision, World(device=device), 9)
    assert asked == [device, "force_eager"]


def test_a_loss_that_is_not_finite_where_no_module_is() -> None:
    graph = Graph()
    graph.factor = torch.inf
    assert place(graph, FINE).location == "the loss"


def test_the_gradient_nearest_to_the_loss_is_named_where_all_that_was_computed_is_finite() -> None:
    graph = Graph()
    for parameter in graph.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for name in ("first.bias", "second.bias"):
        graph.model.get_parameter(name).grad[0] = torch.nan  # type: ignore[index]
    assert place(graph, FINE).location == "the gradient of model.second.bias"


def test_samples_without_numbers_are_found_too() -> None:
    assert place(Graph(), {"x": BAD["x"]}).ids == []


def test_every_rank_names_the_first_rank_that_found_a_place_and_all_examples() -> None:
    samples = [[FINE], [FINE, BAD], [BAD]]
    one_at_a_time = lambda world: place(Graph(), *samples[world.rank], world=world)  # noqa: E731

    def check(world: World) -> Any:
        finding = NonFiniteReport(9, [4, 5, 4, 5, 7, 7], "the output of model.first on rank 1")
        graph = Graph()
        task: Any = SimpleNamespace(
            carried=0, step=lambda graph, sample, carried, device: (graph(sample["x"]), carried)
        )
        precision: Any = SimpleNamespace(autocast=lambda device: torch.autocast("cpu", enabled=False))
        named = dict(graph.named_parameters())
        return find(graph, task, samples[world.rank], named, precision, world, 9) == finding  # type: ignore[arg-type]

    assert one_at_a_time(World()).location == ""
    assert in_threads(check, 3) == [True] * 3


# --- what is made of it


def test_a_finding_shows_the_first_examples() -> None:
    text = "update 3: loss or gradients are infinite or NaN, first in the loss; examples "
    assert str(NonFiniteReport(3, list(range(8)), "the loss")) == text + "0 1 2 3 4 5 6 7"
    assert str(NonFiniteReport(3, list(range(9)), "the loss")) == text + "0 1 2 3 4 5 6 7 …"


FINDING = NonFiniteReport(3, [1], "the loss")


def test_so_many_updates_may_be_skipped_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    skipped = NonFiniteUpdates(2)
    for _ in range(2):
        skipped.skip(FINDING)
    assert caplog.messages == [f"{FINDING}; skipped {number} of 2" for number in (1, 2)]
    with pytest.raises(NonFinite) as error:
        skipped.skip(FINDING)
    assert error.value.with_flags == (
        f"{FINDING} (2 were skipped before); lower --lr, set --clip-norm or skip such updates with --skip-nonfinite"
    )
    assert error.value.finding is FINDING
    with user_error("examples 1; lower --lr"):
        NonFiniteUpdates(0).skip(FINDING)


def test_a_loss_scale_that_may_help_ends_nothing() -> None:
    scaler: Any = SimpleNamespace(exhausted=lambda: None)
    check_scale(scaler, lambda: pytest.fail("costs a forward pass"))
    scaler = SimpleNamespace(exhausted=lambda: "too low")
    with pytest.raises(NonFinite) as error:
        check_scale(scaler, lambda: FINDING)
    assert error.value.finding is FINDING
    assert error.value.with_flags == (
        f"{FINDING} (too low); resume from an earlier checkpoint with a lower --lr or --clip-norm, or train with --bf16"
    )


def test_weights_of_any_rank_that_are_not_finite_are_named_on_all() -> None:
    """One rank has no part of a parameter, another one nothing at all."""

    def check(world: World) -> None:
        fine = {"a": nn.Parameter(torch.ones(3)), "none": nn.Parameter(torch.ones(0))}
        bad = {"b": nn.Parameter(torch.tensor([1.0, -torch.inf])), "c": nn.Parameter(torch.tensor([torch.nan]))}
        check_weights([fine, {**fine, **bad}, {}, {"c": bad["c"]}][world.rank], world, 4)

    errors = in_threads(check, 4)
    assert all(isinstance(error, UserError) for error in errors)
    assert {error.with_flags for error in errors if isinstance(error, UserError)} == {
        "update 4: the weights b are infinite or NaN, so they are not saved; resume from the checkpoint before with "
        "a lower --lr or --clip-norm"
    }
    check_weights({"a": nn.Parameter(torch.tensor([3e38, -3e38]))}, World(), 4)
