"""A run of ``fairseq-train``: it goes on exactly, saves what it should, and ends when it should."""

from __future__ import annotations

import math
import shutil

import pytest
import runs

from fairseq import checkpoint


def names(folder):
    return sorted(path.name for path in folder.glob("*.pt"))


# --- going on exactly


@pytest.mark.parametrize(
    "flags",
    [
        [runs.SHORTFORMER, runs.ADAM, runs.DROPOUT, "--update-freq 2,1 --max-tokens 32"],
        [runs.BASELINE, runs.ADAM, runs.DROPOUT, "--update-freq 2 --max-tokens 32 --fp16 --fp16-scale-window 8"],
        [runs.BASELINE, runs.ADAM, runs.DROPOUT, runs.LINES],
        [runs.SHORTFORMER, runs.NAG, runs.DROPOUT, "--decoder-layerdrop 0.3 --num-workers 0"],
        [runs.BASELINE, "--lr 2 --clip-norm 0.5 --validate-interval-updates 4 --patience 100"],
        [runs.SHORTFORMER, runs.DROPOUT, "--optimizer muon --lr-scheduler wsd --lr 0.01 --muon-lr 0.02 --bf16"],
    ],
    ids=[
        "shortformer-adam-freq2",
        "baseline-adam-freq2-fp16",
        "lines",
        "layerdrop",
        "better-unsaved",
        "muon-wsd-bf16",
    ],
)
def test_run_resumed_in_the_middle_of_an_epoch_is_bit_identical_to_the_uninterrupted_one(tmp_path, flags):
    flags = [*flags, "--max-update 48 --save-interval-updates 35 --log-interval 7"]
    whole = runs.train(tmp_path / "whole", *flags)
    middle = next(path for path in (tmp_path / "whole").iterdir() if path.name.endswith("_35.pt"))
    place = checkpoint.read(middle)["extra_state"]["train_iterator"]
    assert place["iterations_in_epoch"] > 0, "the test is about the middle of an epoch"
    (tmp_path / "resumed").mkdir()
    shutil.copy(middle, tmp_path / "resumed" / "checkpoint_last.pt")
    resumed = runs.train(tmp_path / "resumed", *flags)
    last = [runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "resumed")]
    assert runs.difference(*last) is None
    assert runs.updates(resumed) == [line for line in runs.updates(whole) if line["num_updates"] > 35]
    for kind in ("train", "test"):
        rest = runs.summaries(resumed, kind)
        assert rest and rest == runs.summaries(whole, kind)[-len(rest) :]


def test_checkpoint_holds_everything_that_a_run_goes_on_from(tmp_path):
    runs.train(tmp_path, runs.SHORTFORMER, runs.ADAM, "--max-update 5 --fp16")
    state = checkpoint.read(tmp_path / "checkpoint_last.pt")
    extra = state["extra_state"]
    assert state["optimizer_history"][-1]["num_updates"] == 5
    assert state["last_optimizer_state"]["state"]["decoder.layers.0.fc1.weight"]["exp_avg"].any()
    place = extra["train_iterator"]
    assert {**place, "read": place["read"]["count"]} == {
        "version": 2, "epoch": 1, "iterations_in_epoch": 5, "shuffle": False, "read": 5,
    }  # fmt: skip
    assert [layer.shape for layer in extra["carried"]["memory"]] == [(4, 16, 32)] * 2
    assert set(extra) >= {"random", "loss_scaler", "val_loss", "best", "previous_training_time"}
    assert isinstance(state["args"], dict) and state["args"]["arch"] == "shortformer_tiny"


def test_two_runs_with_one_seed_are_identical_and_another_seed_is_not(tmp_path):
    log = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        log[name] = runs.losses(
            runs.train(tmp_path / name, runs.BASELINE, runs.DROPOUT, "--max-update 5 --seed", [str(seed)])
        )
    assert log["a"] == log["b"]
    assert all(x != y for x, y in zip(log["a"], log["c"], strict=True))


@pytest.fixture(scope="module")
def fifty(tmp_path_factory):
    """The checkpoint of a run of 50 updates."""
    folder = tmp_path_factory.mktemp("fifty")
    runs.train(folder, runs.BASELINE, "--max-update 50")
    return folder / "checkpoint_last.pt"


