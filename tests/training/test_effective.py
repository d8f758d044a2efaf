"""The settings of a run as its log and ``settings.yaml`` have them, and the outputs that these say
are its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
import yaml

from fairseq.config.settings import TrainingSettings, training_settings
from fairseq.training import effective


def settings_of(*flags: Any, **more: Any) -> TrainingSettings:
    """The settings of a command line, with *more* in the namespace, as plug-ins add."""
    args = runs.arguments(runs.BASELINE, *flags)
    vars(args).update(more)
    return training_settings(args)


def test_settings_are_plain_values_by_name_in_order_without_the_data() -> None:
    values = effective.plain_settings(
        settings_of("--lr 0.05,0.1", plugin=object(), pair=(1, 2), none=None, names=["a"])
    )
    assert list(values) == sorted(values)
    assert "data" not in values and "plugin" not in values
    assert (values["lr"], values["pair"], values["none"], values["names"]) == ([0.05, 0.1], [1, 2], None, ["a"])
    assert (values["arch"], values["cpu"], values["max_update"]) == ("transformer_lm_tiny", True, 0)
    assert type(values["pair"]) is list, "YAML has no tuples"


def test_the_log_has_the_data_first_and_no_empty_settings() -> None:
    line = effective.describe(
        settings_of("--lr 0.05,0.1 --seed 0", "--max-update 7", empty="", nothing=None, off=False, no=[])
    )
    first, *others = line.split(", ")
    assert first == f"data={runs.DATA}"
    names = [other.partition("=")[0] for other in others if "=" in other]
    assert names == sorted(names) and not {"empty", "nothing", "off", "no"} & set(names)
    assert {"max_update=7", "lr=0.05,0.1", "cpu=on", "seed=0"} <= set(others)


# --- settings.yaml


def test_the_file_has_absolute_paths_and_repeats_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = settings_of("--save-dir a --metrics-file m.jsonl --tensorboard-logdir b --wandb-project é", unread=1)
    file = tmp_path / "settings.yaml"
    effective.write_settings(settings, file)
    text = file.read_text(encoding="utf-8")
    assert text.startswith(f"# Settings of a run on {runs.DATA}; use: --config settings.yaml\nactivation")
    assert "wandb_project: é\n" in text, "as it is, not escaped"
    values = yaml.safe_load(text)
    paths = {name: values.pop(name) for name in ("save_dir", "metrics_file", "tensorboard_logdir")}
    assert paths == {name: str(tmp_path / path) for name, path in zip(paths, ("a", "m.jsonl", "b"), strict=True)}
    expected = effective.plain_settings(settings)
    left_out = {*paths, "unread", "reset_optimizer", "reset_lr_scheduler", "reset_dataloader", "reset_meters"}
    assert values == {name: value for name, value in expected.items() if name not in left_out}
    assert values["log_file"] is None, "what is not written has no path"
    assert list(values) == sorted(values)


def test_what_one_start_of_a_run_reset_the_next_one_does_not(tmp_path: Path) -> None:
    for restored, resets in (("", False), ("--restore-file other.pt", True)):
        effective.write_settings(settings_of("--reset optimizer --save-dir", tmp_path, restored), tmp_path / "a.yaml")
        assert runs.arguments("--config", tmp_path / "a.yaml").reset_optimizer is resets


def test_a_folder_whose_name_has_a_line_end_or_is_not_utf8_leaves_a_file_that_is_read(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    settings = settings_of("--seed", "7", "--save-dir", tmp_path / "odd\n\udcff")
    effective.write_settings(replace(settings, data_path="two\nlines: [\udcff"), file)
    assert yaml.safe_load(file.read_text(encoding="utf-8"))["seed"] == 7


def test_printed_settings_are_a_file_that_gives_the_same_settings(tmp_path: Path) -> None:
    flags = "--arch transformer_lm_fast_tiny --lr 0.002,0.001 --validate-every 7u --wandb-project a#b --cpu"
    settings = training_settings(runs.arguments(flags, "--save-dir", tmp_path))
    text = effective.commented_settings(settings)
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    again = training_settings(runs.arguments("--config", tmp_path / "mine.yaml"))
    assert effective.plain_settings(again) == effective.plain_settings(settings)
    assert "# maximum gradient norm (0: no clipping)\nclip_norm: 0.25  # recipe of transformer_lm_fast_tiny\n" in text
    assert "# random seed\n# seed: 1\n" in text
    named = {line.removeprefix("# ").partition(":")[0] for line in text.splitlines()}
    assert effective.plain_settings(settings).keys() & settings.origins.keys() <= named
