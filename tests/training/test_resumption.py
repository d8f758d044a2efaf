"""A run that resumes with other settings: one line says which are in force, and these are what is
recorded."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import yaml

from fairseq import checkpoint
from fairseq.config.settings import training_settings
from fairseq.errors import with_flags
from fairseq.training import resume

QUICK = f"{runs.BASELINE} --no-epoch-checkpoints --disable-validation"


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Any:
    """Returns the lines about settings since the last call, without the name of the checkpoint."""
    caplog.set_level(logging.WARNING, logger=resume.__name__)

    def lines() -> list[str]:
        found = [with_flags(record.message) for record in caplog.records if record.name == resume.__name__]
        caplog.clear()
        return [line.partition("checkpoint_last.pt: settings ")[2] for line in found]

    return lines


def recorded(folder: Path, *names: str) -> list[Any]:
    """The settings called *names*, the same in a run's checkpoint and settings.yaml."""
    stored = checkpoint.read(folder / "checkpoint_last.pt")["args"]
    written = yaml.safe_load((folder / "settings.yaml").read_text())
    assert [stored[name] for name in names] == [written[name] for name in names]
    return [stored[name] for name in names]


def groups(folder: Path) -> dict[str, Any]:
    return checkpoint.read(folder / "checkpoint_last.pt")["last_optimizer_state"]["param_groups"][0]


def test_the_same_settings_say_nothing(tmp_path, warned):
    for updates in (2, 4):  # a limit, files and what is shown are no settings of an update
        flags = [QUICK, runs.ADAM, f"--max-update {updates} --log-interval {updates} --num-workers {updates}"]
        runs.train(tmp_path, flags, "--metrics-file", tmp_path / "m.jsonl", f"--save-interval {updates}")
    assert warned() == []


def test_settings_of_the_command_line_are_in_force_and_named(tmp_path, warned):
    runs.train(tmp_path, QUICK, runs.ADAM, "--max-update 2 --dropout 0")
    log = runs.train(tmp_path, QUICK, runs.ADAM, "--max-update 3 --lr 0.01 --seed 4 --dropout 0.3")
    assert warned() == [
        "in force, other than in the checkpoint: --dropout 0.3 (was 0.0), --lr 0.01 (was 0.002), --seed 4 (was 3)"
    ]
    assert runs.updates(log)[-1]["lr"] == pytest.approx(0.01 * 3 / 9)
    assert recorded(tmp_path, "lr", "seed", "dropout") == [[0.01], 4, 0.3]


def test_a_complete_run_whose_learning_rate_rises_again_is_told_so(tmp_path, caplog):
    wsd = f"{runs.ADAM} --lr-scheduler wsd --warmup-updates 1 --decay-ratio 0.5"
    for updates, count in ((4, 0), (8, 1), (8, 1)):
        runs.train(tmp_path, QUICK, wsd, f"--max-update {updates}")
        told = [message for message in caplog.messages if "its learning rate rises again" in message]
        assert len(told) == count
    assert "this run was complete" in told[0]


def test_a_run_with_nothing_to_do_leaves_the_settings_of_the_last_update(tmp_path):
    runs.train(tmp_path, QUICK, runs.ADAM, "--max-update 2 --dropout 0.1")
    runs.train(tmp_path, QUICK, runs.ADAM, "--max-update 2 --dropout 0.3")
    assert recorded(tmp_path, "dropout", "max_update") == [0.1, 2]


ADAM_SETTINGS = "--adam-betas 0.5,0.6 --adam-eps 1e-4 --weight-decay 0.3"
KEPT = (
    "in force as in the checkpoint: --adam-betas 0.9,0.98 (not 0.5,0.6), --adam-eps 1e-08 (not 0.0001), "
    "--weight-decay 0.01 (not 0.3); --optimizer-overrides or --reset-optimizer for new ones"
)


def test_the_optimizers_settings_are_those_of_the_checkpoint_and_recorded_as_such(tmp_path, warned, caplog):
    runs.train(tmp_path, QUICK, runs.ADAM, "--max-update 2")
    caplog.set_level(logging.INFO)
    runs.train(tmp_path, QUICK, runs.ADAM, ADAM_SETTINGS, "--max-update 3")
    (line,) = [message for message in caplog.messages if message.startswith("settings: ")]
    assert "adam_betas=0.9,0.98, adam_eps=1e-08" in line and "weight_decay=0.01" in line
    assert warned() == [KEPT]
    assert recorded(tmp_path, "adam_betas", "adam_eps", "weight_decay") == [[0.9, 0.98], 1e-8, 0.01]
    group = groups(tmp_path)
    assert (list(group["betas"]), group["eps"], group["weight_decay"]) == ([0.9, 0.98], 1e-8, 0.01)
    runs.train(tmp_path, QUICK, runs.ADAM, ADAM_SETTINGS, "--max-update 4")
    assert warned() == [KEPT], "again: the same command asks for the same"
    runs.train(tmp_path / "b", "--config", tmp_path / "settings.yaml", "--max-update 1")
    assert groups(tmp_path / "b")["weight_decay"] == 0.01, "settings.yaml repeats what was in force"


