"""Plug-ins that extend the task and the criterion of sentences train and resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
from sentences import NO_DROPOUT, SMALL, separable, write_dictionary, write_folders

TASKS = {
    "sentences_by_config": """
from fairseq.tasks import register_task
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

@register_task("sentences_by_config", dataclass=SentencePredictionConfig)
class Task(SentencePredictionTask):
    pass
""",
    "sentences_by_classes": """
from fairseq.tasks import register_task
from fairseq.tasks.sentence_prediction import SentencePredictionTask

@register_task("sentences_by_classes")
class Task(SentencePredictionTask):
    @classmethod
    def setup_task(cls, args, **kwargs):
        words = cls.load_dictionary(args, f"{args.data}/input0/dict.txt", source=True)
        classes = cls.load_dictionary(args, f"{args.data}/label/dict.txt", source=False)
        return cls(args, words, classes)

    def __init__(self, args, data_dictionary, label_dictionary):
        super().__init__(args, data_dictionary, label_dictionary)
        assert data_dictionary.mask() == len(data_dictionary) - 1 and args.num_classes == 2
        assert set(self.layout.labels) == {"neg", "pos"}
""",
}
CRITERIONS = {
    "share_of_loss": """
from dataclasses import dataclass, field
from fairseq.criterions import register_criterion
from fairseq.criterions.sentence_prediction import SentencePredictionConfig, SentencePredictionCriterion

@dataclass
class Config(SentencePredictionConfig):
    share: float = field(default=0.5, metadata={"help": "share of the loss"})

@register_criterion("share_of_loss", dataclass=Config)
class Share(SentencePredictionCriterion):
    def __init__(self, cfg, task):
        super().__init__(cfg, task)
        self.share = cfg.share

    def forward(self, model, sample, reduce=True):
        loss, size, logged = super().forward(model, sample, reduce)
        return loss * self.share, size, {**logged, "loss": logged["loss"] * self.share}
""",
    "named_head": """
import math
from fairseq import metrics
from fairseq.criterions import FairseqCriterion, register_criterion

@register_criterion("named_head")
class Head(FairseqCriterion):
    @staticmethod
    def add_args(parser):
        parser.add_argument("--head-name", default="sentence_classification_head")

    def forward(self, model, sample, reduce=True):
        inputs = {**sample["net_input"], "features_only": True, "classification_head_name": self.args.head_name}
        logits, _ = model(**inputs)
        targets = model.get_targets(sample, [logits]).view(-1)
        loss = logits.float().log_softmax(-1).gather(1, targets[:, None]).neg().sum()
        count = len(targets)
        return loss, count, {"loss": loss.data, "ntokens": count, "nsentences": count, "sample_size": count}

    @staticmethod
    def reduce_metrics(outputs):
        bits = sum(one["loss"] for one in outputs) / math.log(2)
        metrics.log_scalar("loss", bits / sum(one["sample_size"] for one in outputs))
""",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = write_dictionary(tmp_path_factory.mktemp("classes") / "home")
    for split, seed in (("train", 1), ("valid", 2)):
        texts, labels = zip(*separable(seed, 40), strict=True)
        columns = {"input0": list(texts), "label": ["pos" if label else "neg" for label in labels]}
        write_folders(home / "data", split, columns, home)
    return home / "data"


def losses(data: Path, folder: Path, source: str, name: str, flags: str) -> list[float]:
    """The losses of three updates, the last after a restart."""
    plugin = folder / f"plugin_{name}"
    plugin.mkdir()
    (plugin / "__init__.py").write_text(source)
    # All rows in a batch: their order, which is fairseq's for plug-ins, does not count.
    every = ["--user-dir", plugin, f"{SMALL} {NO_DROPOUT} --num-classes 2 --batch-size 40 {flags}"]
    first = runs.train(folder / "saved", *every, "--max-update 2", data=data)
    return runs.losses(first) + runs.losses(runs.train(folder / "saved", *every, "--max-update 3", data=data))


@pytest.fixture(scope="module")
def built_in(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(data, tmp_path_factory.mktemp("built_in"), "", "none", "")


@pytest.mark.parametrize("name", TASKS)
def test_tasks_have_the_losses_of_the_built_in_one(
    name: str, data: Path, built_in: list[float], tmp_path: Path
) -> None:
    assert losses(data, tmp_path, TASKS[name], name, f"--task {name}") == pytest.approx(built_in, rel=1e-4)


@pytest.mark.parametrize("name, flags, share", [("share_of_loss", "--share 0.25", 0.25), ("named_head", "", 1.0)])
def test_criterions_take_the_settings_and_the_head(
    name: str, flags: str, share: float, data: Path, built_in: list[float], tmp_path: Path
) -> None:
    found = losses(data, tmp_path, CRITERIONS[name], name, f"{flags} --criterion {name}")
    assert found[0] == pytest.approx(share * built_in[0], rel=1e-4) and len(set(found)) == 3
