"""What a YAML file says is text, and is read as a flag's value is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import yaml

from fairseq.config.settings_file import parse_yaml
from fairseq.interop.fairseq.hydra import training_flags


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("save_interval_words: 1000:10", "save_interval_words", "1000:10"),
        ("profile: 10:20", "profile", "10:20"),
        ("stages: 16:50", "stages", "16:50"),
        ("save_dir: 0012", "save_dir", "0012"),
        ("save_dir: 1_000", "save_dir", "1_000"),
        ("save_dir: 2026-11-28", "save_dir", "2026-11-28"),
        ("valid_subset: no", "valid_subset", "no"),
        ("valid_subset: [valid, test]", "valid_subset", "valid,test"),
        ("log_file: null", "log_file", None),
        ("log_file: 'null'", "log_file", "null"),
        ("lr: 1e-3", "lr", [0.001]),
        ("update_freq: [1, 2]", "update_freq", [1, 2]),
        ("adam-betas: (0.5, 0.9)", "adam_betas", [0.5, 0.9]),
        ("no_save: true", "no_save", True),
        ("no-save: 0", "no_save", False),
        ("seed: 12", "seed", 12),
        ("amp: false\nnum_shards: 1\ndataset_impl: null\nseed: 2", "seed", 2),
        ("profile: true", "profile", "10:20"),  # as the flag without a value
        ("profile: false", "profile", None),
    ],
)
def test_a_value_of_a_file_is_read_as_the_flags(text: str, name: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text + "\n")
    args = runs.arguments("--arch transformer_lm_tiny --config", tmp_path / "c.yaml")
    assert getattr(args, name) == value


@pytest.mark.parametrize("word", ["10:20", "0012", "1_000", "2026-11-28", "no", "1e3"])
def test_an_override_of_hydra_is_passed_on_as_it_is_written(word: str, tmp_path: Path) -> None:
    assert f"--wandb-project={word}" in training_flags(None, ["task.data=d", f"common.wandb_project={word}"])
    (tmp_path / "c.yaml").write_text(
        f"task: {{_name: language_modeling, data: d}}\ncommon: {{wandb_project: {word}}}\n"
    )
    assert f"--wandb-project={word}" in training_flags(tmp_path / "c.yaml", [])


def test_the_settings_of_a_run_are_read_as_they_were(tmp_path: Path) -> None:
    flags = "--cpu --arch transformer_lm_tiny --train-subset valid --valid-subset test --max-update 1 --stages 16:1"
    runs.train(tmp_path / "0012", flags, "--lr 0.01 --adam-betas 0.5,0.9")
    file = tmp_path / "0012" / "settings.yaml"
    once: dict[str, Any] = vars(
        runs.arguments("--save-dir", tmp_path / "0012", flags, "--lr 0.01 --adam-betas 0.5,0.9")
    )
    again = vars(runs.arguments("--config", file))
    assert again == once
    assert parse_yaml(yaml.safe_dump({"a": None, "b": "null", "c": [1]})) == {"a": None, "b": "null", "c": ["1"]}


def test_a_hydra_command_without_an_optimizer_has_the_recipe_of_its_architecture() -> None:
    words = training_flags(None, ["task=language_modeling", "task.data=d", "model=llama_tiny"])
    assert not [word for word in words if word.startswith("--lr-scheduler")]
    words = training_flags(None, ["task=language_modeling", "task.data=d", "model=llama_tiny", "optimizer=adam"])
    assert "--lr-scheduler=fixed" in words
