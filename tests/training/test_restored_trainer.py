"""What a trainer restores of a checkpoint, and what it refuses."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import runs
import torch
from mistakes import logged, user_error
from ranks import in_threads
from small_runs import a_run
from small_trainers import TINY, XL, a_trainer, batches

from fairseq.config.settings import CheckpointConfig, training_settings
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.models.loading import stored_settings
from fairseq.training import resume
from fairseq.training.state import TrainingState, gather_random_states, restore_random_states
from fairseq.training.update import update

FULL = "--optimizer adam --average-weights-from 2 --fp16 --fp16-init-scale 8 --fp16-scale-window 3"
DROPOUT = f"{runs.BASELINE} --decoder-layers 1 --dropout 0.2"


def without_time(state: dict[str, Any]) -> dict[str, Any]:
    extra = {name: value for name, value in state["extra_state"].items() if name != "previous_training_time"}
    return {**state, "extra_state": extra}


def test_a_trainer_goes_on_from_a_state_as_if_it_had_not_stopped() -> None:
    one, other = (a_trainer(FULL, "--lr-scheduler inverse_sqrt --warmup-updates 9", base=DROPOUT) for _ in range(2))
    samples = batches(one, 6)
    for sample in samples[:4]:
        update(one, [sample])
    state = one.state_dict()
    torch.manual_seed(99)
    other.load_state_dict(state, "a run")
    assert other.num_updates == 4
    # The optimizer's state is copied: both go on from it.
    assert runs.difference(without_time(other.state_dict()), without_time(state)) is None
    random = torch.get_rng_state()
    for trainer in (one, other):
        torch.set_rng_state(random)
        for sample in samples[4:]:
            update(trainer, [sample])
    assert runs.difference(*(without_time(each.state_dict()) for each in (one, other))) is None


def test_tensors_of_a_state_that_nothing_else_uses_are_adopted() -> None:
    one = a_trainer("--optimizer adam")
    update(one, batches(one, 1))
    for adopt in (True, False):
        state = one.state_dict()
        moments = {entry["exp_avg"].data_ptr() for entry in state["last_optimizer_state"]["state"].values()}
        other = a_trainer("--optimizer adam")
        other.load_state_dict(state, "a run", adopt=adopt)
        taken = {entry["exp_avg"].data_ptr() for entry in other.optimizer.optimizer.state.values()}
        assert (taken == moments) is adopt and (adopt or not taken & moments)


def test_an_optimizer_of_torch_or_a_plug_in_restores_with_fairseqs_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (a_trainer("--optimizer adagrad") for _ in range(2))
    update(one, batches(one, 1))
    given: list[int] = []
    monkeypatch.setattr(other.optimizer, "load_state_dict", lambda state, overrides: given.append(len(state)))
    other.load_state_dict(one.state_dict(), "x.pt", adopt=True)
    assert given == [2]


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """The state of a trainer after three updates."""
    trainer = a_trainer(FULL, "--lr 0.01")
    for sample in batches(trainer, 3):
        update(trainer, [sample])
    trainer.skipped.count = 1
    return {"args": stored_settings(trainer.task.settings.flat, trainer.model), **trainer.state_dict()}


def restored(state: dict[str, Any], *flags: str, base: str = TINY) -> TrainingState:
    trainer = a_trainer(FULL, "--lr 0.01", *flags, base=base)
    trainer.load_state_dict(state, "x.pt", options(*flags))
    return trainer


def options(*flags: str) -> CheckpointConfig:
    return training_settings(runs.arguments(TINY, FULL, *flags)).checkpoint


def in_force(state: dict[str, Any], *flags: str) -> dict[str, Any]:
    """The settings that a run restores: those that differ from the given ones."""
    run = a_run(FULL, "--lr 0.01", *flags)
    resume.restore(run, state, "x.pt")
    assert all(run.stored_settings()[name] == value for name, value in run.found.items())
    return run.found


def test_a_reset_leaves_aside_what_it_names(state: dict[str, Any]) -> None:
    def facts(*flags: str) -> dict[str, Any]:
        trainer = a_trainer(FULL, "--lr 0.01", *flags)
        torch.manual_seed(5)
        before = torch.get_rng_state()
        trainer.load_state_dict(state, "x.pt", options(*flags))
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
    update(one, batches(one, 1))
    for epoch, figure in ((1, 1.0), (2, 2.0)):
        one.metric = figure
        one.end_epoch(epoch)
    saved = one.state_dict()
    kept, reset = a_trainer(flags, "0.3"), a_trainer(flags, "0.3 --reset-lr-scheduler")
    saved["args"] = {"lr": [0.4]}
    kept.load_state_dict(saved, "x.pt")
    assert kept.found["lr"] == [0.4], "the first rate, which the schedule lowered"
    reset.load_state_dict(saved, "x.pt", options("--reset-lr-scheduler"))
    assert "lr" not in reset.found
    assert (kept.get_lr(), reset.get_lr()) == (0.2, 0.3)
    assert kept.lr_scheduler.state_dict() == one.lr_scheduler.state_dict() != reset.lr_scheduler.state_dict()


def test_settings_that_the_state_puts_in_force_are_those_of_the_run(state: dict[str, Any]) -> None:
    found = in_force(state, "--adam-eps 0.5 --fp16-init-scale 32 --weight-decay 0.3")
    assert found == {"adam_eps": 1e-8, "fp16_init_scale": 8.0, "weight_decay": 0.0}
    assert in_force(state) == {}
    without = {**state, "extra_state": {**state["extra_state"]}}
    del without["extra_state"]["loss_scaler"]
    assert in_force(without, "--fp16-init-scale 32") == {}
    found = in_force(state, "--optimizer-overrides {'weight_decay':0.7} --weight-decay 0.3")
    assert found == {"weight_decay": 0.7}


def test_states_of_fairseq_and_of_earlier_versions_have_less(state: dict[str, Any]) -> None:
    bare = {"model": state["model"]}
    trainer = restored(bare)
    assert trainer.num_updates == 0
    loaded = trainer.model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state["model"].items())
    none = {**state, "args": None, "extra_state": None, "optimizer_history": state["optimizer_history"]}
    assert restored(none).num_updates == 3
    history = [{"num_updates": 1}, {"num_updates": 7}]
    assert restored({**state, "optimizer_history": history}).num_updates == 7, "the last one"
    assert restored({**state, "last_optimizer_state": None}).num_updates == 0
    assert restored({**state, "optimizer_history": [{}]}).num_updates == 0


def test_a_numbered_state_has_the_order_of_the_models_parameters_that_the_checkpoint_has(
    state: dict[str, Any],
) -> None:
    """As fairseq saves it: its parameters may come in another order than ours."""
    names = [name for name, _ in a_trainer().model.named_parameters()][::-1]
    numbers = {name: number for number, name in enumerate(names)}
    named = state["last_optimizer_state"]
    numbered = {
        "state": {numbers[name]: entry for name, entry in named["state"].items()},
        "param_groups": [{**named["param_groups"][0], "params": list(range(len(names)))}],
    }
    model = {name: state["model"][name] for name in [*names, *(state["model"].keys() - set(names))]}
    found = restored({**state, "model": model, "last_optimizer_state": numbered}).state_dict()["last_optimizer_state"]
    assert runs.difference(found["state"], named["state"]) is None


@pytest.mark.parametrize("flags", ["", "--average-weights-from 9"])
def test_a_mean_begins_anew_where_the_updates_do_or_before_its_first_one(state: dict[str, Any], flags: str) -> None:
    kept = state if flags else {**state, "last_optimizer_state": None}
    trainer = restored(kept, flags)
    assert trainer.average is not None and trainer.average.count == 0
    for weight, value in zip(trainer.average.parameters, state["extra_state"]["average"]["weights"], strict=True):
        assert torch.equal(weight, value)
    name, weight = next(iter(trainer.model.named_parameters()))
    assert torch.equal(trainer.state_dict()["model"][name], weight), "the weights of this run, not the former mean"


def test_a_setting_that_parameters_depend_on_is_that_of_the_state(state: dict[str, Any]) -> None:
    with user_error("^--activation-fn gelu: x.pt was trained with relu"):
        in_force(state, "--activation-fn gelu")
    with user_error(r"^--optimizer-overrides \["):
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
    assert (
        error.value.with_flags == f"x.pt: made with {kind} {name}, not {own}; give its --{kind}, or --reset-optimizer"
    )
    restored({**state, "optimizer_history": [history]}, "--reset-optimizer")


def test_a_criterion_has_a_state_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, reset = a_trainer(), a_trainer(), a_trainer("--reset-optimizer")
    loaded: list[Any] = []
    monkeypatch.setattr(type(one.criterion), "state_dict", lambda self, *args, **settings: {"seen": 3})
    load = lambda self, values, *args: loaded.append((self, values))  # noqa: E731
    monkeypatch.setattr(type(one.criterion), "load_state_dict", load)
    saved = one.state_dict()
    assert saved["extra_state"]["criterion"] == {"seen": 3}
    other.load_state_dict(saved, "x.pt")
    reset.load_state_dict(saved, "x.pt", options("--reset-optimizer"))
    assert loaded == [(other.criterion, {"seen": 3})]


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
        restore_random_states(none, trainer.world, "x.pt")
    assert torch.equal(torch.get_rng_state(), before) and logged(caplog) == []
    restore_random_states(states, trainer.world, "x.pt")
    assert torch.equal(torch.get_rng_state(), before)
    dropped = "random states of x.pt are dropped: processes then 2, now 1; dropout starts from --seed"
    assert logged(caplog) == [dropped]
    trainer.world = World(1, 2)
    restore_random_states(states, trainer.world, "x.pt")
    assert torch.equal(torch.get_rng_state(), states[1]["cpu"]) and logged(caplog) == [dropped]
    caplog.clear()
    saved = a_trainer().state_dict()
    saved["extra_state"]["random"] = states
    a_trainer().load_state_dict(saved, "x.pt")
    assert dropped in logged(caplog)


def test_the_random_states_of_all_ranks_are_saved() -> None:
    first, second = in_threads(gather_random_states, 2)
    assert len(first) == len(second) == 2 and set(first[0]) == {"cpu"}


def test_the_random_state_of_a_gpu_is_that_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the functions of PyTorch replaced, on a host without a GPU."""
    device = torch.device("cuda", 1)
    restored: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda asked: torch.tensor([5]) if asked == device else None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *args: restored.append(args))
    trainer = a_trainer()
    host = gather_random_states(trainer.world)
    trainer.world = World(device=device)
    (states,) = saved = gather_random_states(trainer.world)
    assert set(states) == {"cpu", "cuda"} and states["cuda"].tolist() == [5]
    restore_random_states(host, trainer.world, "x.pt")
    assert restored == [], "of a run on the host"
    restore_random_states(saved, trainer.world, "x.pt")
    ((state, where),) = restored
    assert state.tolist() == [5] and where == device
    trainer.world = World()
    restore_random_states(saved, trainer.world, "x.pt")
    assert len(restored) == 1, "on the host"


def test_memory_goes_on_with_the_rows_that_do() -> None:
    one = a_trainer(base=XL)
    for sample in batches(one, 2):
        update(one, [sample])
    saved = one.state_dict()
    memory = saved["extra_state"]["carried"]["memory"]
    other = a_trainer(base=XL)
    other.load_state_dict(saved, "x.pt", rows=memory[0].size(0))
    taken = other.task.carried["memory"]
    assert all(torch.equal(layer, value) for layer, value in zip(taken, memory, strict=True))
    other = a_trainer(base=XL)
    other.load_state_dict(saved, "x.pt")
    assert not other.task.carried.get("memory"), "no rows go on"