BOTH = "--adam-eps 0.0001 (was 1e-08), --weight-decay 0.3 (was 0.01)"


@pytest.mark.parametrize(
    "way, now",
    [
        ("--reset-optimizer", BOTH),
        ("--optimizer-overrides {'weight_decay':0.3,'eps':1e-4}", BOTH),
        ("--optimizer-overrides {'weight_decay':0.7}", "--weight-decay 0.7 (was 0.01)"),
    ],
)  # fmt: skip
def test_the_ways_out_put_new_settings_in_force(way, now, tmp_path, warned):
    runs.train(tmp_path, QUICK, runs.ADAM, "--max-update 2")
    runs.train(tmp_path, QUICK, runs.ADAM, "--adam-eps 1e-4 --weight-decay 0.3 --max-update 3", way)
    (line,) = warned()
    assert line.startswith(f"in force, other than in the checkpoint: {now}")
    group = groups(tmp_path)
    assert recorded(tmp_path, "adam_eps", "weight_decay") == [group["eps"], group["weight_decay"]]
    assert f"--weight-decay {group['weight_decay']}" in now
    assert ("--adam-eps 1e-08 (not 0.0001)" in line) == ("0.7" in way), "what no flag changes stays"


@pytest.mark.parametrize(
    "optimizer, first, then",
    [
        ("nag", "--momentum 0.9", "--momentum 0.5"),
        ("sgd", "--momentum 0.9 --weight-decay 0.1", "--momentum 0.5 --weight-decay 0.2"),
        ("adagrad", "--weight-decay 0.1", "--weight-decay 0.2"),
        ("lamb", "--lamb-betas 0.8,0.9 --lamb-eps 1e-6", "--lamb-betas 0.7,0.8 --lamb-eps 1e-4"),
        ("adam", "--adam-torch-eps", ""),
        (
            "adafactor",
            "--adafactor-eps 1e-20,1e-2 --clip-threshold 2 --decay-rate -0.7 --beta1 0.8 --scale-parameter",
            "--adafactor-eps 1e-10,1e-3 --clip-threshold 3 --decay-rate -0.6 --beta1 0.7 --relative-step --warmup-init",
        ),
    ],
)
def test_every_optimizer_names_what_it_keeps(optimizer, first, then, tmp_path, warned):
    flags = f"{QUICK} --optimizer {optimizer} --lr 0.01 --max-update"
    runs.train(tmp_path, flags, "1", first)
    before = checkpoint.read(tmp_path / "checkpoint_last.pt")["args"]
    runs.train(tmp_path, flags, "2", then)
    (line,) = warned()
    assert line.startswith("in force as in the checkpoint: ") and "other than" not in line
    names = {word.lstrip("-").replace("-", "_") for word in f"{first} {then}".split() if word.startswith("--")}
    assert line.count(" (not ") == len(names)
    assert recorded(tmp_path, *names) == [before[name] for name in names]


def test_a_restored_loss_scale_and_the_rate_of_a_plateau_are_kept(tmp_path, warned):
    flags = f"{QUICK} --fp16 --lr-scheduler reduce_lr_on_plateau --warmup-updates 0 --max-update"
    runs.train(tmp_path, flags, "1 --lr 0.01 --fp16-init-scale 16")
    log = runs.train(tmp_path, flags, "2 --lr 0.02 --fp16-init-scale 32 --fp16-scale-window 7")
    assert warned() == [
        "in force, other than in the checkpoint: --fp16-scale-window 7 (was none); in force as in the checkpoint: "
        "--fp16-init-scale 16.0 (not 32.0), --lr 0.01 (not 0.02); --reset-lr-scheduler for another --lr, "
        "--optimizer-overrides or --reset-optimizer for new ones"
    ]
    assert (runs.updates(log)[-1]["lr"], runs.updates(log)[-1]["loss_scale"]) == (0.01, 16)
    assert recorded(tmp_path, "lr", "fp16_init_scale") == [[0.01], 16]
    log = runs.train(tmp_path, flags, "3 --lr 0.02 --fp16-init-scale 16 --reset-lr-scheduler")
    assert runs.updates(log)[-1]["lr"] == 0.02 and "--lr 0.02 (was 0.01)" in warned()[0]


