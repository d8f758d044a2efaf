"""Settings are typed once, at a command's entrance, and are values."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import runs

import fairseq
from fairseq.config import options, registry
from fairseq.config.fields import typed
from fairseq.config.namespaces import namespace_of
from fairseq.config.settings import TrainingSettings, training_settings, typed_settings
from fairseq.criterions import FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.optim.adam import FairseqAdam
from fairseq.optim.settings import AdamConfig
from fairseq.tasks.language_modeling import LanguageModelingTask, LanguageModelingTaskConfig
from fairseq.training.stages import Stage, settings_at
from fairseq_cli.common import get_training_parser
from fairseq_cli.eval_lm import EvalLMConfig, get_eval_lm_parser

PACKAGE = Path(fairseq.__file__).parent
ENTRANCES = {
    "config/options.py",
    "config/fields.py",
    "config/settings.py",
    "modules/fairseq_layers.py",  # made, as fairseq's layers are, from the namespace that a plug-in hands them
    "models/roberta/__init__.py",
}  # where a flat namespace is at home


def settings(*flags: Any) -> TrainingSettings:
    return training_settings(runs.arguments(*flags))


def configs() -> list[type]:
    """Every dataclass of the package whose name ends in Config.

    Files for exported folders need transformers, the harness's model lm-eval; settings of plug-ins
    for fairseq may be changed, as there.
    """
    names = [found.name for found in pkgutil.walk_packages([str(PACKAGE)], "fairseq.")]
    others = re.compile(r"\.(exported|interop\.fairseq)\.|\.harness\.model$")
    modules = [importlib.import_module(name) for name in names if not others.search(name)]
    found = {cls for module in modules for _, cls in inspect.getmembers(module, inspect.isclass)}
    return sorted(
        (
            cls
            for cls in found
            if cls.__name__.endswith("Config")
            and dataclasses.is_dataclass(cls)
            and not issubclass(cls, FairseqDataclass)
        ),
        key=repr,
    )


def test_every_config_is_frozen() -> None:
    assert len(configs()) > 20
    assert [cls for cls in configs() if not cls.__dataclass_params__.frozen] == []  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings(runs.BASELINE).common.seed = 2  # type: ignore[misc]


def test_nothing_below_the_entrance_reads_the_namespace_or_has_a_default_of_its_own() -> None:
    pattern = re.compile(r"getattr\((self\.)?args,|(?<!def )\bextract\(|hasattr\((self\.)?args,")
    guilty = []
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.with_name("fairseq_cli").glob("*.py")]):
        place = path.relative_to(PACKAGE.parent).as_posix().removeprefix("fairseq/")
        if not any(place.startswith(entrance) for entrance in ENTRANCES):
            guilty += [f"{place}: {line.strip()}" for line in path.read_text().splitlines() if pattern.search(line)]
    assert guilty == []


def test_a_command_line_becomes_typed_parts() -> None:
    value = settings(runs.SHORTFORMER, "--optimizer adam --adam-betas 0.5,0.9 --lr-scheduler cosine --max-lr 1")
    assert (value.common.seed, value.data.max_tokens, value.optimization.clip_norm) == (3, 64, 0.1)
    assert isinstance(value.model, TransformerLMConfig) and value.model.tokens_from_prev == 16
    assert isinstance(value.task, LanguageModelingTaskConfig) and value.task.tokens_per_sample == 16
    assert isinstance(value.optimizer, AdamConfig) and value.optimizer.adam_betas == [0.5, 0.9]
    assert value.optimizer.lr == value.optimization.lr == value.lr_scheduler.lr == [0.05]
    assert (value.chosen.arch, value.chosen.criterion) == ("shortformer_tiny", "adaptive_loss")
    assert value.data_path == str(runs.DATA)
    assert training_settings(value) is value is typed_settings(value)


def test_a_command_has_its_own_settings() -> None:
    args = argparse.Namespace(data="d", context_window=3, seed=7)
    value = typed_settings(args)
    assert typed(EvalLMConfig, args) == EvalLMConfig(context_window=3)
    assert (value.common.seed, value.model, value.task) == (7, None, None)


@pytest.mark.parametrize("words", [["--remove-bpe"], ["--post-process", "subword_nmt"], ["--post-process"]])
def test_fairseqs_names_of_the_subword_mark_are_the_mark(words: list[str]) -> None:
    args = options.parse_args_and_arch(get_eval_lm_parser(), ["d", *words])
    assert typed(EvalLMConfig, args).remove_bpe == "@@ "


def test_a_script_may_add_a_flag_that_a_part_has_too() -> None:
    def modify(parser: Any) -> None:
        parser.add_argument("--n-layer", type=int)

    flags = [str(runs.DATA), "--arch", "transformer_lm_tiny", "--n-layer", "3"]
    assert options.parse_args_and_arch(get_training_parser(), flags, modify_parser=modify).n_layer == 3


def test_a_change_reaches_every_part_and_the_flat_settings_of_a_copy() -> None:
    before = settings(runs.BASELINE)
    after = before.changed(tokens_per_sample=8, lr=[1.0])
    assert after.task.tokens_per_sample == after.model.tokens_per_sample == after.flat["tokens_per_sample"] == 8
    assert after.optimization.lr == after.optimizer.lr == after.lr_scheduler.lr == after.flat["lr"] == [1.0]
    assert (before.task.tokens_per_sample, before.flat["tokens_per_sample"]) == (16, 16)


def test_a_stage_derives_its_settings() -> None:
    stages = [Stage(1, 8, 5), Stage(2, 32, 9)]
    value = settings_at(settings(runs.SHORTFORMER, "--max-tokens-valid 8"), stages, stages[1])
    assert (value.model.tokens_from_prev, value.model.tokens_per_sample) == (32, 32)
    assert (value.data.max_tokens_valid, value.optimization.max_update) == (32, 9)
    learned = settings(runs.BASELINE, "--decoder-learned-pos --no-token-positional-embeddings")
    assert settings_at(learned, stages, stages[0]).model.max_target_positions == 32


def test_settings_of_parts_that_were_built_are_those_that_a_checkpoint_holds(tmp_path: Path) -> None:
    flags = """--cpu --train-subset valid --valid-subset test --batch-size 4 --arch transformer_xl_tiny --max-update 1
        --position-encoding shaw --log-format none --no-epoch-checkpoints --criterion cross_entropy"""
    runs.train(tmp_path, flags)
    stored = runs.checkpoint.read(tmp_path / "checkpoint_last.pt")["args"]
    assert stored["max_relative_length"] == stored["tokens_per_sample"] + stored["mem_len"]
    assert type(stored) is dict and stored["lr"] == [0.001]


class Seen(Exception):
    """Carries what a plug-in was given."""


def outside(base: type, method: str) -> type:
    """A subclass of *base* as a plug-in registers it, whose *method* says what it was given."""

    def tell(cls: Any, given: Any, *rest: Any, **kwargs: Any) -> Any:
        raise Seen(given)

    return type("Outside", (base,), {method: classmethod(tell), "__module__": "my_parts"})


def given_to(call: Any, *args: Any) -> Any:
    with pytest.raises(Seen) as seen:
        call(*args)
    return seen.value.args[0]


@pytest.mark.parametrize(
    "table, name, base, method",
    [
        ("fairseq.models:MODELS", "transformer_lm", TransformerLanguageModel, "build_model"),
        ("fairseq.criterions:CRITERIONS", "adaptive_loss", FairseqCriterion, "build_criterion"),
        ("fairseq.tasks:TASKS", "language_modeling", LanguageModelingTask, "setup_task"),
    ],
)
def test_a_plugin_is_given_the_flat_namespace(
    table: str, name: str, base: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fairseq.tasks import setup_task

    value = settings(runs.BASELINE)
    task = setup_task(value)
    module, attribute = table.split(":")
    parts: registry.Registry[Any] = getattr(importlib.import_module(module), attribute)
    for known in ("_parts", "_declared"):
        monkeypatch.setattr(parts, known, {key: part for key, part in getattr(parts, known).items() if key != name})
    parts.register(name)(outside(base, method))
    call = {"build_model": task.build_model, "build_criterion": task.build_criterion, "setup_task": setup_task}[method]
    assert vars(given_to(call, value)) is value.flat


def test_our_parts_take_their_settings_and_a_plugins_namespace_alike() -> None:
    from fairseq.tasks import setup_task

    value = settings(runs.BASELINE, "--optimizer adam --adam-eps 0.125")
    task = setup_task(value)
    namespace = namespace_of(value)
    for given in (value.model, namespace):
        model = TransformerLanguageModel.build_model(given, task)
        assert model.cfg == value.model
        assert FairseqAdam(given if given is namespace else value.optimizer, model.parameters()).config.adam_eps
    flat: Any = LanguageModelingTask.setup_task(namespace)  # type: ignore[arg-type]
    assert isinstance(flat, LanguageModelingTask) and flat.cfg == task.cfg and vars(flat.args) is value.flat
