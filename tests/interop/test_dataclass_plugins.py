"""Parts in the style of fairseq 0.10 to 0.12: settings as dataclasses, ``self.cfg``, references to
other settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
from user_folders import user_folder

from fairseq.errors import UserError

PLUGIN = '''
import logging
import math
from dataclasses import dataclass, field
from typing import Any, List, Optional

import torch
import torch.nn.functional as F
from omegaconf import II, OmegaConf
from fairseq import metrics, utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterionConfig, label_smoothed_nll_loss,
)
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel, register_model
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from fairseq.tasks import FairseqTask, register_task
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.trainer import Trainer


@dataclass
class BagConfig(FairseqDataclass):
    """Settings of a bag of words."""

    width: int = field(default=16, metadata={"help": "width", "argparse_alias": "--bag-width"})
    pooling: ChoiceEnum(["mean", "last"]) = field(default="mean", metadata={"help": "kind of pooling"})
    input_dropout: float = field(default=0.0, metadata={"help": "dropout"})
    scales: List[float] = field(default_factory=list, metadata={"help": "factors"})
    max_target_positions: int = II("task.tokens_per_sample")
    tpu: bool = II("common.tpu")


@register_model("bag_lm", dataclass=BagConfig)
class BagLanguageModel(FairseqLanguageModel):
    @classmethod
    def build_model(cls, cfg: BagConfig, task):
        return cls(BagDecoder(cfg, task.target_dictionary))


class BagDecoder(FairseqIncrementalDecoder):
    def __init__(self, cfg, dictionary):
        super().__init__(dictionary)
        self.cfg = cfg
        self.embed_tokens = torch.nn.Embedding(len(dictionary), cfg.width, dictionary.pad())

    def extract_features(self, prev_output_tokens, encoder_out=None, incremental_state=None, **kwargs):
        x = F.dropout(self.embed_tokens(prev_output_tokens), self.cfg.input_dropout, self.training)
        steps = torch.arange(1, x.size(1) + 1, device=x.device)[:, None]
        return (x.cumsum(1) / steps if self.cfg.pooling == "mean" else x), {"cfg": self.cfg}

    def output_layer(self, features, **kwargs):
        return F.linear(features, self.embed_tokens.weight)

    def max_positions(self):
        return self.cfg.max_target_positions


@dataclass
class RankCriterionConfig(FairseqDataclass):
    sentence_avg: bool = II("optimization.sentence_avg")
    rank_k: int = field(default=5, metadata={"help": "ranks that count"})


@register_criterion("ranked", dataclass=RankCriterionConfig)
class RankCriterion(FairseqCriterion):
    def __init__(self, task, sentence_avg, rank_k):
        super().__init__(task)
        self.sentence_avg, self.rank_k = sentence_avg, rank_k

    def forward(self, model, sample, reduce=True):
        net_output = model(**sample["net_input"])
        lprobs = model.get_normalized_probs(net_output, log_probs=True).view(-1, len(self.task.dictionary))
        target = model.get_targets(sample, net_output).view(-1)
        loss = F.nll_loss(lprobs, target, ignore_index=self.padding_idx, reduction="sum")
        best = lprobs.topk(self.rank_k).indices
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        return loss, sample_size, {
            "loss": utils.item(loss.data), "ntokens": sample["ntokens"], "nsentences": sample["target"].size(0),
            "sample_size": sample_size, "hits": utils.item((best == target[:, None]).sum()),
        }

    @staticmethod
    def reduce_metrics(logging_outputs) -> None:
        loss = sum(log.get("loss", 0) for log in logging_outputs)
        ntokens = sum(log.get("ntokens", 0) for log in logging_outputs)
        metrics.log_scalar("loss", loss / ntokens / math.log(2), ntokens, round=3)
        metrics.log_scalar("hits", sum(log["hits"] for log in logging_outputs), ntokens)
        metrics.log_scalar("three", sum(3 for log in logging_outputs) / len(logging_outputs))
        metrics.log_scalar("tokens", ntokens / len(logging_outputs))
        metrics.log_scalar_sum("tokens_in_all", ntokens)
        metrics.log_scalar("root", math.sqrt(ntokens))
        if "never" in logging_outputs[0]:
            metrics.log_scalar("absent", logging_outputs[0]["never"])
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["loss"].avg))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


@register_criterion("halved_cross_entropy")
class HalvedCrossEntropy(CrossEntropyCriterion):
    def __init__(self, task, sentence_avg):
        super().__init__(task, sentence_avg)

    def compute_loss(self, model, net_output, sample):
        loss, size, log = super().compute_loss(model, net_output, sample)
        return loss / 2, size, log


@dataclass
class PatientConfig(LabelSmoothedCrossEntropyCriterionConfig):
    patience_factor: float = field(default=2.0, metadata={"help": "factor of the loss"})


@register_criterion("patient_smoothed", dataclass=PatientConfig)
class PatientSmoothed(FairseqCriterion):
    def __init__(self, task, sentence_avg, label_smoothing, patience_factor):
        super().__init__(task)
        self.eps, self.factor = label_smoothing, patience_factor

    def forward(self, model, sample, reduce=True):
        net_output = model(**sample["net_input"])
        lprobs, target = model.get_normalized_probs(net_output, log_probs=True), model.get_targets(sample, net_output)
        loss, nll = label_smoothed_nll_loss(lprobs, target, self.eps, ignore_index=self.padding_idx, reduce=reduce)
        log = {"loss": self.factor * loss.data, "nll_loss": nll.data, "ntokens": sample["ntokens"], "nsentences": 1}
        return self.factor * loss, sample["ntokens"], log


@dataclass
class PlainSGDConfig(FairseqDataclass):
    betas: Any = field(default=(0.9, 0.98), metadata={"help": "decay"})
    lr: List[float] = II("optimization.lr")


@register_optimizer("plain_sgd", dataclass=PlainSGDConfig)
class PlainSGD(FairseqOptimizer):
    def __init__(self, cfg: PlainSGDConfig, params):
        super().__init__(cfg)
        self.betas = OmegaConf.to_container(self.cfg.betas)
        self._optimizer = torch.optim.SGD(params, **self.optimizer_config)

    @property
    def optimizer_config(self):
        return {"lr": self.cfg.lr[0], "momentum": self.betas[0]}


@dataclass
class StairsConfig(FairseqDataclass):
    stair: int = field(default=2, metadata={"help": "updates of a stair"})
    total: float = II("optimization.max_update")
    lr: List[float] = II("optimization.lr")


@register_lr_scheduler("stairs", dataclass=StairsConfig)
class Stairs(FairseqLRScheduler):
    def __init__(self, cfg: StairsConfig, optimizer):
        super().__init__(cfg, optimizer)
        self.optimizer.set_lr(self.cfg.lr[0])

    def step_update(self, num_updates):
        left = 1 - (num_updates // self.cfg.stair * self.cfg.stair) / self.cfg.total
        self.optimizer.set_lr(self.cfg.lr[0] * left)
        return self.optimizer.get_lr()


@dataclass
class CountingConfig(FairseqDataclass):
    data: str = field(default="???", metadata={"help": "folder"})
    tokens_per_sample: int = field(default=8, metadata={"help": "tokens"})
    counted_word: Optional[str] = field(default=None, metadata={"help": "a word"})


class Longest:
    def __init__(self):
        self.reset()

    def reset(self):
        self.values = []

    def update(self, value):
        self.values.append(value)

    def sum(self):
        return max(self.values)


@register_task("counting_lm", dataclass=CountingConfig)
class CountingTask(LanguageModelingTask):
    def reduce_metrics(self, logging_outputs, criterion):
        super().reduce_metrics(logging_outputs, criterion)
        metrics.log_scalar("counted", len(self.cfg.counted_word), priority=5)
        metrics.log_scalar("of_every_class", torch.ones(3))
        metrics.log_derived("of_all_classes", lambda meters: float(meters["of_every_class"].avg.sum()))
        metrics.log_custom(Longest, "longest", 3)
'''
FLAGS = """--cpu --train-subset valid --valid-subset test --max-tokens 64 --seed 3 --log-format json --log-interval 1
    --required-batch-size-multiple 1 --max-update 4 --no-save --lr 0.5"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with user_folder(tmp_path_factory.mktemp("home"), "dataclass_parts", PLUGIN) as flags:
        yield flags


