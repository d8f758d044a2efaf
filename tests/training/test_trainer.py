"""A trainer: one update is the naive one, its state goes on exactly, and what is reset or differs
is left aside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mistakes import user_error
from small_trainers import SGD, a_trainer, batches, naive_gradients, norm, weights

from fairseq.config.settings import CheckpointConfig
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.training import state as state_module
from fairseq.training.gradients import gradient_factor
from fairseq.training.nonfinite import NonFinite
from fairseq.training.update import update
from fairseq.training.validation import evaluate

# --- an update


@pytest.mark.parametrize("precision", ["", "--fp16 --fp16-init-scale 8"])
def test_an_update_moves_against_the_mean_gradient_of_all_its_tokens(precision: str) -> None:
    trainer = a_trainer(SGD, precision)
    samples = batches(trainer, 3)
    before = weights(trainer)
    gradients, loss, tokens = naive_gradients(trainer, samples)
    assert update(trainer, samples) is True
    tolerance = {"abs": 2e-3} if precision else {"abs": 1e-6}
    for name, value in weights(trainer).items():
        assert value == pytest.approx(before[name] - 0.5 * gradients[name], **tolerance), name
    for meter in trainer.meters.values():
        report = meter.report(trainer.figures)
        assert report["loss"] == pytest.approx(loss / tokens / 0.6931471805599453, rel=1e-2 if precision else 1e-5)
        assert (report["wpb"], meter.updates, report["clip"]) == (tokens, 1, 0.0)
        assert report["gnorm"] == pytest.approx(norm(gradients), rel=2e-2 if precision else 1e-4)
    assert trainer.num_updates == 1
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in trainer.parameters)


@pytest.mark.parametrize(("share", "clipped"), [(0.5, 100.0), (2.0, 0.0)])
def test_gradients_are_clipped_to_their_limit_and_it_is_told(share: float, clipped: float) -> None:
    plain = a_trainer(SGD)
    samples = batches(plain, 1)
    gradients, _, _ = naive_gradients(plain, samples)
    trainer = a_trainer(SGD, f"--clip-norm {share * norm(gradients)}")
    before = weights(trainer)
    update(trainer, samples)
    moved = {name: before[name] - value for name, value in weights(trainer).items()}
    assert norm(moved) == pytest.approx(0.5 * min(share, 1.0) * norm(gradients), rel=1e-3)
    report = trainer.meters["train"].report(trainer.figures)
    assert (report["clip"], report["gnorm"]) == (clipped, pytest.approx(norm(gradients), rel=1e-3))
    at_limit = a_trainer(SGD, f"--clip-norm {report['gnorm']!r}")
    update(at_limit, samples)
    assert at_limit.meters["train"].report(at_limit.figures)["clip"] == 0.0
    far = a_trainer(SGD, "--clip-norm 0.001")
    update(far, samples)
    assert far.meters["train"].report(far.figures)["clip"] == 100.0


def test_gradients_of_rows_count_in_the_norm_and_are_clipped_with_the_others() -> None:
    trainer = a_trainer("--optimizer adam --ngram-notes 99 --clip-norm 0.1")
    samples, name = batches(trainer, 2), "decoder.ngram_notes.table.weight"
    gradients, _, _ = naive_gradients(trainer, samples)
    assert norm({name: gradients[name]}) > 0.1 * norm(gradients)
    table = dict(trainer.model.named_parameters())[name]
    update(trainer, samples)
    report = trainer.meters["train"].report(trainer.figures)
    assert (report["clip"], report["gnorm"]) == (100.0, pytest.approx(norm(gradients), rel=1e-4))
    clipped = gradients[name] * 0.1 / norm(gradients)
    state = trainer.optimizer.optimizer.state[table]
    torch.testing.assert_close(state["row_avg_sq"], clipped.square().mean(1), rtol=1e-3, atol=0)


def test_gradients_of_several_processes_are_divided_by_the_tokens_of_all() -> None:
    """Reducers average over processes, so that the factor has their number."""
    assert gradient_factor(8, 1) == 1 / 8 and gradient_factor(0, 1) == 1.0
    assert float(gradient_factor(torch.tensor(32), 4)) == 4 / 32
    assert float(gradient_factor(torch.tensor(0), 4)) == 4.0
    assert gradient_factor(8, 1, scale=16) == 1 / 128
    assert float(gradient_factor(torch.tensor(32), 4, scale=16)) == 4 / (32 * 16)


def test_the_model_knows_the_updates_behind_it_and_trains() -> None:
    trainer = a_trainer()
    samples = batches(trainer, 2)
    seen = []
    hook = lambda *args: seen.append((trainer.graph.update_num, trainer.model.training))  # noqa: E731
    trainer.model.register_forward_pre_hook(hook)
    trainer.model.eval()
    for sample in samples:
        update(trainer, [sample])
    assert seen == [(0, True), (1, True)]


def test_the_rate_of_an_update_is_that_of_the_updates_before_it_and_epochs_are_told() -> None:
    trainer = a_trainer("--lr 0.4 --lr-scheduler inverse_sqrt --warmup-updates 4 --warmup-init-lr 0 --optimizer adam")
    sample = batches(trainer, 1)
    rates = [trainer.get_lr()]
    for _ in range(3):
        update(trainer, sample)
        rates.append(trainer.get_lr())
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
    fixed = a_trainer("--lr 0.4,0.2,0.1 --optimizer adam --lr-scheduler fixed")
    rates = []
    for epoch in (1, 2, 3):
        fixed.lr_scheduler.step_begin_epoch(epoch)
        rates.append(fixed.get_lr())
    assert rates == [0.4, 0.2, 0.1]


def test_a_schedule_sees_the_validation_figure_of_each_epoch() -> None:
    trainer = a_trainer("--lr 0.4 --optimizer adam --lr-scheduler reduce_lr_on_plateau --lr-shrink 0.5")
    rates = []
    told: list[Any] = []
    step = trainer.lr_scheduler.step
    trainer.lr_scheduler.step = lambda *args: told.append(args) or step(*args)  # type: ignore[method-assign]
    for epoch, figure in enumerate((3.0, 2.0, 2.5), start=1):
        trainer.lr_scheduler.step_begin_epoch(epoch)
        trainer.metric = figure
        trainer.end_epoch(epoch)
        rates.append(trainer.get_lr())
    assert rates == [0.4, 0.4, 0.2] and told == [(1, 3.0), (2, 2.0), (3, 2.5)]


def test_a_lack_of_memory_names_the_update_and_the_batch() -> None:
    trainer = a_trainer()
    (sample,) = batches(trainer, 1)
    update(trainer, [sample])

    def fail(*args: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

    trainer.model.register_forward_pre_hook(fail)
    with pytest.raises(UserError, match="out of GPU memory in update 2 on a batch of 4 rows × 16 tokens"):
        update(trainer, [sample])
    small = {**sample, "net_input": {"src_tokens": sample["net_input"]["src_tokens"][:2]}}
    with pytest.raises(UserError, match="in update 2 on 2 batches of up to 4 rows × 16 tokens"):
        update(trainer, [sample, small])


# --- an update that is skipped


def test_an_update_that_is_not_finite_changes_nothing_and_ends_the_run_when_it_is_one_too_many() -> None:
    trainer = a_trainer("--optimizer adam --skip-nonfinite 1")
    (sample,) = batches(trainer, 1)
    update(trainer, [sample])
    before, rate = weights(trainer), trainer.get_lr()
    trainer.model.decoder.layers[0].fc1.register_forward_hook(lambda *args: args[-1] * torch.inf)  # type: ignore[union-attr, index]
    assert update(trainer, [sample]) is False
    assert (trainer.num_updates, trainer.skipped.count, trainer.get_lr()) == (1, 1, rate)
    assert trainer.meters["train"].updates == 1
    with pytest.raises(NonFinite) as error:
        update(trainer, [sample])
    finding = error.value.finding
    assert (finding.update, finding.ids) == (2, sample["id"].tolist())
    assert finding.location == "the output of model.decoder.layers.0.fc1"
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_the_update_after_a_skipped_one_is_as_if_that_had_not_been() -> None:
    one, other = (a_trainer("--optimizer adam --skip-nonfinite 1") for _ in range(2))
    first, second = batches(one, 2)
    hook = one.parameters[0].register_hook(lambda gradient: gradient * torch.nan)
    assert update(one, [first]) is False
    hook.remove()
    for trainer in (one, other):
        assert update(trainer, [second]) is True
    expected = weights(other)
    assert all(torch.equal(value, expected[name]) for name, value in weights(one).items())


def test_the_search_for_a_value_that_is_not_finite_draws_no_random_numbers() -> None:
    states = []
    for gradient in (1.0, torch.nan):
        trainer = a_trainer("--optimizer adam --skip-nonfinite 1 --dropout 0.5")
        (sample,) = batches(trainer, 1)
        trainer.parameters[0].register_hook(lambda value, factor=gradient: value * factor)
        torch.manual_seed(1)
        update(trainer, [sample])
        states.append(torch.get_rng_state())
    assert trainer.skipped.count == 1 and torch.equal(*states)


def test_a_loss_alone_that_is_not_finite_skips_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = a_trainer("--optimizer adam --skip-nonfinite 1")
    step = trainer.task.step

    def infinite(*args: Any) -> Any:
        (loss, size, log), carried = step(*args)
        return (loss, size, {**log, "loss": log["loss"] * torch.inf}), carried

    monkeypatch.setattr(trainer.task, "step", infinite)
    before = weights(trainer)
    assert update(trainer, batches(trainer, 1)) is False and trainer.skipped.count == 1
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_an_overflow_lowers_the_scale_and_no_update_is_skipped_for_it() -> None:
    trainer = a_trainer("--optimizer adam --fp16 --fp16-init-scale 64 --min-loss-scale 16")
    (sample,) = batches(trainer, 1)
    hook = trainer.parameters[0].register_hook(lambda gradient: gradient * torch.inf)
    assert update(trainer, [sample]) is False and update(trainer, [sample]) is False
    assert trainer.scaler is not None and (trainer.scaler.scale, trainer.skipped.count) == (16.0, 0)
    with user_error("the loss scale fell below --min-loss-scale 16"):
        update(trainer, [sample])
    hook.remove()


@pytest.mark.parametrize(
    ("flags", "size", "windows"),
    [
        ("", 1, [16384]),
        ("", 4, [4096]),
        ("--update-freq 3", 1, [5461]),
        ("--update-freq 8,1", 2, [1024, 8192, 8192]),
        ("--fp16-scale-window 7 --update-freq 2,1", 4, [7, 7]),
        ("", 10**6, [1]),
    ],
)
def test_the_window_of_the_loss_scale_counts_the_batches_of_each_epoch(
    flags: str, size: int, windows: list[int]
) -> None:
    trainer = a_trainer("--fp16 --fp16-init-scale 4", flags)
    trainer.batches = trainer.task.iterator("valid", trainer.model, trainer.criterion, training=True)
    assert trainer.scaler is not None
    trainer.scaler.processes = size
    found = []
    for trainer.batches.epoch in range(1, len(windows) + 1):
        trainer.begin_epoch()
        found.append(trainer.scaler.window)
    assert (found, trainer.scaler.scale) == (windows, 4.0)


def test_the_loss_scaler_has_the_settings_of_its_flags() -> None:
    flags = "--fp16 --fp16-scale-tolerance 0.25 --min-loss-scale 0.5 --threshold-loss-scale 2"
    scaler = a_trainer(flags).scaler
    assert scaler is not None and (scaler.tolerance, scaler.lowest, scaler.threshold) == (0.25, 0.5, 2.0)
    assert a_trainer("--bf16").scaler is None


# --- averaged weights


def test_a_checkpoint_has_the_mean_of_the_weights_and_training_goes_on_from_the_weights() -> None:
    trainer = a_trainer("--optimizer adam --average-weights-from 2")
    reached = []
    for sample in batches(trainer, 3):
        update(trainer, [sample])
        reached.append(weights(trainer))
    saved = trainer.state_dict()["model"]
    for name, value in reached[-1].items():
        assert saved[name] == pytest.approx((reached[1][name] + value) / 2, abs=1e-6), name
        assert torch.equal(dict(trainer.model.named_parameters())[name], value)
    with trainer.averaged():
        inside = weights(trainer)
    assert all(torch.allclose(inside[name], saved[name]) for name in inside)
    plain = a_trainer("--optimizer adam")
    plain.load_state_dict({**trainer.state_dict()}, "x.pt")
    assert all(torch.equal(value, reached[-1][name]) for name, value in weights(plain).items()), "without the mean"
    alone = a_trainer("--optimizer adam")
    alone.load_state_dict(trainer.state_dict(), "x.pt", CheckpointConfig(reset_optimizer=True))
    assert all(torch.equal(value, saved[name]) for name, value in weights(alone).items()), "the mean is the model"


@pytest.mark.parametrize("decay", [1.0, 0.7, 0.0])
def test_the_mean_of_notes_is_that_after_all_updates_whichever_rows_they_change(decay: float) -> None:
    ema = "" if decay == 1 else f"--ema-decay {decay}"
    trainer = a_trainer(f"--optimizer adam --lr 0.1 --ngram-notes 99 --average-weights-from 2 {ema}")
    reached = []
    for sample in batches(trainer, 7):
        update(trainer, [sample])
        reached.append(weights(trainer)["decoder.ngram_notes.table.weight"].double())
        if len(reached) == 4:  # asking for the mean does not change it
            trainer.state_dict()
    assert 0 < (reached[-2] != reached[-1]).any(1).sum() < 90, "some rows stay as they are"
    shares = [decay**age for age in range(6)]
    wanted = sum(share * table for share, table in zip(shares, reversed(reached), strict=False)) / sum(shares)
    found = trainer.state_dict()["model"]["decoder.ngram_notes.table.weight"]
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-6)


def test_validation_is_of_the_mean_and_changes_nothing() -> None:
    trainer = a_trainer("--optimizer adam --average-weights-from 1")
    samples = batches(trainer, 3)
    for sample in samples:
        update(trainer, [sample])
    before = weights(trainer)
    found = evaluate(trainer, samples[:1]).report(trainer.figures)["loss"]
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    mean = a_trainer()
    mean.model.load_state_dict(trainer.state_dict()["model"])
    assert found == evaluate(mean, samples[:1]).report(mean.figures)["loss"]
    last = a_trainer()
    last.model.load_state_dict(before, strict=False)
    assert found != evaluate(last, samples[:1]).report(last.figures)["loss"]


def test_before_the_first_mean_the_weights_are_saved() -> None:
    trainer = a_trainer("--optimizer adam --average-weights-from 9")
    update(trainer, batches(trainer, 1))
    saved = trainer.state_dict()["model"]
    assert all(torch.equal(saved[name], value) for name, value in weights(trainer).items())


# --- settings


def test_matrices_alone_decay_where_that_is_asked_for() -> None:
    flags = "--optimizer adam --weight-decay 0.1"
    decays = [
        sorted({group["weight_decay"] for group in a_trainer(flags, flag).optimizer.param_groups})
        for flag in ("", "--no-decay-on-norms-and-biases")
    ]
    assert decays == [[0.1], [0.0, 0.1]]


def test_an_optimizer_of_whole_parameters_is_refused_for_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "data_parallel", lambda graph, *args: a_trainer_reducer(graph))
    with pytest.raises(UserError, match="fully_sharded: FairseqAdafactor needs whole parameters"):
        a_trainer("--optimizer adafactor --ddp-backend fully_sharded", world=World(0, 2))


@pytest.mark.parametrize("flag", ["--optimizer adafactor", "--optimizer nag"])
def test_half_parameters_need_an_optimizer_with_a_full_state(flag: str) -> None:
    try:
        a_trainer(flag, "--memory-efficient-fp16")
        refused = ""
    except UserError as error:
        refused = str(error)
    supports = a_trainer(flag).optimizer.supports_half_parameters
    assert bool(refused) is not supports and (supports or refused.startswith("--memory-efficient-fp16: the state of "))


def test_optimizers_that_treat_matrices_apart_are_given_those_of_the_layers() -> None:
    trainer = a_trainer("--optimizer muon --lr 0.01 --muon-lr 0.02")
    groups = [len(group["params"]) for group in trainer.optimizer.param_groups]
    assert len(groups) > len(a_trainer("--optimizer adam").optimizer.param_groups)
    assert sum(groups) == len(list(trainer.model.parameters()))


def a_trainer_reducer(graph: Any) -> Any:
    from fairseq.distributed import GradientReducer

    return GradientReducer(graph, World(), "no_c10d", 25, False)
