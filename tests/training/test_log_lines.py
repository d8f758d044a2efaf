"""The lines of the log: which metrics, in which order, of which updates, and at what speed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq.logging.figures import NamedSums, RunningSums, language_model_figures
from fairseq.training import log
from fairseq.training.stages import Stage

CPU = torch.device("cpu")
STAGE = Stage(2, 64, 90)


class Epoch(SimpleNamespace):
    """An epoch's iterator of 20 batches, 5 of them read."""

    epoch, iterations_in_epoch, batches = 3, 5, 20

    def __len__(self) -> int:
        return self.batches


def add(meter: RunningSums, loss: float, tokens: int, rows: int, gnorm: float) -> None:
    sums = NamedSums.of({"loss": loss, "ntokens": tokens, "nsentences": rows}, tokens, CPU)
    meter.add(sums, gnorm=torch.tensor(gnorm), clip=torch.tensor(100.0))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which a test changes."""
    time = [100.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: time[0])
    return time


@pytest.fixture
def trainer() -> Any:
    """What the log reads of a trainer, with two updates in the meter of the interval and three in
    the epoch's."""
    meters = {name: RunningSums(CPU) for name in ("train", "train_inner")}
    for number in range(3):
        for name in ("train", "train_inner")[: 1 if number == 0 else 2]:
            add(meters[name], loss=math.log(2) * 40, tokens=10 * (number + 1), rows=number + 1, gnorm=float(number))
    return SimpleNamespace(
        meters=meters, figures=language_model_figures(), num_updates=43, get_lr=lambda: 0.25, scaler=None
    )


def at(trainer: Any, batches: Epoch, stage: Stage | None) -> Any:
    """The state of *trainer* at a position in the data, without the time of the run."""
    trainer.batches, trainer.stage, trainer.wall = batches, stage, lambda: 9.0
    return trainer


def test_an_interval_has_its_updates_metrics_in_fairseqs_order(trainer: Any, now: list[float]) -> None:
    clock = log.Clock({})
    clock.before["train_inner"] = (10.0, 1)
    now[0] = 102.0
    line = log.interval_line(at(trainer, Epoch(), None), clock)
    loss = 80 / 50  # bits a token, of 20 and 30 tokens
    expected = {
        "epoch": 3,
        "update": 2.25,
        "loss": loss,
        "nll_loss": loss,
        "ppl": 2**loss,
        "wps": (50 - 10) / 2,
        "ups": (2 - 1) / 2,
        "wpb": 25.0,
        "bsz": 2.5,
        "num_updates": 43,
        "lr": 0.25,
        "gnorm": 1.5,
        "clip": 100.0,
        "train_wall": 2.0,
        "wall": 9.0,
    }
    assert line == pytest.approx(expected) and list(line) == list(expected)


def test_an_interval_that_ends_leaves_nothing_to_the_next(trainer: Any, now: list[float]) -> None:
    clock = log.Clock({})
    clock.before["train_inner"] = (10.0, 1)
    now[0] = 104.0
    log.interval_line(at(trainer, Epoch(), None), clock)
    add(trainer.meters["train_inner"], loss=math.log(2) * 6, tokens=2, rows=1, gnorm=7.0)
    now[0] = 105.0
    line = log.interval_line(at(trainer, Epoch(), STAGE), clock)
    assert line["stage"] == 2
    assert [line[name] for name in ("loss", "wps", "ups", "wpb", "gnorm")] == pytest.approx([3.0, 2.0, 1.0, 2.0, 7.0])
    assert trainer.meters["train"].updates == 3, "the epoch goes on"


def test_a_line_within_an_interval_changes_nothing(trainer: Any, now: list[float]) -> None:
    clock = log.Clock({})
    clock.before["train_inner"] = (10.0, 1)
    now[0] = 101.0
    first = log.interval_line(at(trainer, Epoch(), None), clock, ends=False)
    now[0] = 102.0
    second = log.interval_line(at(trainer, Epoch(), None), clock)
    assert (first["wps"], second["wps"]) == (40.0, 20.0), "both since the interval began"
    assert first["loss"] == second["loss"] and trainer.meters["train_inner"].updates == 0


def test_an_epochs_line_has_all_its_updates_and_its_speed_is_that_of_the_epoch(trainer: Any, now: list[float]) -> None:
    clock = log.Clock({"train": RunningSums(CPU), "train_inner": RunningSums(CPU)})
    now[0] = 103.0
    clock.lap()
    now[0] = 104.0
    line = log.epoch_line(at(trainer, Epoch(), STAGE), clock)
    assert (line["wps"], line["ups"]) == (60 / 4, 3 / 4)
    assert (line["loss"], line["wpb"], line["gnorm"]) == pytest.approx((120 / 60, 20, 1))
    assert list(line)[:4] == ["epoch", "update", "stage", "tokens_per_sample"]
    assert (line["stage"], line["tokens_per_sample"]) == (2, 64)


def test_the_loss_scale_is_in_the_line_where_there_is_one(trainer: Any) -> None:
    assert "loss_scale" not in log.epoch_line(at(trainer, Epoch(), None), log.Clock(trainer.meters))
    trainer.scaler = SimpleNamespace(scale=64.0)
    line = log.epoch_line(at(trainer, Epoch(), None), log.Clock(trainer.meters))
    assert list(line.items())[-3] == ("loss_scale", 64.0)


def test_an_epoch_without_batches_has_a_line(trainer: Any) -> None:
    single: Any = Epoch(batches=1, iterations_in_epoch=1)
    assert log.epoch_line(at(trainer, single, None), log.Clock(trainer.meters))["update"] == 3
    empty: Any = Epoch(batches=0, iterations_in_epoch=0)
    assert log.epoch_line(at(trainer, empty, None), log.Clock(trainer.meters))["update"] == 2


def test_metrics_that_were_not_measured_are_left_out(trainer: Any) -> None:
    trainer.meters["train"] = RunningSums(CPU)
    trainer.meters["train"].add(NamedSums.of({"ntokens": 1}, 1, CPU))
    trainer.figures = {"loss": trainer.figures["loss"], "accuracy": SimpleNamespace(is_known=lambda totals: False)}
    line = log.epoch_line(at(trainer, Epoch(), None), log.Clock(trainer.meters))
    assert not line.keys() & {"accuracy", "gnorm", "clip"} and "loss" in line


@pytest.mark.parametrize("stage", [None, STAGE])
def test_a_validations_line_has_the_speed_before_the_sizes(stage: Stage | None) -> None:
    line = log.validation_line(4, stage, {"loss": 1.0, "wpb": 7.0, "bsz": 2.0, "f1": 0.5}, 30.0)
    of_stage = ["stage", "tokens_per_sample"] if stage else []
    assert list(line) == ["epoch", *of_stage, "loss", "f1", "wps", "wpb", "bsz"]
    assert {**line, "stage": 2, "tokens_per_sample": 64} == {
        "epoch": 4,
        "stage": 2,
        "tokens_per_sample": 64,
        "loss": 1.0,
        "f1": 0.5,
        "wps": 30.0,
        "wpb": 7.0,
        "bsz": 2.0,
    }
