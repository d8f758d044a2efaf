"""Parts from outside the package are given the namespace, and are the classes that they were."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch

from fairseq.config import registry
from fairseq.config.settings import training_settings
from fairseq.criterions import FairseqCriterion, LegacyFairseqCriterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.optim import build_optimizer
from fairseq.optim.adam import FairseqAdam
from fairseq.tasks import setup_task
from fairseq.tasks.language_modeling import LanguageModelingTask


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a test registers stays."""
    for name in ("MODELS", "ARCHITECTURES", "TASKS", "CRITERIONS", "OPTIMIZERS"):
        parts: registry.Registry[Any] = getattr(registry, name)
        monkeypatch.setattr(parts, "_parts", {**parts.parts()})


def test_a_model_is_built_from_the_namespace_and_its_settings_are_typed_all_the_same() -> None:
    given = []

    @registry.register_model("given_lm")
    class Given(TransformerLanguageModel):
        @classmethod
        def build_model(cls, args: Any, task: Any) -> Any:
            given.append(args)
            return super().build_model(args, task)

    registry.register_model_architecture("given_lm", "given_lm")(registry.ARCHITECTURES["transformer_lm_tiny"].fill)
    settings = training_settings(runs.arguments("--arch given_lm --tokens-per-sample 16 --max-tokens 64"))
    task = setup_task(settings)
    model = task.build_model(settings)
    assert [vars(each) for each in given] == [settings.flat] and isinstance(model, Given)
    assert isinstance(settings.model, TransformerLMConfig) and settings.model == model.cfg
    assert TransformerLanguageModel.settings_of(settings) is settings.model, "the base class stays as it was"


def test_an_optimizer_that_extends_ours_may_lack_settings_of_ours() -> None:
    @registry.register_optimizer("calm_adam")
    class CalmAdam(FairseqAdam):
        def __init__(self, args: Any, params: Any) -> None:
            super().__init__(args, params)
            self.calm = args.calm

    optimizer = build_optimizer(
        Namespace(optimizer="calm_adam", lr=[0.1], calm=True, no_apex=True), [torch.nn.Parameter(torch.zeros(2))]
    )
    assert isinstance(optimizer, CalmAdam) and optimizer.calm and optimizer.get_lr() == 0.1


@pytest.mark.parametrize("base, own", [(FairseqCriterion, True), (CrossEntropyCriterion, False)])
def test_a_criterion_with_its_own_forward_is_called_through_it(base: Any, own: bool) -> None:
    def forward(self: Any, model: Any, sample: Any, reduce: bool = True) -> Any:
        return torch.tensor(5.0), 1, {"seen": sample}

    part = type("Part", (base,), {"__module__": "my_parts", **({"forward": forward} if own else {})})
    made = part(None, *([False] if base is CrossEntropyCriterion else []))
    assert made.carries_state is not own
    if own:
        loss, extra = made.step(None, {"nsentences": 1}, {"memory": None})
        assert loss[0] == 5 and loss[2] == {"seen": {"nsentences": 1}} and extra == {}


def test_a_path_that_no_checkpoint_stores_is_none_for_a_plugin() -> None:
    registry.register_criterion("writing_loss")(
        type("Loss", (LegacyFairseqCriterion,), {"__module__": "my_parts", "add_args": lambda parser: None})
    )
    settings = training_settings(runs.arguments(runs.BASELINE, "--criterion writing_loss"))
    settings.flat.pop("save_predictions", None)
    task: Any = setup_task(settings)
    assert task.build_criterion(settings).args.save_predictions is None


def test_a_class_has_one_behaviour_whether_it_is_registered_or_not() -> None:
    class Loss(LegacyFairseqCriterion):
        def __init__(self, args: Any, task: Any) -> None:
            super().__init__(args, task)

    class Model(TransformerLanguageModel):
        pass

    task = SimpleNamespace(source_dictionary=None)
    before = Loss.__mro__, Model.__mro__, Loss("settings", task).args
    registry.register_criterion("legacy_loss")(Loss)
    registry.register_model("plain_lm")(Model)
    assert (Loss.__mro__, Model.__mro__, Loss("settings", task).args) == before and before[2] == "settings"
    assert Loss("settings", task).task is task


def test_a_task_registered_under_two_names_is_given_the_namespace_and_reads_all_of_it_in_cfg() -> None:
    class Both(LanguageModelingTask):
        config_class = None

        def __init__(self, args: Any, dictionary: Any) -> None:
            super().__init__(args, dictionary)
            self.given = args

    for name in ("one", "other"):
        registry.register_task(name)(Both)
    settings = training_settings(runs.arguments(runs.BASELINE, "--task other"))
    task: Any = setup_task(settings)
    assert vars(task.given) is settings.flat and vars(task.args) is settings.flat
    assert task.cfg.sample_break_mode == "none" and task.cfg.clip_norm == settings.flat["clip_norm"]


def test_an_architecture_with_the_name_of_one_of_ours_is_refused() -> None:
    from fairseq.config.registry import register_model_architecture

    with pytest.raises(ValueError, match="^architecture 'transformer_lm_big' is registered already; leave yours out"):
        register_model_architecture("transformer_lm", "transformer_lm_big")(lambda args: None)


def test_an_architecture_that_is_imported_under_two_names_is_one(tmp_path: Path) -> None:
    code = """
from fairseq.config.registry import register_model_architecture

@register_model_architecture("transformer_lm", "twice_imported")
def twice_imported(args):
    args.decoder_layers = getattr(args, "decoder_layers", 1)
"""
    (tmp_path / "part.py").write_text(code)
    for name in ("part_of_a_folder", "part_of_a_package"):
        spec = importlib.util.spec_from_file_location(name, tmp_path / "part.py")
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert registry.ARCHITECTURES["twice_imported"].complete({}) == {"decoder_layers": 1}