def test_a_whole_set_of_dataclass_parts_trains(plugin: list[Any], tmp_path: Path) -> None:
    flags = """--arch bag_lm --criterion ranked --optimizer plain_sgd --lr-scheduler stairs --task counting_lm
        --rank-k 7 --bag-width 24 --counted-word the --stair 2"""
    log = runs.train(tmp_path, plugin, FLAGS, flags)
    lines = runs.updates(log)
    assert len(lines) == 4
    assert [line["lr"] for line in lines] == [0.5, 0.25, 0.25, 0.0], "a reference to --max-update"
    assert lines[0]["wpb"] == 64 and {line["counted"] for line in lines} == {3}
    assert not {"of_every_class", "of_all_classes"} & lines[0].keys(), "an array, and what is made of it"
    assert runs.summaries(log, "test")[-1]["counted"] == 3


def test_settings_have_flags_aliases_choices_and_references(plugin: list[Any]) -> None:
    parse = [plugin, "--arch bag_lm --max-tokens 64 --tokens-per-sample 32"]
    args = runs.arguments(*parse)
    assert (args.width, args.pooling, args.scales, args.max_target_positions, args.tpu) == (16, "mean", [], 32, False)
    assert runs.arguments(*parse, "--bag-width 8 --scales 1,2 --max-target-positions 64").width == 8
    assert runs.arguments(*parse, "--scales 1,2").scales == [1.0, 2.0]
    with pytest.raises(UserError, match="--pooling first: choose from mean, last"):
        runs.arguments(*parse, "--pooling first")


