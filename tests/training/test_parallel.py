"""What is applied to a model from outside: precision, device, recomputation, and the reduction that
flags ask for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from mistakes import user_error

from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.tasks import setup_task
from fairseq.training import parallel

SHARDED = "--ddp-backend fully_sharded"


class Steps:
    """What is done to a model, in order; arguments that tests compare are recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *flags: Any, size: int = 1, model: str = runs.BASELINE) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.settings = training_settings(runs.arguments(model, *flags))
        self.task = setup_task(self.settings)
        self.model = self.task.build_model(self.settings)
        self.graph = self.task.loss_graph(self.model, self.task.build_criterion(self.settings))
        self.world = World(0, size)
        for name in ("compile_model", "checkpoint_activations", "GradientReducer", "ShardedReducer"):
            monkeypatch.setattr(parallel, name, self.recorder(name))
        monkeypatch.setattr(self.graph.criterion, "to", self.recorder("criterion"))

    def recorder(self, name: str) -> Any:
        return lambda *args, **options: self.done.append((name, *args, *options.values()))

    def run(self) -> list[tuple[Any, ...]]:
        precision: Any = SimpleNamespace(move=self.recorder("move"), on=lambda device: torch.bfloat16)
        parallel.data_parallel(
            self.graph, precision, self.settings.distributed, self.settings.common.compile, self.world
        )
        return self.done


def test_a_model_is_placed_and_its_gradients_are_reduced_as_flags_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, "--ddp-backend no_c10d --bucket-cap-mb 7")
    assert steps.run() == [
        ("move", steps.model, torch.device("cpu")),
        ("criterion", torch.device("cpu")),
        ("GradientReducer", steps.graph, steps.world, "no_c10d", 7, False),
    ]


def test_activations_are_recomputed_then_layers_are_compiled_then_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, size, last in (("", 1, "GradientReducer"), (SHARDED, 2, "ShardedReducer")):
        steps = Steps(monkeypatch, f"--compile --checkpoint-activations {flags}", size=size)
        names = [name for name, *_ in steps.run() if name not in ("move", "criterion")]
        assert names == ["checkpoint_activations", "compile_model", last]


@pytest.mark.parametrize(
    ("flags", "expected"), [("", False), ("--find-unused-parameters", True), ("--decoder-layerdrop 0.5", True)]
)
def test_parameters_without_a_gradient_are_looked_for_where_there_may_be_some(
    monkeypatch: pytest.MonkeyPatch, flags: str, expected: bool
) -> None:
    assert Steps(monkeypatch, flags).run()[-1][-1] is expected


@pytest.mark.parametrize(("arch", "is_tied"), [("pythia_tiny", False), ("transformer_lm_tiny", True)])
def test_a_sharded_model_is_not_moved_whole_to_a_device(
    monkeypatch: pytest.MonkeyPatch, arch: str, is_tied: bool
) -> None:
    """Its groups are layers, and embeddings that are not the output layer's, too."""
    steps = Steps(monkeypatch, SHARDED, size=2, model=f"--cpu --arch {arch} --tokens-per-sample 16")
    decoder: Any = steps.model.decoder
    groups = [*decoder.layers], [] if is_tied else [decoder.embed_tokens]
    assert steps.run() == [
        ("move", steps.model, None),
        ("ShardedReducer", steps.graph, *groups, steps.world, steps.settings.distributed, torch.bfloat16),
    ]
    alone = Steps(monkeypatch, SHARDED).run()
    assert [step[0] for step in alone] == ["move", "criterion", "GradientReducer"], "one process has all parts"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            f"{SHARDED} --decoder-layerdrop 0.5",
            "--decoder-layerdrop: leaves out layers, which --ddp-backend fully_sharded",
        ),
        ("--checkpoint-policy selective", "--checkpoint-policy: needs --checkpoint-activations; add it"),
        ("--cpu-offload", "--cpu-offload: needs --ddp-backend fully_sharded; add it or leave this out"),
        ("--shard-group-size 2", "--shard-group-size: needs --ddp-backend fully_sharded; add it or leave this out"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, flags: str, message: str
) -> None:
    with pytest.raises(UserError) as error:
        Steps(monkeypatch, flags, size=2).run()
    assert error.value.with_flags.startswith(message)


def test_sharded_flags_are_taken_with_their_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Steps(monkeypatch, f"{SHARDED} --cpu-offload --shard-group-size 2", size=2).run()


def test_optimizers_of_whole_parameters_are_refused_where_they_have_parts() -> None:
    class Whole:
        updates_parts = False

    class Parts:
        updates_parts = True

    whole: Any = Whole()
    parts: Any = Parts()
    sharded, plain = (training_settings(runs.arguments(runs.BASELINE, flags)) for flags in (SHARDED, ""))
    for optimizer, settings, size in ((parts, sharded, 2), (whole, sharded, 1), (whole, plain, 2)):
        parallel.check_optimizer(optimizer, settings.distributed, World(0, size))
    with user_error("^--ddp-backend fully_sharded: Whole needs whole parameters; use --optimizer adam"):
        parallel.check_optimizer(whole, sharded.distributed, World(0, 2))


def test_an_encoder_that_leaves_out_layers_is_not_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    bert = "--cpu --task masked_lm --arch bert_tiny --encoder-layerdrop 0.5"
    assert Steps(monkeypatch, model=bert).run()[-1][-1] is True
    with user_error("--encoder-layerdrop: leaves out layers, which --ddp-backend fully_sharded cannot"):
        Steps(monkeypatch, SHARDED, size=2, model=bert).run()