def test_matrices_alone_that_decay_keep_the_decay_of_the_checkpoint(tmp_path, warned):
    flags = f"{QUICK} --optimizer adam --no-decay-on-norms-and-biases --max-update"
    runs.train(tmp_path, flags, "1 --weight-decay 0.1")
    runs.train(tmp_path, flags, "2 --weight-decay 0.2")
    assert "--weight-decay 0.1 (not 0.2)" in warned()[0] and recorded(tmp_path, "weight_decay") == [0.1]


def test_stages_differ_in_nothing_by_themselves(tmp_path, warned):
    flags = f"{runs.SHORTFORMER} --no-epoch-checkpoints --disable-validation --max-tokens 64 --stages"
    runs.train(tmp_path, flags, "8:2,32:4 --save-interval-updates 2 --optimizer adam --weight-decay 0.1")
    (tmp_path / "checkpoint_last.pt").unlink()
    (tmp_path / "checkpoint_1_2.pt").rename(tmp_path / "checkpoint_last.pt")
    runs.train(tmp_path, flags, "8:2,32:4 --optimizer adam --weight-decay 0.2")
    assert [line.partition(";")[0] for line in warned()] == [
        "in force as in the checkpoint: --weight-decay 0.1 (not 0.2)"
    ]
    assert recorded(tmp_path, "weight_decay") == [0.1]


def test_a_setting_that_the_checkpoints_optimizer_lacks_is_that_of_the_command_line(tmp_path, warned):
    runs.train(tmp_path, QUICK, runs.ADAM, "--max-update 1")
    state = checkpoint.read(tmp_path / "checkpoint_last.pt")
    for group in state["last_optimizer_state"]["param_groups"]:
        del group["torch_eps"]  # fairseq does not have it
    checkpoint.save(tmp_path / "checkpoint_last.pt", state)
    runs.train(tmp_path, QUICK, runs.ADAM, "--max-update 2 --adam-torch-eps")
    assert groups(tmp_path)["torch_eps"] is True
    assert warned() == ["in force, other than in the checkpoint: --adam-torch-eps on (was off)"]


# --- the line alone, without a run


def line(now: dict[str, Any], stored: dict[str, Any], restored: dict[str, Any], flags: str, warned: Any) -> str:
    """The warning of a run with the settings *now* in force, of which some are *restored* ones."""
    run: Any = SimpleNamespace(stored_settings=lambda: now)
    given = training_settings(runs.arguments(runs.BASELINE, "--optimizer nag", flags))
    resume.log_differences(run, given, restored, stored, "checkpoint_last.pt")
    return "".join(warned())


def test_settings_that_only_one_side_has_or_that_mean_the_same_say_nothing(warned: Any) -> None:
    now = {"lr": [0.1], "dropout": 0.1, "new": 1, "user_dir": "a", "save_dir": "b", "profile": "1:2", "optimizer": None}
    stored = {"lr": 0.1, "dropout": 0.1, "old": 2, "user_dir": "c", "save_dir": "d", "profile": None, "optimizer": ""}
    assert line(now, stored, {}, "", warned) == ""


def test_a_restored_setting_that_overrides_change_is_named_once(warned: Any) -> None:
    told = line({"momentum": 0.5}, {"momentum": 0.9}, {"momentum": 0.5}, "", warned)
    assert told == "in force, other than in the checkpoint: --momentum 0.5 (was 0.9)"


@pytest.mark.parametrize(
    ("value", "is_named"),
    [([0.1] * 100, True), ([0.1] * 101, False), ([[0.1]], False), ({"a": 1}, False), ((True, None, 1, "a"), True)],
)
def test_values_that_flags_have_are_named_and_cut_to_a_line(value: Any, is_named: bool, warned: Any) -> None:
    for now, stored in ((value, 7), (7, value)):
        told = line({"seed": now}, {"seed": stored}, {}, "", warned)
        assert bool(told) is is_named and len(told) < 160
    text = line({"seed": "x" * 200}, {"seed": "y"}, {}, "", warned)
    assert text.endswith(f"--seed {'x' * 100} (was y)")


def test_a_single_stage_has_nothing_that_follows_it(warned: Any) -> None:
    now, stored = {"tokens_per_sample": 16}, {"tokens_per_sample": 8}
    changed = "in force, other than in the checkpoint: --tokens-per-sample 16 (was 8)"
    assert line(now, stored, {}, "--stages 16:4 --max-tokens 64", warned) == changed
