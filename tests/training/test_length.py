"""How long a run is that does not say so, and settings that are shares of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import runs

from fairseq.config.settings import training_settings
from fairseq.data.indexed_dataset import token_count
from fairseq.errors import UserError
from fairseq.optim.lr_scheduler.settings import WSDConfig
from fairseq.training.length import with_max_update

TOKENS = token_count(str(runs.DATA / "valid"))
WSD = f"{runs.SMALL} --arch transformer_lm_tiny --optimizer adam --lr 0.001 --lr-scheduler wsd"


def length(flags: str, processes: int = 1) -> int:
    settings = training_settings(runs.arguments(*flags.split()))
    return with_max_update(settings, processes).optimization.max_update


def test_a_schedule_that_needs_an_end_gets_one_epoch_or_the_epochs_that_are_asked_for() -> None:
    assert length(WSD) == math.ceil(TOKENS / 64)
    assert length(f"{WSD} --max-epoch 3") == 3 * math.ceil(TOKENS / 64)
    assert length(WSD, processes=2) == math.ceil(TOKENS / 128)
    assert length(f"{WSD} --max-epoch 2 --update-freq 1,4") == math.ceil(TOKENS / 64) + math.ceil(TOKENS / 256)
    assert length(f"{WSD} --max-update 7") == 7 and length(f"{WSD} --stages 8:3,16:5") == 0
    assert length(f"{WSD} --total-num-update 9") == 0, "the schedule has an end"
    fixed = WSD.replace("wsd", "fixed")
    assert length(fixed) == 0, "as in fairseq, training without a limit goes on"
    assert length(f"{fixed} --warmup-ratio 0.1") == math.ceil(TOKENS / 64)


def test_a_run_without_a_length_ends_with_its_schedule(tmp_path: Path) -> None:
    lines = runs.updates(runs.train(tmp_path, WSD, "--max-tokens 256 --no-save"))
    updates = math.ceil(TOKENS / 256)
    assert lines[-1]["num_updates"] == updates and 0 <= float(lines[-1]["lr"]) < 0.5 * float(lines[0]["lr"])


@pytest.mark.parametrize(
    "batch", ["--max-tokens 250", "--max-tokens 300", "--batch-size 3", "--batch-size 9 --update-freq 2"]
)
def test_the_length_in_advance_is_that_of_the_epochs(tmp_path: Path, batch: str) -> None:
    fixed = f"{WSD.replace('wsd', 'fixed')} {batch} --max-epoch 2"
    lines = runs.updates(runs.train(tmp_path, fixed, "--no-save --log-interval 1"))
    assert length(f"{WSD} {batch} --max-epoch 2") == lines[-1]["num_updates"]


def test_the_file_of_settings_leaves_the_length_to_the_data(tmp_path: Path) -> None:
    runs.train(tmp_path / "first", WSD, "--max-epoch 1 --max-tokens 256")
    settings = ["--config", tmp_path / "first" / "settings.yaml", "--train-subset test --no-save"]
    lines = runs.updates(runs.train(tmp_path / "second", *settings))
    assert lines[-1]["num_updates"] == math.ceil(token_count(str(runs.DATA / "test")) / 256) != math.ceil(TOKENS / 256)


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