@pytest.mark.parametrize(
    "reset, epoch, number, lr, best",
    [
        ("", 2, 51, 0.1, True),
        ("--reset-optimizer", 2, 1, 0.1, True),
        ("--reset-dataloader", 1, 51, 0.1, True),
        ("--reset-meters", 2, 51, 0.1, False),
        ("--reset-optimizer --reset-dataloader --reset-lr-scheduler --reset-meters", 1, 1, 0.1, False),
    ],
)
def test_reset_flags_leave_aside_what_they_name(tmp_path, fifty, reset, epoch, number, lr, best):
    source = ["--restore-file", str(fifty)]
    log = runs.train(tmp_path, runs.BASELINE, source, reset, "--max-update", [str(number)], "--lr", [str(lr)])
    first = runs.updates(log)[0]
    assert (first["epoch"], first["num_updates"]) == (epoch, number)
    assert first["lr"] == lr, "the schedule's rate is the command's"
    saved = checkpoint.read(fifty)["extra_state"]["best"]
    (validation,) = runs.summaries(log, "test")
    assert (validation["best_loss"] == min(saved, validation["loss"])) or not best
    if not best:
        assert validation["best_loss"] == validation["loss"]


def test_optimizer_overrides_change_the_restored_optimizer(tmp_path):
    runs.train(tmp_path, runs.BASELINE, runs.NAG, "--max-update 2")
    runs.train(tmp_path, runs.BASELINE, runs.NAG, "--max-update 3 --optimizer-overrides {'momentum':0.5}")
    state = checkpoint.read(tmp_path / "checkpoint_last.pt")
    assert state["last_optimizer_state"]["param_groups"][0]["momentum"] == 0.5


def test_a_run_at_its_limit_does_nothing_and_leaves_its_checkpoint_alone(tmp_path):
    runs.train(tmp_path, runs.BASELINE, "--max-update 3")
    before = (tmp_path / "checkpoint_last.pt").stat()
    assert runs.train(tmp_path, runs.BASELINE, "--max-update 3") == []
    after = (tmp_path / "checkpoint_last.pt").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


# --- what is saved, and when


def test_checkpoints_have_fairseqs_names(tmp_path):
    runs.train(tmp_path, runs.BASELINE, "--max-epoch 2 --save-interval-updates 20")
    assert names(tmp_path) == [
        *("checkpoint1.pt", "checkpoint2.pt", "checkpoint_1_20.pt", "checkpoint_1_40.pt", "checkpoint_2_60.pt"),
        *("checkpoint_2_80.pt", "checkpoint_best.pt", "checkpoint_last.pt"),
    ]


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            "--max-epoch 3 --max-tokens 640 --keep-last-epochs 2 --no-last-checkpoints",
            ["checkpoint2.pt", "checkpoint3.pt"],
        ),
        (
            "--max-update 9 --save-interval-updates 2 --keep-interval-updates 1",
            ["checkpoint_1_8.pt", "checkpoint_last.pt"],
        ),
        ("--max-update 9 --no-save", None),
    ],
)
def test_saving_flags(tmp_path, flags, expected):
    folder = tmp_path / "checkpoints"
    runs.train(folder, runs.BASELINE, "--disable-validation", flags)
    assert (names(folder) if folder.exists() else None) == expected


def test_checkpoint_without_the_optimizers_state_starts_counting_anew(tmp_path):
    runs.train(tmp_path, runs.BASELINE, "--max-update 3 --no-save-optimizer-state")
    assert "last_optimizer_state" not in checkpoint.read(tmp_path / "checkpoint_last.pt")
    log = runs.train(tmp_path, runs.BASELINE, "--max-update 1 --no-save-optimizer-state")
    assert [line["num_updates"] for line in runs.updates(log)] == [1]


def test_best_checkpoint_is_the_one_with_the_best_figure(tmp_path):
    flags = "--max-epoch 3 --optimizer sgd --lr 2,1,60 --lr-scheduler fixed"
    log = runs.train(tmp_path, runs.BASELINE, flags)
    figures = [line["loss"] for line in runs.summaries(log, "test")]
    assert figures[1] == min(figures) < figures[2], "the last epoch's rate is meant to do harm"
    best = checkpoint.read(tmp_path / "checkpoint_best.pt")
    assert best["optimizer_history"][-1]["num_updates"] == 84
    assert best["extra_state"]["val_loss"] == figures[1]
    assert [line["best_loss"] for line in runs.summaries(log, "test")] == [figures[0], figures[1], figures[1]]


def test_another_figure_does_not_compete_with_the_best_one_of_before(tmp_path, caplog):
    runs.train(tmp_path, runs.BASELINE, "--max-epoch 1")
    with caplog.at_level("INFO"):
        log = runs.train(tmp_path, runs.BASELINE, "--max-epoch 2 --best-checkpoint-metric ppl")
    changed = "`best_checkpoint_metric` ppl (was loss)"
    assert f"best validation: starts anew, because it measures something else: {changed}" in caplog.text
    [line] = runs.summaries(log, "test")
    assert line["best_ppl"] == line["ppl"] > line["loss"]
    assert checkpoint.read(tmp_path / "checkpoint_best.pt")["extra_state"]["val_loss"] == line["ppl"]


