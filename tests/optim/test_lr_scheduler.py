"""Learning-rate schedules: the originals' rates, whatever the order in which they are asked for."""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import torch

from fairseq.errors import UserError
from fairseq.optim import build_optimizer
from fairseq.optim.lr_scheduler import LR_SCHEDULERS, FairseqLRScheduler, build_lr_scheduler, register_lr_scheduler

EXPECTED = Path(__file__).parents[1] / "golden" / "language_model" / "expected"
GOLDEN_COSINE = {
    "lr": [0.0001], "max_lr": 0.2, "t_mult": 2.0, "lr_period_updates": 200.0, "lr_shrink": 0.75,
    "warmup_updates": 20, "warmup_init_lr": 1e-07, "min_lr": 1e-09,
}  # fmt: skip


def build(name, **settings) -> FairseqLRScheduler:
    args = Namespace(**{"lr": [0.1], "lr_scheduler": name, "optimizer": "sgd", **settings})
    return build_lr_scheduler(args, build_optimizer(args, [torch.nn.Parameter(torch.zeros(1))]))


@pytest.mark.parametrize("trace", ["trace_reset.json", "trace_stage2.json"])
def test_cosine_gives_the_rates_of_the_originals_run(trace):
    schedule = build("cosine", **GOLDEN_COSINE)
    entries = json.loads((EXPECTED / trace).read_text())
    assert len(entries) >= 30
    for entry in entries:
        lr = schedule.step_update(entry["num_updates"])
        assert lr == schedule.optimizer.get_lr()
        assert lr == pytest.approx(entry["lr"], rel=1e-5, abs=1e-9)


def test_cosine_gives_the_rate_that_the_originals_checkpoint_holds():
    assert build("cosine", **GOLDEN_COSINE).step_update(131) == pytest.approx(0.08286568642707301, rel=1e-12)


def test_cosine_restarts_in_longer_and_lower_periods():
    schedule = build("cosine", lr=[0.1], max_lr=1.0, t_mult=2, lr_period_updates=10, lr_shrink=0.5, warmup_updates=5)
    starts = {5: 0, 15: 1, 35: 2, 75: 3}
    for start, period in starts.items():
        assert schedule.step_update(start) == pytest.approx(1.0 * 0.5**period)
        middle = start + 5 * 2**period
        assert schedule.step_update(middle) == pytest.approx(0.55 * 0.5**period)
        last, length = start + 10 * 2**period - 1, 10 * 2**period
        share = 0.5 * (1 + math.cos(math.pi * (length - 1) / length))
        assert schedule.step_update(last) == pytest.approx((0.1 + 0.9 * share) * 0.5**period)


def test_cosine_with_equal_periods_needs_no_counting():
    schedule = build("cosine", lr=[0.1], max_lr=1.0, lr_period_updates=10, lr_shrink=1.0)
    for start in (0, 10, 20, 10_000_000):
        assert schedule.step_update(start) == pytest.approx(1.0)
        assert schedule.step_update(start + 5) == pytest.approx(0.55)


def test_cosines_period_is_the_rest_of_training_unless_given():
    schedule = build("cosine", lr=[0.1], max_lr=1.0, warmup_updates=10, max_update=30)
    assert schedule.step_update(20) == pytest.approx(0.55)


def test_the_first_update_uses_the_warmups_first_rate():
    assert build("cosine", **GOLDEN_COSINE).optimizer.get_lr() == 1e-07
    assert build("cosine", **{**GOLDEN_COSINE, "warmup_init_lr": -1}).optimizer.get_lr() == 0.0001
    assert build("inverse_sqrt", warmup_init_lr=0.01).optimizer.get_lr() == 0.01
    assert build("fixed", warmup_updates=10).optimizer.get_lr() == pytest.approx(0.01)


def test_inverse_sqrt_rises_and_falls_with_the_root():
    schedule = build("inverse_sqrt", lr=[0.8], warmup_updates=100)
    rates = {0: 0.0, 50: 0.4, 100: 0.8, 400: 0.4, 10_000: 0.08}
    for updates, rate in rates.items():
        assert schedule.step_update(updates) == pytest.approx(rate)
    assert build("inverse_sqrt").config.warmup_updates == 4000
    unwarmed = build("inverse_sqrt", lr=[0.8], warmup_updates=0)
    assert [unwarmed.step_update(n) for n in (0, 1, 4)] == pytest.approx([0.8, 0.8, 0.4])


def test_polynomial_decay_follows_its_power():
    schedule = build("polynomial_decay", lr=[1.0], warmup_updates=10, total_num_update=110, end_learning_rate=0.2)
    rates = {0: 0.0, 5: 0.5, 10: 1.0, 60: 0.6, 110: 0.2, 500: 0.2}
    for updates, rate in rates.items():
        assert schedule.step_update(updates) == pytest.approx(rate)
    square = build("polynomial_decay", lr=[1.0], total_num_update=100, power=2.0)
    assert square.step_update(50) == pytest.approx(0.25)


def test_polynomial_decay_gives_the_rate_that_the_originals_checkpoint_holds():
    schedule = build("polynomial_decay", lr=[0.002], warmup_updates=10, total_num_update=100)
    assert schedule.step_update(60) == pytest.approx(0.0008888888888888888, rel=1e-12)


