"""Plug-ins in the manner of those that users of fairseq have train two updates and resume."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import runs
from plugin_batches import BATCHES
from plugin_optimizers import OPTIMIZERS
from plugin_sources import CRITERIONS, LM, MODELS
from plugin_tasks import TASKS

import fairseq
from fairseq.config import options, registry
from fairseq.config.registry import is_outside
from fairseq.errors import UserError
from fairseq.system import plugins
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq_cli import validate
from fairseq_cli.generate import get_generation_parser
from fairseq_cli.validate import get_validation_parser

ALL = {**BATCHES, **CRITERIONS, **MODELS, **TASKS, **OPTIMIZERS}
LAYOUTS = {  # file of each part in the folder; None: there is no __init__.py
    "no_init": {"criterions/a.py": CRITERIONS["loss_of_10"], "models/b.py": MODELS["lstm_of_9"]},
    "empty_init": {
        "__init__.py": ('"""A plug-in."""\n', ""),
        "tasks/a.py": TASKS["steps_of_10"],
        "optim/lr_scheduler/b.py": OPTIMIZERS["warmup_of_9"],
    },
    "imports": {
        "__init__.py": ("from . import criterions, optim", ""),
        "criterions/__init__.py": CRITERIONS["loss_of_12"],
        "optim.py": OPTIMIZERS["radam_of_9"],
    },
    "code_and_models": {
        "__init__.py": ("NAME = 'plug-in'", ""),
        "models/__init__.py": ("", ""),
        "models/a.py": MODELS["arch_of_9"],
        "tasks/b.py": TASKS["config_task_of_12"],
        "criterions/never_imported.py": ("1 / 0", ""),
    },
}
FLAGS = """--cpu --train-subset valid --valid-subset test --max-tokens 64 --clip-norm 0.1
    --required-batch-size-multiple 1 --lr 0.05 --seed 3 --log-format json --log-interval 1 --max-valid-steps 1
    --optimizer sgd --lr-scheduler fixed"""
SIZES = {
    "transformer_lm": """--decoder-layers 1 --decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16
        --decoder-ffn-embed-dim 16 --decoder-attention-heads 2""",
    "bert_tiny": "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2",
}


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a test registers stays."""
    for name in ("MODELS", "ARCHITECTURES", "TASKS", "CRITERIONS", "OPTIMIZERS", "LR_SCHEDULERS"):
        parts = getattr(registry, name)
        monkeypatch.setattr(parts, "_parts", {**parts.parts()})


def trains_and_resumes(folder: Path, save_dir: Path, flags: str) -> None:
    """Train three updates with a save after the second, and compare with a run that resumes
    there."""
    words = flags.split()
    arch = [value for flag, value in zip(words, words[1:], strict=False) if flag == "--arch"][-1]
    every = ["--user-dir", folder, FLAGS, SIZES.get(arch, ""), flags]
    through = runs.updates(runs.train(save_dir, *every, "--max-update 3 --save-interval-updates 2"))
    [saved] = [*save_dir.glob("checkpoint_*_2.pt")] or [save_dir / "checkpoint1.pt"]  # of an epoch of two updates
    saved.rename(save_dir / "checkpoint_last.pt")
    [last] = runs.updates(runs.train(save_dir, *every, "--max-update 3"))
    assert [line["num_updates"] for line in (*through, last)] == [1, 2, 3, 3]
    assert last["loss"] == pytest.approx(through[-1]["loss"], abs=1e-4)
    assert len({line["loss"] for line in through}) == 3
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_plugin_trains_and_resumes(name: str, tmp_path: Path) -> None:
    source, flags = ALL[name]
    folder = tmp_path / f"plugin_{name}"
    folder.mkdir()
    (folder / "__init__.py").write_text(source)
    trains_and_resumes(folder, tmp_path, flags)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_parts_of_a_folder_are_imported(layout: str, tmp_path: Path) -> None:
    folder = tmp_path / f"layout_{layout}"
    for file, (source, _) in LAYOUTS[layout].items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(source)
    trains_and_resumes(folder, tmp_path, " ".join(flags for _, flags in LAYOUTS[layout].values()))