# --- validation


def test_every_validation_split_is_reported_and_the_first_decides(tmp_path):
    log = runs.train(tmp_path, runs.BASELINE, "--max-update 2 --valid-subset test,valid")
    (first,), (second,) = runs.summaries(log, "test"), runs.summaries(log, "valid")
    assert first["loss"] != second["loss"]
    assert checkpoint.read(tmp_path / "checkpoint_best.pt")["extra_state"]["val_loss"] == first["loss"]


def test_validation_in_the_middle_of_an_epoch_changes_nothing_in_training(tmp_path):
    plain = runs.train(tmp_path / "a", runs.SHORTFORMER, runs.DROPOUT, "--max-update 20 --no-save")
    checked = runs.train(
        tmp_path / "b", runs.SHORTFORMER, runs.DROPOUT, "--max-update 20 --no-save --validate-interval-updates 3"
    )
    assert runs.updates(plain) == runs.updates(checked)


# --- batches


def test_update_freq_adds_up_batches_to_the_same_update(tmp_path):
    flags = [runs.BASELINE, runs.NO_DROPOUT, "--max-update 50 --no-save"]
    whole = runs.train(tmp_path, *flags, "--max-tokens 64")
    parts = runs.train(tmp_path, *flags, "--max-tokens 32 --update-freq 2")
    assert runs.losses(parts) == pytest.approx(runs.losses(whole), abs=1e-5)
    assert [line["gnorm"] for line in runs.updates(parts)] == pytest.approx(
        [line["gnorm"] for line in runs.updates(whole)], abs=1e-5
    )


def test_update_freq_lists_one_number_for_each_epoch(tmp_path):
    log = runs.train(tmp_path, runs.BASELINE, "--update-freq 1,4,100 --max-epoch 4 --no-save --max-tokens 160")
    epochs = [line["epoch"] for line in runs.updates(log)]
    assert [epochs.count(epoch) for epoch in (1, 2, 3, 4)] == [17, 5, 1, 1]
    assert [line["epoch"] for line in runs.summaries(log, "test")] == [1, 2, 3, 4]


