"""Settings of the criterions. Nothing here imports torch: command lines are parsed without it."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import Config, flag
from fairseq.config.shared import MeanConfig

HEAD = "sentence_classification_head"  # of an encoder


@dataclass(frozen=True)
class NoSettings(Config):
    """Settings of a criterion that has none."""


@dataclass(frozen=True)
class CrossEntropyConfig(MeanConfig):
    """Settings of the cross entropy."""


@dataclass(frozen=True)
class LabelSmoothedCrossEntropyConfig(CrossEntropyConfig):
    """Settings of the label-smoothed cross entropy."""

    label_smoothing: float = flag(0.0, "probability mass spread over all words", low=0, below=1)


@dataclass(frozen=True)
class ElectraLossConfig(Config):
    """Settings of ELECTRA's loss."""

    discriminator_weight: float = flag(50.0, "weight of the discriminator's loss", low=0)


@dataclass(frozen=True)
class SentenceRankingCriterionConfig(Config):
    """Settings of the ranking loss."""

    ranking_head_name: str = flag(HEAD, "name of the head that scores a sentence", metavar="NAME")
    save_predictions: str | None = flag(None, "file for the choices of validation", metavar="FILE", stored=False)
