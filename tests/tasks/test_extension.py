"""An extension changes data and model of a task from outside; without its switch nothing of it is
there."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import runs

from fairseq import checkpoint
from fairseq.config.fields import flag
from fairseq.config.registry import EXTENSIONS, TASKS, Registry
from fairseq.config.shared import LanguageModelingTaskConfig
from fairseq.errors import UserError
from fairseq.hub import load_model

FLAGS = f"{runs.BASELINE} --criterion cross_entropy --max-update 2 --no-epoch-checkpoints"


@dataclass(frozen=True)
class ShoutConfig:
    """Settings of louder embeddings."""

    shout: bool = flag(False, "louder embeddings")
    shout_factor: float = flag(2.0, "factor of the embeddings", above=0)

    @staticmethod
    def extends(task):
        return task.config_class is LanguageModelingTaskConfig


class Shout:
    """Embeddings times a number, and the losses over tokens with even ids."""

    config_class = ShoutConfig
    decisive_settings = ("shout_factor",)
    loading_settings = ()
    kinds = ()
    subsets = ("even",)

    def __init__(self, task):
        self.task = task

    @staticmethod
    def extend_model(model, cfg, task):
        model.decoder.embed_scale *= cfg.shout_factor

    @staticmethod
    def strip_for_inference(args, parameters):
        return {name: value for name, value in args.items() if "shout" not in name}, parameters

    @staticmethod
    def eval_overrides(args):
        return args

    def extend_dataset(self, dataset, model, split, folder, *, training):
        batch = dataset.batch
        dataset.batch = lambda rows: (sample := batch(rows)) | {"subsets": {"even": sample["target"] % 2 == 0}}
        return dataset


@pytest.fixture
def shout(monkeypatch):
    # Tasks of other tests' plug-ins stay registered; messages would name them.
    ours = {name: task for name, task in TASKS.parts().items() if task.__module__.startswith("fairseq.")}
    monkeypatch.setattr(TASKS, "_parts", ours)
    EXTENSIONS.parts()
    EXTENSIONS.replace("shout", Shout)
    yield
    del EXTENSIONS._parts["shout"]


def test_an_extension_changes_model_losses_and_settings_where_it_is_switched_on(shout, tmp_path):
    plain = runs.train(tmp_path / "plain", FLAGS)
    loud = runs.train(tmp_path / "loud", FLAGS, "--shout --shout-factor 3")
    assert runs.losses(plain)[0] != runs.losses(loud)[0]
    assert runs.summaries(loud, "test")[-1]["even_loss"] > 0 and "even_loss" not in runs.summaries(plain, "test")[-1]
    files = {name: tmp_path / name / "checkpoint_last.pt" for name in ("plain", "loud")}
    stored = {name: checkpoint.read(file)["args"] for name, file in files.items()}
    assert stored["loud"]["shout_factor"] == 3 and not [name for name in stored["plain"] if "shout" in name]
    scale = load_model(files["loud"], runs.DATA)[0].decoder.embed_scale
    assert scale == load_model(files["plain"], runs.DATA)[0].decoder.embed_scale, "a finished model is not extended"
    with pytest.raises(UserError, match=r"^--shout-factor 2\.0: .* was trained with 3\.0, "):
        runs.train(tmp_path / "loud", FLAGS, "--shout")


def test_settings_of_an_extension_need_its_switch_and_its_task(shout):
    with pytest.raises(UserError, match="^--shout-factor: has no effect without --shout; add it$"):
        runs.arguments(FLAGS, "--shout-factor 3")
    with pytest.raises(UserError, match="^--shout: belongs to --task .*language_modeling, truncated_bptt_lm, not to "):
        runs.arguments("--task masked_lm --arch bert_tiny --criterion masked_lm --shout")


def test_a_declared_part_is_imported_where_it_is_used(tmp_path, monkeypatch):
    registry: Registry[type] = Registry("dish", "--dish")
    registry.declare("soup", "soup_of_a_test:Soup", ShoutConfig)
    (tmp_path / "soup_of_a_test.py").write_text("Soup = int\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(registry) == ["soup"] and "stew" not in registry and "soup_of_a_test" not in sys.modules
    assert registry.declaration("soup").config_class is ShoutConfig
    with pytest.raises(UserError, match="--dish sop: no such dish; did you mean soup"):
        registry["sop"]
    assert "soup_of_a_test" not in sys.modules
    assert registry["soup"] is int and sys.modules.pop("soup_of_a_test")