@pytest.mark.parametrize("arch", [runs.BASELINE, runs.SHORTFORMER], ids=["baseline", "shortformer"])
@pytest.mark.parametrize("length", [1, 7, 5000])
def test_blocks_of_any_length_train(tmp_path, arch, length):
    flags = (
        f"--tokens-per-sample {length} --max-tokens {max(length, 40)} --max-tokens-valid 5000 --max-update 2 --no-save"
    )
    if length < 7:
        flags += " --disable-validation"
    log = runs.train(tmp_path, arch, flags)
    assert all(math.isfinite(loss) for loss in runs.losses(log)) and len(runs.losses(log)) == 2
    assert runs.updates(log)[0]["wpb"] == min(max(length, 40) // length * length, 2670)


def test_every_token_of_an_epoch_is_read_once(tmp_path):
    for arch in (runs.BASELINE, runs.SHORTFORMER):
        log = runs.train(tmp_path, arch, "--max-epoch 1 --no-save --disable-validation")
        assert sum(line["wpb"] for line in runs.updates(log)) == 2670


def test_sentence_avg_divides_by_rows(tmp_path):
    by_tokens = runs.train(tmp_path, runs.BASELINE, runs.NO_DROPOUT, "--max-update 1 --no-save")
    by_rows = runs.train(tmp_path, runs.BASELINE, runs.NO_DROPOUT, "--max-update 1 --no-save --sentence-avg")
    ratio = runs.updates(by_rows)[0]["gnorm"] / runs.updates(by_tokens)[0]["gnorm"]
    assert ratio == pytest.approx(16, rel=1e-4)


def test_clipping_scales_gradients_down_and_never_up(tmp_path):
    flags = [runs.BASELINE, runs.NO_DROPOUT, "--optimizer sgd --lr 0.01 --max-update 6 --no-save --disable-validation"]
    free, loose, tight = (runs.train(tmp_path, *flags, f"--clip-norm {norm}") for norm in (0, 1e6, 1))
    assert runs.losses(loose) == runs.losses(free)
    assert runs.losses(tight)[-1] > runs.losses(free)[-1], "shorter steps"
    assert [line["gnorm"] for line in runs.updates(tight)][0] == runs.updates(free)[0]["gnorm"] > 1, "before clipping"
    assert [{line["clip"] for line in runs.updates(log)} for log in (free, loose, tight)] == [{0.0}, {0.0}, {100.0}]


# --- what is reported


def test_json_log_has_fairseqs_fields_at_full_precision(tmp_path):
    log = runs.train(tmp_path, runs.BASELINE, "--max-epoch 1 --fp16 --no-save")
    fields = ["epoch", "update", "loss", "nll_loss", "ppl", "wps", "ups", "wpb", "bsz", "num_updates"]
    fields += ["lr", "gnorm", "clip", "loss_scale", "train_wall", "wall"]
    assert list(log[0]) == fields
    assert len(repr(log[0]["loss"])) > 10
    assert log[0]["ppl"] == pytest.approx(2 ** log[0]["nll_loss"], rel=1e-9)
    assert log[0]["update"] == pytest.approx(1 / 42) and log[0]["epoch"] == 1
    train, valid = log[-2:]
    assert list(train) == ["epoch", *(f"train_{name}" for name in fields[1:])]
    assert {"epoch", "valid_loss", "valid_ppl", "valid_num_updates", "valid_best_loss"} <= {
        name.replace("test_", "valid_") for name in valid
    }


def test_epochs_summary_is_the_mean_of_its_updates(tmp_path):
    log = runs.train(tmp_path, runs.BASELINE, "--max-epoch 1 --no-save")
    each, (summary,) = runs.updates(log), runs.summaries(log, "train")
    tokens = sum(line["wpb"] for line in each)
    assert summary["loss"] == pytest.approx(sum(line["loss"] * line["wpb"] for line in each) / tokens, rel=1e-9)
    assert summary["gnorm"] == pytest.approx(sum(line["gnorm"] for line in each) / len(each), rel=1e-9)


@pytest.mark.parametrize("log_format", ["simple", "tqdm", "none"])
def test_other_log_formats_run(tmp_path, capsys, log_format):
    runs.train(tmp_path, runs.BASELINE, f"--max-update 3 --no-save --log-format {log_format}")
    assert runs.train(tmp_path, runs.BASELINE, f"--max-update 3 --no-save --log-format {log_format}") == []


def test_tensorboard_gets_every_kind_of_figure(tmp_path):
    pytest.importorskip("tensorboard")
    board = tmp_path / "board"
    runs.train(tmp_path / "c", runs.BASELINE, "--max-epoch 1 --no-save --tensorboard-logdir", [str(board)])
    assert {path.parent.name for path in board.rglob("events*")} == {"train", "train_inner", "test"}


@pytest.mark.filterwarnings("ignore")
def test_compiled_training_follows_eager_training(tmp_path):
    flags = [runs.SHORTFORMER, runs.NO_DROPOUT, "--max-update 4 --no-save --disable-validation --decoder-layers 1"]
    eager, compiled = runs.train(tmp_path, *flags), runs.train(tmp_path, *flags, "--compile")
    assert runs.losses(compiled) == pytest.approx(runs.losses(eager), abs=1e-4)


@pytest.mark.parametrize("first, then", [("--fp16", ""), ("--bf16", ""), ("", "--memory-efficient-fp16")])
def test_shortformer_goes_on_in_another_precision(tmp_path, first, then):
    flags = [runs.SHORTFORMER, runs.NAG]
    runs.train(tmp_path, *flags, first, "--max-update 4")
    log = runs.train(tmp_path, *flags, then, "--max-update 8")
    assert [line["num_updates"] for line in runs.updates(log)] == [5, 6, 7, 8]


def test_speeds_after_a_resume_count_what_was_done_since(tmp_path):
    flags = [runs.BASELINE, runs.NAG, "--log-interval 20"]
    runs.train(tmp_path, *flags, "--max-update 39")
    log = runs.train(tmp_path, *flags, "--max-update 41")
    line = next(line for line in log if line.get("num_updates") == 40 and "loss" in line)
    assert line["ups"] * line["train_wall"] == pytest.approx(1.0, rel=0.5), "one update, not the twenty of the interval"


def test_resetting_the_optimizer_forgets_the_best_figure(tmp_path):
    runs.train(tmp_path / "a", runs.BASELINE, runs.NAG, "--max-epoch 1")
    best = checkpoint.read(tmp_path / "a" / "checkpoint_last.pt")["extra_state"]["best"]
    assert best is not None
    start = ["--restore-file", tmp_path / "a" / "checkpoint_last.pt", "--reset-optimizer --reset-dataloader"]
    runs.train(tmp_path / "b", runs.BASELINE, runs.NAG, *start, "--max-update 2 --lr 1e-9")
    assert (tmp_path / "b" / "checkpoint_best.pt").exists()
