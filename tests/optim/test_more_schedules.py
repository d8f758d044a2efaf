"""The schedules tri_stage, triangular and reduce_lr_on_plateau, and the cosine of fairseq 0.10
beside that of 0.9."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest
import torch
from mistakes import logged, user_error

from fairseq.errors import UserError
from fairseq.optim import build_optimizer
from fairseq.optim.lr_scheduler import build_lr_scheduler


def build(name, **settings):
    args = Namespace(**{"lr": [0.1], "lr_scheduler": name, "optimizer": "sgd", **settings})
    return build_lr_scheduler(args, build_optimizer(args, [torch.nn.Parameter(torch.zeros(1))]))


def test_tri_stage_rises_holds_and_decays():
    schedule = build("tri_stage", warmup_steps=10, hold_steps=5, decay_steps=20, final_lr_scale=0.05)
    rates = {0: 0.001, 5: 0.0505, 10: 0.1, 14: 0.1, 15: 0.1, 25: 0.1 * 0.05**0.5, 35: 0.005, 1000: 0.005}
    for updates, rate in rates.items():
        assert schedule.step_update(updates) == pytest.approx(rate) == schedule.optimizer.get_lr()


def test_tri_stage_by_shares_of_the_run():
    by_shares = build("tri_stage", phase_ratio=[0.1, 0.4, 0.5], max_update=100)
    by_steps = build("tri_stage", warmup_steps=10, hold_steps=40, decay_steps=50)
    assert [by_shares.step_update(n) for n in range(120)] == [by_steps.step_update(n) for n in range(120)]
    with user_error("--phase-ratio 0.1,0.4: expected three"):
        build("tri_stage", phase_ratio=[0.1, 0.4], max_update=100)
    with pytest.raises(UserError, match="phase_ratio.*needs max_update"):
        build("tri_stage", phase_ratio=[0.1, 0.4, 0.5])


def test_triangular_rises_and_falls_and_shrinks():
    schedule = build("triangular", max_lr=0.5, lr_period_updates=10, lr_shrink=0.5)
    rates = {0: 0.1, 5: 0.5, 7: 0.34, 10: 0.1, 15: 0.25, 20: 0.1, 25: 0.125}
    for updates, rate in rates.items():
        assert schedule.step_update(updates) == pytest.approx(rate)
    both = build("triangular", max_lr=0.5, lr_period_updates=10, lr_shrink=0.5, shrink_min=True)
    assert both.step_update(10) == pytest.approx(0.05)
    with pytest.raises(UserError, match="max_lr None: must be greater than lr 0.1"):
        build("triangular")


def test_plateau_shrinks_the_rate_after_so_many_epochs_without_improvement():
    schedule = build("reduce_lr_on_plateau", lr_patience=1, lr_shrink=0.5, lr_threshold=0.01)
    figures = [5.0, 4.0, 3.99, 4.5, 3.0, math.nan, 3.1, 2.9]
    rates = [schedule.step(epoch, figure) for epoch, figure in enumerate(figures, 1)]
    assert rates == [0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025]
    assert schedule.step_update(12) == 0.025


def test_plateau_follows_torch():
    generator = torch.Generator().manual_seed(0)
    figures = (5 + torch.randn(40, generator=generator)).tolist()
    for maximize in (False, True):
        ours = build("reduce_lr_on_plateau", maximize_best_checkpoint_metric=maximize, lr_patience=2)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        mode = "max" if maximize else "min"
        theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode, 0.1, 2, threshold=1e-4, eps=0)
        for epoch, figure in enumerate(figures, 1):
            theirs.step(figure)
            assert ours.step(epoch, figure) == pytest.approx(optimizer.param_groups[0]["lr"])


def test_plateau_goes_on_from_its_state_and_from_fairseqs():
    schedule = build("reduce_lr_on_plateau", lr_patience=1)
    for epoch, figure in enumerate([3.0, 4.0], 1):
        schedule.step(epoch, figure)
    other = build("reduce_lr_on_plateau", lr_patience=1)
    other.load_state_dict(schedule.state_dict())
    assert other.step(3, 4.0) == schedule.step(3, 4.0) == pytest.approx(0.01)
    foreign = build("reduce_lr_on_plateau")
    foreign.optimizer.set_lr(0.02)  # that of the restored optimizer
    foreign.load_state_dict({"best": math.inf, "last_epoch": 1})
    assert foreign.step_update(20) == 0.02 and foreign.step(1, 3.0) == 0.02 and foreign.best == 3.0


def test_plateau_ignores_validations_during_the_warmup():
    schedule = build("reduce_lr_on_plateau", warmup_updates=10)
    assert schedule.step_update(5) == pytest.approx(0.05)
    assert [schedule.step(1, 1.0), schedule.step(2, 2.0)] == pytest.approx([0.05, 0.05])
    assert schedule.step_update(10) == 0.1


def test_cosine_without_max_lr_is_that_of_fairseq_0_10():
    new = build("cosine", lr=[1.0], min_lr=0.1, lr_period_updates=10, warmup_updates=4, stop_min_lr=0.2)
    old = build("cosine", lr=[0.1], max_lr=1.0, lr_period_updates=10, warmup_updates=4, min_lr=0.2)
    assert [new.step_update(n) for n in range(30)] == [old.step_update(n) for n in range(30)]
    assert new.step_update(4) == 1.0 and new.step_update(13) > 0.1
    assert new.stop_lr == old.stop_lr == 0.2


def test_cosines_minimum_is_no_reason_to_stop_and_is_zero_by_default():
    schedule = build("cosine", lr=[1.0], min_lr=0.1, lr_period_updates=10)
    assert schedule.stop_lr == -1.0
    zero = build("cosine", lr=[1.0], lr_period_updates=10, lr_shrink=1.0)
    assert zero.step_update(9) == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)))
    with user_error("--min-lr 1.0: must be less than --lr 1.0"):
        build("cosine", lr=[1.0], min_lr=1.0, lr_period_updates=10)


def test_wsd_warms_up_stays_and_decays_to_zero_after_the_last_update():
    schedule = build("wsd", warmup_updates=4, max_update=100, decay_updates=16)
    rates = {0: 0.025, 3: 0.1, 4: 0.1, 84: 0.1, 88: 0.05, 93: 0.025, 99: 0.1 * (1 - (15 / 16) ** 0.5), 100: 0, 120: 0}
    for updates, rate in rates.items():
        assert schedule.step_update(updates) == pytest.approx(rate, abs=1e-12) == schedule.optimizer.get_lr()
    linear = build("wsd", total_num_update=100, max_update=500, decay_shape="linear")
    expected = {0: 0.1, 80: 0.1, 85: 0.075, 99: 0.005, 100: 0}
    assert [linear.step_update(n) for n in expected] == pytest.approx(list(expected.values()))
    never = build("wsd", max_update=100, decay_updates=0)
    assert [never.step_update(n) for n in (0, 99, 100)] == [0.1] * 3


def test_wsd_needs_an_end_that_leaves_room_for_the_decay():
    with pytest.raises(UserError, match="lr_scheduler wsd: .*give max_update"):
        build("wsd")
    with user_error("--warmup-updates 90: warmup and the decay's 20 updates exceed the 100"):
        build("wsd", warmup_updates=90, max_update=100)
    with user_error("--lr 0.1,0.2: --lr-scheduler wsd takes one rate"):
        build("wsd", lr=[0.1, 0.2], max_update=100)


def test_a_warmup_rises_in_a_straight_line_from_its_first_rate():
    """The rate before the last update of a warmup of ten from 0.2 to 0.8 is 0.2 + 0.6 · n / 10."""
    warmup = {"lr": [0.8], "warmup_updates": 10, "warmup_init_lr": 0.2}
    cosine = {"warmup_updates": 10, "warmup_init_lr": 0.2, "lr": [0.1], "max_lr": 0.8, "lr_period_updates": 50}
    for schedule in (
        build("inverse_sqrt", **warmup),
        build("reduce_lr_on_plateau", **warmup),
        build("cosine", **cosine),
    ):
        rates = [schedule.step_update(n) for n in range(11)]
        assert rates == pytest.approx([0.2 + 0.06 * n for n in range(11)])
    assert build("cosine", **{**cosine, "warmup_init_lr": 0.0}).optimizer.get_lr() == 0.0


@pytest.mark.parametrize(
    ("name", "settings", "rate"),
    [
        ("inverse_sqrt", {"warmup_init_lr": 0.1}, 0.1),
        ("reduce_lr_on_plateau", {"warmup_init_lr": 0.1}, 0.1),
        ("cosine", {"max_lr": 0.2, "warmup_init_lr": 0.2, "warmup_updates": 5, "max_update": 9}, 0.2),
        ("cosine", {"max_lr": 0.2, "warmup_updates": 8, "max_update": 9}, 0.1),
        ("cosine", {"max_lr": 0.2, "lr_period_updates": 0.0, "max_update": 9}, 0.2),
        ("polynomial_decay", {"end_learning_rate": 0.1, "max_update": 9}, 0.1),
        ("polynomial_decay", {"warmup_updates": 9, "total_num_update": 10}, 0.0),
        ("tri_stage", {"phase_ratio": [0.0, 1.0, 0.0], "max_update": 1}, 0.1),
        ("wsd", {"warmup_updates": 80, "max_update": 100}, 0.1 / 80),
        ("wsd", {"max_update": 1}, 0.1),
    ],
)
def test_the_limits_themselves_are_valid(name, settings, rate):
    assert build(name, **settings).optimizer.get_lr() == pytest.approx(rate)


def test_reaching_the_limit_is_invalid_where_the_range_would_be_empty():
    for name, settings, flag in [
        ("triangular", {"max_lr": 0.1}, "--max-lr 0.1"),
        ("reduce_lr_on_plateau", {"warmup_init_lr": 0.2}, "--warmup-init-lr 0.2"),
        ("polynomial_decay", {"lr": [0.3, 0.1], "end_learning_rate": 0.2}, "--end-learning-rate 0.2"),
        ("tri_stage", {"phase_ratio": [0.1, 0.4, 0.4], "max_update": 9}, "--phase-ratio 0.1,0.4,0.4"),
    ]:
        with user_error(flag):
            build(name, **settings)


def test_stages_of_no_length_are_passed_over():
    decayed = build("tri_stage", warmup_steps=0, hold_steps=5, decay_steps=0, final_lr_scale=0.05)
    assert [decayed.step_update(n) for n in (0, 4, 5, 6)] == pytest.approx([0.1, 0.1, 0.005, 0.005])
    every_update = build("cosine", lr=[0.1], max_lr=1.0, lr_period_updates=1, lr_shrink=0.5, max_update=100)
    assert [every_update.step_update(n) for n in range(3)] == [1.0, 0.5, 0.25]


def test_triangles_of_an_odd_period_have_the_length_of_the_even_one_below():
    odd, even = (build("triangular", max_lr=0.5, lr_period_updates=period) for period in (11, 10))
    assert [odd.step_update(n) for n in range(40)] == [even.step_update(n) for n in range(40)]


def test_both_ends_of_a_triangle_shrink_if_asked():
    schedule = build("triangular", max_lr=0.5, lr_period_updates=10, lr_shrink=0.5, shrink_min=True)
    first = [schedule.step_update(n) for n in range(10)]
    for cycle in (1, 2):
        expected = [0.5**cycle * rate for rate in first]
        assert [schedule.step_update(10 * cycle + n) for n in range(10)] == pytest.approx(expected)


def test_a_plateau_counts_from_the_validation_at_the_end_of_the_warmup():
    schedule = build("reduce_lr_on_plateau", warmup_updates=10)
    schedule.step_update(10)
    assert [schedule.step(epoch, 1.0) for epoch in (1, 2, 3)] == pytest.approx([0.1, 0.01, 0.001])
    assert schedule.step(4) == pytest.approx(0.001)  # without a validation nothing is counted


def test_training_stops_at_the_stop_rate_or_else_at_the_minimum():
    assert build("fixed", min_lr=0.01).stop_lr == 0.01
    assert build("fixed", min_lr=0.01, stop_min_lr=0.02).stop_lr == 0.02
    assert build("cosine", lr=[0.1], max_lr=1.0, lr_period_updates=9, min_lr=0.01).stop_lr == 0.01


def test_a_restored_cosine_names_the_flag_that_keeps_its_period(caplog):
    before, longer = (build("cosine", max_lr=1.0, max_update=updates) for updates in (20, 30))
    caplog.set_level("INFO")
    before.load_state_dict(before.state_dict())
    before.load_state_dict({"best": 2.5})  # fairseq's has no period
    assert not caplog.records and before.best == 2.5
    longer.load_state_dict(before.state_dict())
    assert "--lr-period-updates 20" in logged(caplog)[-1]
    assert longer.step_update(15) == pytest.approx(0.55)  # that of the new period, half over


def test_the_first_epoch_of_a_list_also_stands_for_what_is_before_it():
    schedule = build("fixed", lr=[0.4, 0.2])
    assert [schedule.step_begin_epoch(epoch) for epoch in (0, 1, 2)] == [0.4, 0.4, 0.2]


def test_polynomial_decay_ends_with_training_unless_told_otherwise():
    # fairseq 0.12.2 interpolates `optimization.max_update`; its RoBERTa YAML files rely on it.
    schedule = build("polynomial_decay", lr=[1.0], warmup_updates=10, max_update=110)
    assert [schedule.step_update(n) for n in (10, 60, 110)] == pytest.approx([1.0, 0.5, 0.0])
    with user_error("--total-num-update"):
        build("polynomial_decay", lr=[1.0]).step_update(1)


def test_tri_stage_has_stages_only_where_lengths_are_given():
    # fairseq 0.12.2's defaults are 0, 0 and 0.
    assert build("tri_stage", lr=[1.0], decay_steps=10, final_lr_scale=0.01).step_update(10) == pytest.approx(0.01)
    with user_error("--phase-ratio"):
        build("tri_stage")
