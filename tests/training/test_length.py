"""How long a run is that does not say so, and settings that are shares of it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import runs

from fairseq import checkpoint
from fairseq.config.settings import training_settings
from fairseq.data.indexed_dataset import token_count
from fairseq.errors import UserError
from fairseq.optim.lr_scheduler.settings import WSDConfig
from fairseq.tasks.fairseq_task import setup_task
from fairseq.training.length import length_of, needs_length

TOKENS = token_count(str(runs.DATA / "valid"))
UPDATES = math.ceil(TOKENS / 256)  # an epoch
WSD = f"{runs.SMALL} --decoder-layers 1 --max-tokens 256 --arch transformer_lm_tiny --optimizer adam --lr 0.001"
WSD += " --lr-scheduler wsd"


def length(flags: str, processes: int = 1) -> int:
    settings = training_settings(runs.arguments(*flags.split()))
    if not needs_length(settings):
        return settings.optimization.max_update
    task = setup_task(settings)
    model, criterion = task.build_model(settings), task.build_criterion(settings)
    batches = task.iterator("valid", model, criterion, training=True, world_size=processes)
    return length_of(settings.optimization, batches).updates


def test_a_schedule_that_needs_an_end_gets_one_epoch_or_the_epochs_that_are_asked_for() -> None:
    assert length(WSD) == UPDATES
    assert length(f"{WSD} --max-epoch 3") == 3 * UPDATES
    assert length(WSD, processes=2) == math.ceil(UPDATES / 2)
    assert length(f"{WSD} --max-epoch 2 --update-freq 1,4") == UPDATES + math.ceil(UPDATES / 4)
    assert length(f"{WSD} --max-update 7") == 7
    assert length(f"{WSD} --total-num-update 9") == 0, "the schedule has an end"
    fixed = WSD.replace("wsd", "fixed")
    assert length(fixed) == 0, "as in fairseq, training without a limit goes on"
    assert length(f"{fixed} --warmup-ratio 0.1") == UPDATES


def test_a_run_without_a_length_ends_with_its_schedule(tmp_path: Path) -> None:
    lines = runs.updates(runs.train(tmp_path, WSD, "--no-save"))
    assert lines[-1]["num_updates"] == UPDATES and 0 <= float(lines[-1]["lr"]) < 0.5 * float(lines[0]["lr"])


@pytest.mark.parametrize(
    "batch",
    [
        "--max-tokens 250",
        "--batch-size 9 --update-freq 2,3",
        "--sample-break-mode complete --skip-invalid-size-inputs-valid-test --max-tokens 400",
        "--sample-break-mode eos --tokens-per-sample 200 --max-tokens 400",
    ],
)
def test_the_length_in_advance_is_that_of_the_epochs(tmp_path: Path, batch: str) -> None:
    fixed = f"{WSD.replace('wsd', 'fixed')} {batch} --max-epoch 2"
    lines = runs.updates(runs.train(tmp_path, fixed, "--no-save --disable-validation"))
    assert length(f"{WSD} {batch} --max-epoch 2") == lines[-1]["num_updates"]


def test_the_length_of_a_masked_model_counts_its_shorter_blocks() -> None:
    flags = """--cpu --task masked_lm --arch bert_tiny --criterion masked_lm --encoder-layers 1
        --train-subset valid --tokens-per-sample 16 --sample-break-mode none --max-tokens 64 --optimizer adam
        --lr 0.001 --lr-scheduler wsd"""
    assert length(flags) == math.ceil(math.ceil(TOKENS / 15) / 4) > math.ceil(math.ceil(TOKENS / 16) / 4)


def test_epochs_of_several_folders_have_the_lengths_of_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for name, split in (("one", "valid"), ("two", "test")):
        (tmp_path / name).mkdir()
        shutil.copy(runs.DATA / "dict.txt", tmp_path / name)
        for end in ("idx", "bin"):
            shutil.copy(runs.DATA / f"{split}.{end}", tmp_path / name / f"train.{end}")
            shutil.copy(runs.DATA / f"test.{end}", tmp_path / name)
    data: Any = f"{tmp_path / 'one'}:{tmp_path / 'two'}"
    other = token_count(str(runs.DATA / "test"))
    log = runs.train(tmp_path / "out", WSD, "--train-subset train --max-epoch 3 --no-save", data=data)
    expected = 2 * math.ceil(math.ceil(TOKENS / 16) / 16) + math.ceil(math.ceil(other / 16) / 16)
    assert runs.updates(log)[-1]["num_updates"] == expected and float(runs.updates(log)[-1]["lr"]) < 1e-3 / 3
    assert f"{expected} updates to come" in caplog.text


EPOCHS = f"{WSD} --max-epoch 2 --decay-ratio 0.5 --save-interval-updates 8"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder and the updates of a run of two epochs."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, runs.updates(runs.train(folder, EPOCHS))


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ("", 2 * UPDATES - 8),
        ("--update-freq 4", math.ceil((UPDATES - 8) / 4) + math.ceil(UPDATES / 4)),
        ("--reset-dataloader", 2 * UPDATES),
        ("--max-tokens 1024 --warmup-updates 5", math.ceil((UPDATES - 8) / 4) + math.ceil(UPDATES / 4)),
    ],
)
def test_the_schedule_of_a_resumed_run_ends_with_its_data(
    whole: tuple[Path, list[dict[str, Any]]], flags: str, left: int, tmp_path: Path
) -> None:
    folder, lines = whole
    rest = runs.updates(runs.train(tmp_path, EPOCHS, flags, "--restore-file", folder / "checkpoint_1_8.pt"))
    assert len(rest) == left and rest[-1]["num_updates"] == 8 + left
    first, last = float(lines[0]["lr"]), float(rest[-1]["lr"])
    assert last < 0.2 * first, "the rate has fallen"
    if not flags:
        assert [line["lr"] for line in rest] == [line["lr"] for line in lines[8:]]
    # What was changed stays so when it is interrupted again.
    again = runs.updates(runs.train(tmp_path, EPOCHS, flags.replace("--reset-dataloader", "")))
    assert again == []


def test_a_resumed_run_that_was_changed_goes_on_as_it_would_have(
    whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    changed = f"{EPOCHS} --max-epoch 4 --update-freq 2 --save-interval-updates 4 --fp16 --fp16-init-scale 1e5"
    start = whole[0] / "checkpoint_1_8.pt"
    uncut = runs.updates(runs.train(tmp_path / "uncut", changed, "--restore-file", start))
    cut = next((tmp_path / "uncut").glob("checkpoint_*_12.pt"))
    rest = runs.updates(runs.train(tmp_path / "cut", changed, "--restore-file", cut))
    assert len(rest) > 5 and len(uncut) < 2 + 3 * 6, "updates that are not finite are skipped"
    assert [(line["lr"], line["loss"]) for line in rest] == [(line["lr"], line["loss"]) for line in uncut[4:]]


def test_equal_totals_of_other_batches_are_no_equal_lengths(tmp_path: Path) -> None:
    runs.train(tmp_path / "first", f"{WSD} --save-interval-updates 4", "--max-tokens 192")  # 14 updates
    source = ["--restore-file", tmp_path / "first" / "checkpoint_1_4.pt"]
    last = runs.updates(runs.train(tmp_path / "second", WSD, "--max-tokens 384 --max-epoch 2", source))[-1]  # 2 * 7
    assert last["num_updates"] == 4 + (7 - 2) + 7 and float(last["lr"]) < 0.0002


def test_a_new_optimizer_after_a_whole_epoch_trains_another_one(tmp_path: Path) -> None:
    runs.train(tmp_path, WSD, "--warmup-updates 3")
    again = runs.updates(runs.train(tmp_path, WSD, "--warmup-updates 3 --reset-optimizer"))
    assert [line["num_updates"] for line in again] == [*range(1, UPDATES + 1)]
    assert float(again[-1]["lr"]) < 0.0003


def test_a_run_that_is_over_names_its_epochs(
    whole: tuple[Path, list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert runs.updates(runs.train(whole[0], EPOCHS, "--no-save")) == []
    # The flag may be left out: the checkpoint has the number of epochs.
    assert runs.updates(runs.train(whole[0], EPOCHS.replace("--max-epoch 2", ""), "--no-save")) == []
    message = f"nothing to do: `max_epoch` 2 is reached after {2 * UPDATES} updates; change it to train on"
    assert caplog.text.count(message) == 2


def test_a_run_without_epochs_ends_after_one_even_if_updates_were_skipped(tmp_path: Path) -> None:
    flags = [WSD, "--no-save --fp16 --fp16-init-scale 1e9"]
    lines = [runs.updates(runs.train(tmp_path, *flags, epochs)) for epochs in ("", "--max-epoch 1")]
    assert len(lines[0]) < UPDATES
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]


def test_a_checkpoint_that_lacks_the_length_has_the_last_update_by_its_settings(
    whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    state = checkpoint.read(whole[0] / "checkpoint_1_8.pt")
    del state["extra_state"]["length"]
    state["args"]["max_update"] = 400
    checkpoint.save(tmp_path / "older.pt", state)
    runs.train(tmp_path, EPOCHS, "--stop-time-hours 1e-9 --no-save --restore-file", tmp_path / "older.pt")
    assert f"training ends at update {2 * UPDATES} (was 400)" in caplog.text


def test_a_warmup_that_is_longer_than_the_data_names_their_updates(tmp_path: Path) -> None:
    flags = WSD.replace("wsd", "polynomial_decay --warmup-updates 1000")
    with pytest.raises(UserError, match=f"max.epoch 1: these data give {UPDATES} updates.*warmup.updates 1000"):
        runs.train(tmp_path, flags, "--no-save")


PUBLISHED = """--cpu --arch bert_base --encoder-layers 1 --encoder-embed-dim 8 --encoder-ffn-embed-dim 8
    --encoder-attention-heads 1 --train-subset valid --valid-subset test --tokens-per-sample 32 --batch-size 8
    --update-freq 1 --log-format json --log-interval 1 --disable-validation"""


def test_epochs_are_the_length_of_a_published_schedule_as_their_updates_are(tmp_path: Path) -> None:
    by_epochs = runs.updates(runs.train(tmp_path / "epochs", PUBLISHED, "--max-epoch 2"))
    number = len(by_epochs)
    by_updates = runs.updates(runs.train(tmp_path / "updates", PUBLISHED, f"--max-update {number} --no-save"))
    rates = [float(line["lr"]) for line in by_epochs]
    assert rates == [float(line["lr"]) for line in by_updates] and rates[0] > 0 == rates[-1]
    assert rates.index(max(rates)) + 1 == number // 10, "the warm-up is a tenth"
    resumed = runs.updates(runs.train(tmp_path / "epochs", PUBLISHED, "--max-epoch 3 --no-save"))
    assert float(resumed[0]["lr"]) == pytest.approx(1e-4 / 3, rel=0.1), "an epoch of three is left"


def test_a_run_whose_published_schedule_was_longer_than_itself_goes_on_with_it(tmp_path: Path) -> None:
    schedule = "--total-num-update 1000 --warmup-updates 100"
    runs.train(tmp_path / "one", PUBLISHED, schedule, "--max-update 3")
    resumed = runs.updates(runs.train(tmp_path / "one", PUBLISHED, "--max-update 6 --no-save"))
    assert [float(line["lr"]) for line in resumed] == pytest.approx([4e-6, 5e-6, 6e-6])


def test_the_file_of_settings_leaves_the_length_to_the_data(tmp_path: Path) -> None:
    runs.train(tmp_path / "first", WSD, "--max-epoch 1")
    settings = ["--config", tmp_path / "first" / "settings.yaml", "--train-subset test --no-save"]
    lines = runs.updates(runs.train(tmp_path / "second", *settings))
    assert lines[-1]["num_updates"] == math.ceil(token_count(str(runs.DATA / "test")) / 256) != UPDATES


def test_shares_never_exceed_the_whole() -> None:
    for total in range(1, 400):
        for warmup in (0.05, 0.3, 0.5, 0.29):
            config = WSDConfig(lr=[0.1], max_update=total, warmup_ratio=warmup, decay_ratio=1 - warmup)
            assert config.warmup + config.decay <= total
    config = WSDConfig(lr=[0.1], max_update=560, warmup_ratio=0.05, decay_ratio=0.7)
    assert (config.warmup, config.decay) == (28, 392), "the counts that the recipe was tuned with"


def test_a_setting_replaces_the_other_form_of_itself_in_files_and_recipes(tmp_path: Path) -> None:
    def of(*words: Any) -> tuple[Any, ...]:
        cfg = training_settings(runs.arguments(*words))
        schedule = cfg.lr_scheduler
        return (schedule.warmup, schedule.decay, cfg.optimization.max_update)

    fast = "--arch transformer_lm_fast_demo"
    assert of(fast) == (28, 392, 560) and of(fast, "--max-update 100") == (5, 70, 100)
    assert of(fast, "--warmup-updates 7 --decay-updates 9") == (7, 9, 560)
    file = tmp_path / "settings.yaml"
    file.write_text("max_update: 560\nlr_scheduler: wsd\nwarmup_updates: 28\ndecay_updates: 392\nlr: 0.1\n")
    assert of("--config", file, "--max-update 400 --warmup-ratio 0.05 --decay-ratio 0.7") == (20, 280, 400)
    file.write_text("max_update: 560\nlr_scheduler: wsd\nwarmup_ratio: 0.05\ndecay_ratio: 0.7\nlr: 0.1\n")
    assert of("--config", file, "--max-update 400 --warmup-updates 50") == (50, 280, 400)
    with pytest.raises(UserError, match="--warmup-updates --warmup-ratio: choose one of the two"):
        of(fast, "--warmup-updates 7 --warmup-ratio 0.1")
    cfg = training_settings(runs.arguments(fast, "--max-tokens 4096 --max-epoch 2"))
    assert (cfg.data.batch_size, cfg.data.max_tokens, cfg.optimization.max_update) == (None, 4096, 0)


def test_a_warmup_without_room_names_the_shares() -> None:
    with pytest.raises(UserError, match="updates exceed the 400 .* give shares: warmup_ratio, decay_ratio"):
        WSDConfig(lr=[0.1], max_update=400, warmup_updates=50, decay_updates=392)


@pytest.mark.parametrize("name", ["inverse_sqrt", "polynomial_decay", "cosine", "fixed"])
def test_every_warmup_can_be_a_share(name: str) -> None:
    flags = f"--arch transformer_lm_tiny --optimizer adam --lr 0.1 --lr-scheduler {name} --max-update 200"
    cfg = training_settings(runs.arguments(flags, "--warmup-ratio 0.1")).lr_scheduler
    assert cfg.warmup == 20