def test_polynomial_decay_follows_a_list_until_it_is_told_to_leave_it():
    schedule = build("polynomial_decay", lr=[1.0, 0.5, 0.25], total_num_update=100, force_anneal=2)
    schedule.step_update(50)
    assert [schedule.step_begin_epoch(epoch) for epoch in (1, 2, 3)] == pytest.approx([0.5, 0.25, 0.25])


def test_fixed_gives_each_epoch_its_rate_then_shrinks():
    schedule = build("fixed", lr=[0.4, 0.2], force_anneal=4)
    assert [schedule.step_begin_epoch(e) for e in range(1, 7)] == pytest.approx([0.4, 0.2, 0.2, 0.02, 0.002, 0.0002])
    assert [build("fixed", lr=[0.4, 0.2]).step_begin_epoch(e) for e in (2, 9)] == [0.2, 0.2]


def test_fixed_warms_up():
    schedule = build("fixed", lr=[0.4], warmup_updates=4)
    assert [schedule.step_update(n) for n in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("cosine", GOLDEN_COSINE),
        ("inverse_sqrt", {"warmup_updates": 50}),
        ("polynomial_decay", {"warmup_updates": 50, "total_num_update": 150, "lr": [0.1, 0.05]}),
        ("fixed", {"warmup_updates": 150, "lr": [0.1, 0.05]}),
    ],
)
def test_a_restored_schedule_goes_on_exactly(name, settings):
    whole, rates = build(name, **settings), {}
    for epoch in (1, 2):
        whole.step_begin_epoch(epoch)
        for n in range(100 * (epoch - 1) + 1, 100 * epoch + 1):
            rates[n] = whole.step_update(n)
    whole.step(2, val_loss=3.0)
    restored = build(name, **settings)
    restored.load_state_dict(whole.state_dict())
    assert restored.best == 3.0
    restored.step_begin_epoch(2)
    assert restored.step_update(137) == rates[137]
    assert [restored.step_update(n) for n in range(138, 201)] == [rates[n] for n in range(138, 201)]


def test_the_best_loss_is_the_least():
    schedule = build("fixed")
    assert schedule.state_dict() == {"best": None}
    for epoch, loss in enumerate([3.0, 2.0, 4.0], start=1):
        schedule.step(epoch, loss)
    schedule.step(4)
    assert schedule.state_dict() == {"best": 2.0}


@pytest.mark.parametrize(
    ("name", "settings", "flags"),
    [
        ("cosine", {"max_lr": 0.1}, ["--max-lr 0.1", "--lr 0.1"]),
        ("cosine", {}, ["--lr-period-updates", "--max-update"]),
        ("cosine", {"max_lr": 1.0}, ["--lr-period-updates", "--max-update", "--warmup-updates"]),
        ("cosine", {"max_lr": 1.0, "warmup_updates": 9, "max_update": 9}, ["--lr-period-updates"]),
        ("cosine", {"max_lr": 1.0, "max_update": 9, "warmup_init_lr": 2.0}, ["--warmup-init-lr 2.0", "--max-lr 1.0"]),
        ("cosine", {"max_lr": 1.0, "lr": [0.1, 0.2]}, ["--lr 0.1,0.2", "cosine", "fixed"]),
        ("cosine", {"max_lr": 1.0, "t_mult": 0.5}, ["--t-mult 0.5"]),
        ("inverse_sqrt", {"lr": [0.1, 0.2]}, ["--lr 0.1,0.2"]),
        ("inverse_sqrt", {"warmup_init_lr": 0.2}, ["--warmup-init-lr 0.2", "--lr 0.1"]),
        (
            "polynomial_decay",
            {"warmup_updates": 9, "total_num_update": 9},
            ["--total-num-update 9", "--warmup-updates"],
        ),
        ("polynomial_decay", {"end_learning_rate": 0.2}, ["--end-learning-rate 0.2", "--lr 0.1"]),
        ("fixd", {}, ["--lr-scheduler fixd", "fixed"]),
    ],
)
def test_contradictions_are_user_errors_that_name_the_flags(name, settings, flags):
    with pytest.raises(UserError) as error:
        build(name, **settings)
    message = error.value.with_flags
    assert "\n" not in message and all(part in message for part in flags)


def test_each_schedule_has_its_own_defaults_for_shared_flags():
    defaults = {}
    for name in ("cosine", "inverse_sqrt", "fixed"):
        parser = ArgumentParser()
        LR_SCHEDULERS[name].add_args(parser)
        assert parser.parse_args([]) == Namespace()  # what is not given stays out
        defaults[name] = LR_SCHEDULERS[name].config_class().warmup_updates
    assert defaults == {"cosine": 0, "inverse_sqrt": 4000, "fixed": 0}


def test_a_plug_in_of_fairseqs_older_style_works():
    @register_lr_scheduler("test_halving")
    class Plugin(FairseqLRScheduler):
        @staticmethod
        def add_args(parser):
            parser.add_argument("--halving-every", type=int, default=10)

        def step_update(self, num_updates):
            self.optimizer.set_lr(self.args.lr[0] * 0.5 ** (num_updates // self.args.halving_every))
            return self.optimizer.get_lr()

    assert build("test_halving", halving_every=5).step_update(10) == 0.025
    with pytest.raises(ValueError, match="must extend FairseqLRScheduler"):
        register_lr_scheduler("test_no_schedule")(dict)
