"""A trainer: one update is the naive one, its state goes on exactly, and what is reset or differs is left aside."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from torch import Tensor

from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.logging.figures import NamedSums
from fairseq.tasks import setup_task
from fairseq.training import trainer as trainer_module
from fairseq.training.nonfinite import NonFinite
from fairseq.training.trainer import Trainer

TINY = f"{runs.BASELINE} --decoder-layers 1 {runs.NO_DROPOUT}"
SGD = "--optimizer sgd --lr 0.5 --clip-norm 0"
XL = """--arch transformer_xl_tiny --cpu --train-subset valid --valid-subset test --max-tokens 64 --tokens-per-sample 16
    --mem-len 16 --optimizer adam --lr 0.01"""


def a_trainer(*flags: Any, base: str = TINY, world: World | None = None) -> Trainer:
    settings = training_settings(runs.arguments(base, *flags))
    torch.manual_seed(1)
    task = setup_task(settings)
    return Trainer(settings, task, task.build_model(settings), task.build_criterion(settings), world)


def batches(trainer: Trainer, count: int = 4) -> list[Any]:
    epoch = trainer.task.iterator("valid", trainer.model, trainer.criterion, training=True)
    return [sample for _, sample in zip(range(count), iter(epoch), strict=False)]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def naive_gradients(trainer: Trainer, samples: list[Any]) -> tuple[dict[str, Tensor], float, int]:
    """Gradients of the mean loss over target tokens, the summed loss and the number of tokens."""
    trainer.model.train()
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        loss, size, _ = trainer.criterion(trainer.model, sample)
        total, tokens = total + loss, tokens + size
    named = dict(trainer.model.named_parameters())
    found = torch.autograd.grad(total / tokens, list(named.values()))
    return dict(zip(named, found, strict=True)), float(total.detach()), tokens


def norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in gradients.values()]).norm())


# --- an update


@pytest.mark.parametrize("precision", ["", "--fp16 --fp16-init-scale 8"])
def test_an_update_moves_against_the_mean_gradient_of_all_its_tokens(precision: str) -> None:
    trainer = a_trainer(SGD, precision)
    samples = batches(trainer, 3)
    before = weights(trainer)
    gradients, loss, tokens = naive_gradients(trainer, samples)
    assert trainer.train_step(samples) is True
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
    trainer.train_step(samples)
    moved = {name: before[name] - value for name, value in weights(trainer).items()}
    assert norm(moved) == pytest.approx(0.5 * min(share, 1.0) * norm(gradients), rel=1e-3)
    report = trainer.meters["train"].report(trainer.figures)
    assert (report["clip"], report["gnorm"]) == (clipped, pytest.approx(norm(gradients), rel=1e-3))


def test_gradients_of_several_processes_are_divided_by_the_tokens_of_all() -> None:
    """Reducers average over processes, so that the factor has their number."""
    trainer = a_trainer()
    assert trainer._gradient_factor(8) == 1 / 8 and trainer._gradient_factor(0) == 1.0
    trainer.world = World(0, 4)
    assert float(trainer._gradient_factor(torch.tensor(32))) == 4 / 32
    assert float(trainer._gradient_factor(torch.tensor(0))) == 4.0
    half = a_trainer("--fp16 --fp16-init-scale 16")
    assert half._gradient_factor(8) == 1 / 128
    half.world = World(0, 4)
    assert float(half._gradient_factor(torch.tensor(32))) == 4 / (32 * 16)


def test_the_model_knows_the_updates_behind_it_and_trains() -> None:
    trainer = a_trainer()
    samples = batches(trainer, 2)
    seen = []
    hook = lambda *args: seen.append((trainer.graph.update_num, trainer.model.training))  # noqa: E731
    trainer.model.register_forward_pre_hook(hook)
    trainer.model.eval()
    for sample in samples:
        trainer.train_step([sample])
    assert seen == [(0, True), (1, True)]


def test_the_rate_of_an_update_is_that_of_the_updates_before_it_and_epochs_are_told() -> None:
    trainer = a_trainer("--lr 0.4 --lr-scheduler inverse_sqrt --warmup-updates 4 --warmup-init-lr 0 --optimizer adam")
    sample = batches(trainer, 1)
    rates = [trainer.get_lr()]
    for _ in range(3):
        trainer.train_step(sample)
        rates.append(trainer.get_lr())
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
    fixed = a_trainer("--lr 0.4,0.2,0.1 --optimizer adam --lr-scheduler fixed")
    rates = []
    for epoch in (1, 2, 3):
        fixed.begin_epoch(epoch)
        rates.append(fixed.get_lr())
    assert rates == [0.4, 0.2, 0.1]


def test_a_schedule_sees_the_validation_figure_of_each_epoch() -> None:
    trainer = a_trainer("--lr 0.4 --optimizer adam --lr-scheduler reduce_lr_on_plateau --lr-shrink 0.5")
    rates = []
    for epoch, figure in enumerate((3.0, 2.0, 2.5), start=1):
        trainer.begin_epoch(epoch)
        trainer.end_epoch(epoch, figure)
        rates.append(trainer.get_lr())
    assert rates == [0.4, 0.4, 0.2]


def test_the_vote_travels_with_the_sums() -> None:
    trainer = a_trainer()
    sums: list[NamedSums] = []

    class Vote:
        def reduced(self, values: NamedSums) -> NamedSums:
            sums.append(values)
            return NamedSums(values.names, values.values * 2, values.rows)

    vote: Any = Vote()
    (sample,) = batches(trainer, 1)
    trainer.train_step([sample], vote)
    (own,) = sums
    assert float(own["ntokens"]) == sample["ntokens"] and trainer.meters["train"].tokens == 2 * sample["ntokens"]


# --- an update that is skipped


def test_an_update_that_is_not_finite_changes_nothing_and_ends_the_run_when_it_is_one_too_many() -> None:
    trainer = a_trainer("--optimizer adam --skip-nonfinite 1")
    (sample,) = batches(trainer, 1)
    trainer.train_step([sample])
    before, rate = weights(trainer), trainer.get_lr()
    trainer.model.decoder.layers[0].fc1.register_forward_hook(lambda *args: args[-1] * torch.inf)  # type: ignore[union-attr, index]
    assert trainer.train_step([sample]) is False
    assert (trainer.num_updates, trainer.skipped.count, trainer.get_lr()) == (1, 1, rate)
    assert trainer.meters["train"].updates == 1
    with pytest.raises(NonFinite) as error:
        trainer.train_step([sample])
    finding = error.value.finding
    assert (finding.update, finding.ids) == (2, sample["id"].tolist())
    assert finding.place == "the output of model.decoder.layers.0.fc1"
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_the_update_after_a_skipped_one_is_as_if_that_had_not_been() -> None:
    one, other = (a_trainer("--optimizer adam --skip-nonfinite 1") for _ in range(2))
    first, second = batches(one, 2)
    hook = one.parameters[0].register_hook(lambda gradient: gradient * torch.nan)
    assert one.train_step([first]) is False
    hook.remove()
    for trainer in (one, other):
        assert trainer.train_step([second]) is True
    expected = weights(other)
    assert all(torch.equal(value, expected[name]) for name, value in weights(one).items())


def test_an_overflow_lowers_the_scale_and_no_update_is_skipped_for_it() -> None:
    trainer = a_trainer("--optimizer adam --fp16 --fp16-init-scale 64 --min-loss-scale 16")
    (sample,) = batches(trainer, 1)
    hook = trainer.parameters[0].register_hook(lambda gradient: gradient * torch.inf)
    assert trainer.train_step([sample]) is False and trainer.train_step([sample]) is False
    assert trainer.scaler is not None and (trainer.scaler.scale, trainer.skipped.count) == (16.0, 0)
    with pytest.raises(NonFinite, match="the loss scale fell below --min-loss-scale 16"):
        trainer.train_step([sample])
    hook.remove()


@pytest.mark.parametrize(
    ("flags", "size", "window"),
    [("", 1, 16384), ("", 4, 4096), ("--update-freq 8,1", 2, 1024), ("--fp16-scale-window 7", 4, 7), ("", 10**6, 1)],
)
def test_the_window_of_the_loss_scale_counts_batches(flags: str, size: int, window: int) -> None:
    settings = training_settings(runs.arguments(TINY, "--fp16 --fp16-init-scale 4", flags))
    scaler = trainer_module._loss_scaler(settings, World(0, size))
    assert (scaler.window, scaler.scale) == (window, 4.0)


def test_the_loss_scaler_has_the_settings_of_its_flags() -> None:
    flags = "--fp16 --fp16-scale-tolerance 0.25 --min-loss-scale 0.5 --threshold-loss-scale 2"
    scaler = a_trainer(flags).scaler
    assert scaler is not None and (scaler.tolerance, scaler.lowest, scaler.threshold) == (0.25, 0.5, 2.0)
    assert a_trainer("--bf16").scaler is None


# --- going on


FULL = "--optimizer adam --average-weights-from 2 --fp16 --fp16-init-scale 8 --fp16-scale-window 3"
DROPOUT = f"{runs.BASELINE} --decoder-layers 1 --dropout 0.2"


def test_a_trainer_goes_on_from_a_state_as_if_it_had_not_stopped() -> None:
    one, other = (a_trainer(FULL, "--lr-scheduler inverse_sqrt --warmup-updates 9", base=DROPOUT) for _ in range(2))
    samples = batches(one, 6)
    for sample in samples[:4]:
        one.train_step([sample])
    state = one.state_dict()
    torch.manual_seed(99)
    other.load_state_dict(state, "a run")
    assert other.num_updates == 4 and other.restored == {}
    # The optimizer's state is copied: both go on from it.
    assert runs.difference(other.state_dict(), state) is None
    random = torch.get_rng_state()
    for trainer in (one, other):
        torch.set_rng_state(random)
        for sample in samples[4:]:
            trainer.train_step([sample])
    assert runs.difference(one.state_dict(), other.state_dict()) is None


def test_tensors_of_a_state_that_nothing_else_uses_are_adopted() -> None:
    one = a_trainer("--optimizer adam")
    one.train_step(batches(one, 1))
    for adopt in (True, False):
        state = one.state_dict()
        moments = {entry["exp_avg"].data_ptr() for entry in state["last_optimizer_state"]["state"].values()}
        other = a_trainer("--optimizer adam")
        other.load_state_dict(state, "a run", adopt=adopt)
        taken = {entry["exp_avg"].data_ptr() for entry in other.optimizer.optimizer.state.values()}
        assert (taken == moments) is adopt and (adopt or not taken & moments)


def test_a_state_has_what_the_run_has() -> None:
    plain = a_trainer("--optimizer adam").state_dict()
    assert set(plain) == {"args", "model", "optimizer_history", "last_optimizer_state", "extra_state", "dictionary"}
    assert set(plain["extra_state"]) == {"random", "carried", "sums"}
    (history,) = plain["optimizer_history"]
    assert history == {
        "criterion_name": "AdaptiveLoss",
        "optimizer_name": "FairseqAdam",
        "num_updates": 0,
        "lr_scheduler_state": history["lr_scheduler_state"],
    }
    assert set(plain["extra_state"]["sums"]) == {"train", "train_inner"}
    full = a_trainer(FULL, "--skip-nonfinite 3")
    full.skipped.count = 2
    extra = full.state_dict()["extra_state"]
    assert set(extra) == {"random", "carried", "sums", "average", "loss_scaler", "skipped_nonfinite"}
    assert extra["skipped_nonfinite"] == 2


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """The state of a trainer after three updates."""
    trainer = a_trainer(FULL, "--lr 0.01")
    for sample in batches(trainer, 3):
        trainer.train_step([sample])
    trainer.skipped.count = 1
    return trainer.state_dict()


def restored(state: dict[str, Any], *flags: str, base: str = TINY) -> Trainer:
    trainer = a_trainer(FULL, "--lr 0.01", *flags, base=base)
    trainer.load_state_dict(state, "x.pt")
    return trainer


def test_a_reset_leaves_aside_what_it_names(state: dict[str, Any]) -> None:
    def facts(*flags: str) -> dict[str, Any]:
        trainer = a_trainer(FULL, "--lr 0.01", *flags)
        torch.manual_seed(5)
        before = torch.get_rng_state()
        trainer.load_state_dict(state, "x.pt")
        assert trainer.average is not None and trainer.scaler is not None
        return {
            "updates": trainer.num_updates,
            "moments": len(trainer.optimizer.optimizer.state) > 0,
            "average": trainer.average.count,
            "scale": trainer.scaler.updates,
            "skipped": trainer.skipped.count,
            "sums": {meter.updates for meter in trainer.meters.values()},
            "random": not torch.equal(torch.get_rng_state(), before),
        }

    whole = {"updates": 3, "moments": True, "average": 2, "scale": 3, "skipped": 1, "sums": {3}, "random": True}
    fresh = {"updates": 0, "moments": False, "average": 0, "scale": 0, "skipped": 0}
    assert facts() == whole
    assert facts("--reset-optimizer") == {**whole, **fresh}
    assert facts("--reset-meters") == {**whole, "sums": {0}}
    assert facts("--reset-dataloader") == {**whole, "random": False}
    assert facts("--reset-lr-scheduler") == whole


def test_a_schedule_is_restored_unless_it_is_reset() -> None:
    flags = "--optimizer adam --lr-scheduler reduce_lr_on_plateau --lr-shrink 0.5 --lr"
    one = a_trainer(flags, "0.4")
    one.train_step(batches(one, 1))
    for epoch, figure in ((1, 1.0), (2, 2.0)):
        one.end_epoch(epoch, figure)
    saved = one.state_dict()
    kept, reset = a_trainer(flags, "0.3"), a_trainer(flags, "0.3 --reset-lr-scheduler")
    for trainer in (kept, reset):
        trainer.load_state_dict(saved, "x.pt")
    assert (kept.get_lr(), reset.get_lr()) == (0.2, 0.3)
    assert kept.restored == {"lr": [0.4]} and reset.restored == {}, "the first rate, which the schedule lowered"


def test_settings_that_the_state_puts_in_force_are_those_of_the_trainer(state: dict[str, Any]) -> None:
    trainer = restored(state, "--adam-eps 0.5 --fp16-init-scale 32 --weight-decay 0.3")
    assert trainer.restored == {"adam_eps": 1e-8, "fp16_init_scale": 8.0, "weight_decay": 0.0}
    assert trainer.settings.common.fp16_init_scale == 8.0 and trainer.stored_settings()["weight_decay"] == 0.0
    without = {**state, "extra_state": {**state["extra_state"]}}
    del without["extra_state"]["loss_scaler"]
    assert restored(without, "--fp16-init-scale 32").restored == {}
    overridden = restored(state, "--optimizer-overrides {'weight_decay':0.7} --weight-decay 0.3")
    assert overridden.restored == {"weight_decay": 0.7}


def test_states_of_fairseq_and_of_earlier_versions_have_less(state: dict[str, Any]) -> None:
    bare = {"model": state["model"]}
    trainer = restored(bare)
    assert trainer.num_updates == 0 and trainer.restored == {}
    loaded = trainer.model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state["model"].items())
    none = {**state, "args": None, "extra_state": None, "optimizer_history": state["optimizer_history"]}
    assert restored(none).num_updates == 3
    history = [{"num_updates": 1}, {"num_updates": 7}]
    assert restored({**state, "optimizer_history": history}).num_updates == 7, "the last one"
    assert restored({**state, "last_optimizer_state": None}).num_updates == 0


def test_a_setting_that_parameters_depend_on_is_that_of_the_state(state: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="^--activation-fn gelu: x.pt was trained with relu"):
        restored(state, "--activation-fn gelu")
    with pytest.raises(UserError, match=r"^--optimizer-overrides \["):
        restored(state, "--optimizer-overrides [")
    with pytest.raises(UserError, match="^x.pt: does not fit this model"):
        restored(state, "--decoder-ffn-embed-dim 32")


@pytest.mark.parametrize(
    ("kind", "name"), [("criterion", "LabelSmoothedCrossEntropyCriterion"), ("optimizer", "FairseqNAG")]
)
def test_another_criterion_or_optimizer_is_refused_by_its_flag(state: dict[str, Any], kind: str, name: str) -> None:
    history = {**state["optimizer_history"][0], f"{kind}_name": name}
    own = state["optimizer_history"][0][f"{kind}_name"]
    with pytest.raises(UserError) as error:
        restored({**state, "optimizer_history": [history]})
    assert str(error.value) == f"x.pt: made with {kind} {name}, not {own}; give its --{kind}, or --reset-optimizer"
    restored({**state, "optimizer_history": [history]}, "--reset-optimizer")


def test_a_criterion_has_a_state_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, reset = a_trainer(), a_trainer(), a_trainer("--reset-optimizer")
    loaded: list[Any] = []
    monkeypatch.setattr(type(one.criterion), "state_dict", lambda self, *args, **settings: {"seen": 3})
    monkeypatch.setattr(type(one.criterion), "load_state_dict", lambda self, values, *args: loaded.append(values))
    saved = one.state_dict()
    assert saved["extra_state"]["criterion"] == {"seen": 3}
    for trainer in (other, reset):
        trainer.load_state_dict(saved, "x.pt")
    assert loaded == [{"seen": 3}]


def test_random_states_of_each_rank_go_on_and_those_of_other_ranks_are_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = a_trainer()
    caplog.set_level(logging.INFO)
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append({"cpu": torch.get_rng_state()})
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for none in (None, []):
        trainer._restore_random_states(none, "x.pt")
    assert torch.equal(torch.get_rng_state(), before) and caplog.messages == []
    trainer._restore_random_states(states, "x.pt")
    assert torch.equal(torch.get_rng_state(), before)
    dropped = "random states of x.pt are dropped: processes then 2, now 1; dropout starts from --seed"
    assert caplog.messages == [dropped]
    trainer.world = World(1, 2)
    trainer._restore_random_states(states, "x.pt")
    assert torch.equal(torch.get_rng_state(), states[1]["cpu"]) and caplog.messages == [dropped]


def test_memory_goes_on_with_the_rows_that_do_and_that_of_version_0_1_too() -> None:
    one = a_trainer(base=XL)
    for sample in batches(one, 2):
        one.train_step([sample])
    saved = one.state_dict()
    memory = saved["extra_state"]["carried"]["memory"]
    older = {**saved, "extra_state": {**saved["extra_state"], "memory": memory}}
    del older["extra_state"]["carried"]
    for state in (saved, older):
        other = a_trainer(base=XL)
        other.load_state_dict(state, "x.pt", rows=memory[0].size(0))
        taken = other.task.carried["memory"]
        assert all(torch.equal(layer, value) for layer, value in zip(taken, memory, strict=True))
        other = a_trainer(base=XL)
        other.load_state_dict(state, "x.pt")
        assert not other.task.carried.get("memory"), "no rows go on"


# --- averaged weights


def test_a_checkpoint_has_the_mean_of_the_weights_and_training_goes_on_from_the_weights() -> None:
    trainer = a_trainer("--optimizer adam --average-weights-from 2")
    reached = []
    for sample in batches(trainer, 3):
        trainer.train_step([sample])
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
    alone = a_trainer("--optimizer adam --reset-optimizer")
    alone.load_state_dict(trainer.state_dict(), "x.pt")
    assert all(torch.equal(value, saved[name]) for name, value in weights(alone).items()), "the mean is the model"


def test_validation_is_of_the_mean_and_changes_nothing() -> None:
    trainer = a_trainer("--optimizer adam --average-weights-from 1")
    samples = batches(trainer, 3)
    for sample in samples:
        trainer.train_step([sample])
    before = weights(trainer)
    found = trainer.validate(samples[:1]).report(trainer.figures)["loss"]
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    mean = a_trainer()
    mean.model.load_state_dict(trainer.state_dict()["model"])
    assert found == mean.validate(samples[:1]).report(mean.figures)["loss"]
    last = a_trainer()
    last.model.load_state_dict(before, strict=False)
    assert found != last.validate(samples[:1]).report(last.figures)["loss"]


def test_before_the_first_mean_the_weights_are_saved() -> None:
    trainer = a_trainer("--optimizer adam --average-weights-from 9")
    trainer.train_step(batches(trainer, 1))
    saved = trainer.state_dict()["model"]
    assert all(torch.equal(saved[name], value) for name, value in weights(trainer).items())


# --- settings


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


@pytest.mark.parametrize(("backend", "works"), [("c10d", False), ("no_c10d", True), ("legacy_ddp", True)])
def test_batches_are_split_where_gradients_are_reduced_last(
    backend: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    splitters: list[Any] = []
    monkeypatch.setattr(trainer_module, "BatchSplitter", lambda *args: splitters.append(args))
    monkeypatch.setattr(trainer_module, "data_parallel", lambda graph, *args: a_trainer_reducer(graph))
    for size in (1, 2):
        trainer = a_trainer(f"--oom-retry --ddp-backend {backend}", world=World(0, size))
        assert splitters.pop() == (True, trainer.model, works or size == 1)


def a_trainer_reducer(graph: Any) -> Any:
    from fairseq.distributed import GradientReducer

    return GradientReducer(graph, World(), "no_c10d", 25, False)


def test_the_split_of_a_batch_gives_the_same_update(tmp_path: Path) -> None:
    whole, split = a_trainer(SGD), a_trainer(SGD, "--oom-retry")
    epoch = split.task.iterator("valid", split.model, split.criterion, training=True)
    sample = next(iter(epoch))

    def check(module: Any, args: Any, keywords: Any) -> None:
        if keywords["src_tokens"].size(0) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

    split.model.register_forward_pre_hook(check, with_kwargs=True)
    whole.train_step([sample])
    split.train_step([sample], None, epoch.rebatch)
    expected = weights(whole)
    assert all(value == pytest.approx(expected[name], abs=1e-6) for name, value in weights(split).items())