def test_figures_of_reduce_metrics_reach_the_log_and_the_best_metric(plugin: list[Any], tmp_path: Path) -> None:
    flags = "--arch bag_lm --criterion ranked --tokens-per-sample 16 --best-checkpoint-metric hits"
    log = runs.train(tmp_path, plugin, FLAGS, flags)
    line = runs.updates(log)[0]
    assert line["ppl"] == pytest.approx(2 ** line["loss"], rel=1e-4) and "absent" not in line
    assert "best_hits" in runs.summaries(log, "test")[-1]
    with pytest.raises(UserError, match="--best-checkpoint-metric hit: not a figure"):
        runs.train(tmp_path, plugin, FLAGS, flags, "--best-checkpoint-metric hit")


def test_what_a_plugin_logs_is_averaged_over_updates(plugin: list[Any], tmp_path: Path) -> None:
    flags = "--arch bag_lm --criterion ranked --tokens-per-sample 16 --log-interval 2 --max-update 6 --seed 2"
    log = runs.train(tmp_path, plugin, FLAGS, flags)
    lines = [*runs.updates(log), *runs.summaries(log, "test")]
    assert len(lines) > 3
    for line in lines:
        assert line["three"] == 3 and line["tokens"] == pytest.approx(line["wpb"])
    second = runs.updates(log)[1]  # the first interval's end; update 1 has a line of its own
    assert second["tokens_in_all"] == pytest.approx(2 * second["wpb"])
    # Neither a ratio of sums nor a sum: the mean of two equal updates, whatever the interval of the
    # log.
    assert second["root"] == pytest.approx(runs.updates(log)[0]["root"], rel=1e-3)


def test_a_criterion_that_extends_ours_takes_single_settings(plugin: list[Any], tmp_path: Path) -> None:
    flags = "--arch bag_lm --tokens-per-sample 16 --optimizer sgd --max-update 1"
    halved = runs.train(tmp_path, plugin, FLAGS, flags, "--criterion halved_cross_entropy")
    whole = runs.train(tmp_path, plugin, FLAGS, flags, "--criterion cross_entropy")
    assert runs.updates(halved)[0]["gnorm"] == pytest.approx(runs.updates(whole)[0]["gnorm"] / 2, rel=1e-5)


def test_settings_may_extend_those_of_our_criterions(plugin: list[Any], tmp_path: Path) -> None:
    flags = ["--arch bag_lm --tokens-per-sample 16 --optimizer sgd --max-update 1 --criterion patient_smoothed", plugin]
    with pytest.raises(UserError, match="--label-smoothing 1.5: must be less than 1"):
        runs.arguments(*flags, "--label-smoothing 1.5 --max-tokens 64")
    log = runs.updates(runs.train(tmp_path, FLAGS, *flags, "--label-smoothing 0 --patience-factor 3"))
    assert log[0]["loss"] == pytest.approx(3 * log[0]["nll_loss"])