def test_a_plugin_that_is_copied_into_the_package_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, whose modules import each other by fairseq's name."""
    source, flags = TASKS["targets_of_9"]
    folder = tmp_path / "copied_plugin"
    folder.mkdir()
    base, task = source.split("@register_task")
    (folder / "base.py").write_text(base)
    imports = "from fairseq.copied_plugin.base import Base, LanguageModelingTask, register_task\n"
    (folder / "task.py").write_text(f"{imports}@register_task{task}")
    (folder / "__init__.py").write_text("import fairseq.copied_plugin.task")
    monkeypatch.setattr(fairseq, "__path__", [*fairseq.__path__, str(tmp_path)])
    trains_and_resumes(folder, tmp_path, flags)
    assert is_outside(sys.modules["fairseq.copied_plugin.base"].Base)


def test_a_file_that_is_copied_among_the_tasks_is_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_copied_modules", set())
    module = type(sys)("fairseq.tasks.copied")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(TASKS["targets_of_9"][0], vars(module))
    assert is_outside(vars(module)["Task"]) and not is_outside(vars(module)["LanguageModelingTask"])
    register_task("alias_of_a_built_in_task")(LanguageModelingTask)
    assert not is_outside(LanguageModelingTask)


def test_files_among_the_packages_own_are_imported_when_their_part_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, source in {"tasks": TASKS["targets_of_9"][0], "criterions": CRITERIONS["loss_of_10"][0]}.items():
        (tmp_path / kind / f"copied_{kind}").mkdir(parents=True)
        (tmp_path / kind / f"copied_{kind}" / "__init__.py").write_text(source)
        (tmp_path / kind / "broken.py").write_text("1 / 0  # registers nothing")
        room = importlib.import_module(f"fairseq.{kind}")
        monkeypatch.setattr(room, "__path__", [*room.__path__, str(tmp_path / kind)])
    monkeypatch.setattr(plugins, "_copies", plugins._copies.__wrapped__)
    flags = f"{LM} --task targets_of_9 --criterion loss_of_10 --max-tokens 64 --cpu"
    assert runs.arguments(flags).every == 2
    assert is_outside(registry.TASKS["targets_of_9"]) and is_outside(registry.CRITERIONS["loss_of_10"])
    for name in ("tasks.copied_tasks", "criterions.copied_criterions"):
        monkeypatch.delitem(sys.modules, f"fairseq.{name}")
    (tmp_path / "tasks" / "broken.py").write_text("nothing\n@register_task\nclass Task: ...\n")
    with pytest.raises(UserError, match=r"^fairseq\.tasks\.broken: .*line 1: NameError: .*; correct"):
        _ = "anything" in registry.TASKS


def test_a_script_gets_the_flags_of_a_plugins_task_and_a_command_those_that_are_given(tmp_path: Path) -> None:
    folder = tmp_path / "plugin_of_flags"
    folder.mkdir()
    (folder / "__init__.py").write_text(TASKS["targets_of_9"][0])
    words = [str(runs.DATA), "--path", "model.pt", "--task", "targets_of_9", "--user-dir", str(folder)]
    args = options.parse_args_and_arch(get_generation_parser(), words)
    assert args.every == 2 and args.sample_break_mode == "none"
    args = options.parse_args_and_arch(get_generation_parser(), words, task_defaults=False)
    assert not hasattr(args, "every"), "a checkpoint has its own"
    assert (
        options.parse_args_and_arch(get_generation_parser(), [*words, "--every", "3"], task_defaults=False).every == 3
    )


def test_validation_computes_the_loss_of_the_checkpoints_task(tmp_path: Path) -> None:
    source = """
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

@register_task("no_loss", dataclass=LanguageModelingConfig)
class Without(LanguageModelingTask):
    def valid_step(self, sample, model, criterion):
        loss, size, logged = super().valid_step(sample, model, criterion)
        return loss * 0, size, {**logged, "loss": logged["loss"] * 0}
"""
    folder = tmp_path / "plugin_no_loss"
    folder.mkdir()
    (folder / "__init__.py").write_text(source)
    runs.train(tmp_path, "--user-dir", folder, FLAGS, SIZES["transformer_lm"], f"{LM} --task no_loss --max-update 2")
    path = str(tmp_path / "checkpoint_last.pt")
    words = runs.words("--user-dir", folder, "--path", path, "--valid-subset test --max-tokens 64 --cpu")
    args = options.parse_args_and_arch(get_validation_parser(), [str(runs.DATA), *words], task_defaults=False)
    assert validate.main(args)[path]["test"]["loss"] == 0
