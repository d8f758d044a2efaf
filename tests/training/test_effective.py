"""The settings of a run as its log and ``settings.yaml`` have them, and the outputs that these say
are its own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
import yaml
from mistakes import user_error

from fairseq.config.settings import TrainingSettings, training_settings
from fairseq.errors import UserError
from fairseq.training import effective


def settings_of(*flags: Any, **more: Any) -> TrainingSettings:
    """The settings of a command line, with *more* in the namespace, as plug-ins add."""
    args = runs.arguments(runs.BASELINE, *flags)
    vars(args).update(more)
    return training_settings(args)


def test_settings_are_plain_values_by_name_in_order_without_the_data() -> None:
    values = effective.effective(settings_of("--lr 0.05,0.1", plugin=object(), pair=(1, 2), none=None, names=["a"]))
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
    settings = settings_of("--save-dir a --metrics-file m.jsonl --tensorboard-logdir b", word="é")
    file = tmp_path / "settings.yaml"
    effective.write_settings(settings, file)
    text = file.read_text(encoding="utf-8")
    assert text.startswith(f"# Settings of a run on {runs.DATA}; use: --config settings.yaml\nactivation")
    assert "word: é\n" in text, "as it is, not escaped"
    values = yaml.safe_load(text)
    paths = {name: values.pop(name) for name in ("save_dir", "metrics_file", "tensorboard_logdir")}
    assert paths == {name: str(tmp_path / path) for name, path in zip(paths, ("a", "m.jsonl", "b"), strict=True)}
    expected = effective.effective(settings)
    assert values == {name: value for name, value in expected.items() if name not in paths}
    assert values["log_file"] is None, "what is not written has no path"
    assert list(values) == sorted(values)


# --- outputs


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with figures of a run, and an empty metrics file."""
    monkeypatch.chdir(tmp_path)
    Path("m.jsonl").write_text("7")
    Path("empty.jsonl").touch()
    Path("board/test").mkdir(parents=True)
    Path("board/test/events.out.tfevents.1").touch()
    Path("other/somewhere").mkdir(parents=True)
    Path("other/somewhere/events.out.tfevents.1").touch()
    Path("folder").mkdir()
    Path("run").mkdir()
    return tmp_path


METRICS, BOARD = "--metrics-file m.jsonl", "--tensorboard-logdir board"


def check(*flags: str) -> None:
    effective.check_outputs(settings_of("--save-dir run", *flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (METRICS, "--metrics-file m.jsonl: exists, and is not of the run in run; choose another name"),
        (BOARD, "--tensorboard-logdir board: exists, and is not of the run in run; choose another name"),
        (f"{BOARD} --valid-subset valid,test", "--tensorboard-logdir board: exists"),
    ],
)
def test_what_exists_and_is_not_the_runs_is_refused(outputs: Path, flags: str, message: str) -> None:
    for settings in (None, "save_dir: run\n", "metrics_file: x\ntensorboard_logdir: y\n", "- a\n"):
        Path("run/settings.yaml").unlink(missing_ok=True)
        if settings:
            Path("run/settings.yaml").write_text(settings)
        with pytest.raises(UserError) as error:
            check(flags)
        assert error.value.with_flags.startswith(message)


@pytest.mark.parametrize("tag", ["train_inner", "train", "a", "b"])
def test_curves_of_every_kind_are_seen(outputs: Path, tag: str) -> None:
    Path(f"curves/{tag}").mkdir(parents=True)
    args = runs.arguments(runs.BASELINE, "--save-dir run --tensorboard-logdir curves")
    args.valid_subset = "a, b"
    effective.check_outputs(training_settings(args))
    Path(f"curves/{tag}/events.out.tfevents.7").touch()
    with user_error("^--tensorboard-logdir curves"):
        effective.check_outputs(training_settings(args))


@pytest.mark.parametrize(
    "flags",
    [
        "",
        *(f"--metrics-file {name}" for name in ("empty.jsonl", "new.jsonl", "folder", os.devnull)),
        *(f"--tensorboard-logdir {name}" for name in ("new", "other", "folder")),
    ],
)
def test_what_does_not_exist_or_is_empty_is_free(outputs: Path, flags: str) -> None:
    check(flags)


def test_a_run_goes_on_with_what_its_own_settings_name(outputs: Path) -> None:
    own = f"save_dir: {outputs}/run\nmetrics_file: {outputs}/m.jsonl\ntensorboard_logdir: board\n"
    Path("run/settings.yaml").write_text(own)
    check(METRICS, BOARD)
    check("--metrics-file ./run/../m.jsonl")
    Path("run/settings.yaml").write_text(own.replace("run", "former"))
    with user_error("^--metrics-file m.jsonl"):  # a copy of another run
        check(METRICS)


def test_a_folder_whose_name_has_a_line_end_or_is_not_utf8_leaves_a_file_that_is_read(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    effective.write_settings(replace(settings_of("--seed", "7"), data_path="two\nlines: [\udcff"), file)
    assert yaml.safe_load(file.read_text(encoding="utf-8"))["seed"] == 7
