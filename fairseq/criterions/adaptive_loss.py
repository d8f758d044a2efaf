"""The loss of a model with adaptive softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fairseq.config.fields import flag
from fairseq.config.registry import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyConfig, CrossEntropyCriterion
from fairseq.criterions.fairseq_criterion import Loss, Sample, TrainedModel
from fairseq.errors import UserError
from fairseq.modules.adaptive_softmax import BandedSoftmax


@dataclass(frozen=True)
class AdaptiveCriterionConfig(CrossEntropyConfig):
    """Settings of the adaptive loss."""

    adaptive_loss_legacy_padding: bool = flag(False, "fairseq's padding bug: one word of each tail band untrained")


@register_criterion("adaptive_loss", dataclass=AdaptiveCriterionConfig)
class AdaptiveLoss(CrossEntropyCriterion):
    """Negative log-likelihood through an adaptive softmax (Grave et al. 2017), each band over its own words."""

    def __init__(self, task: Any, sentence_avg: bool, adaptive_loss_legacy_padding: bool = False) -> None:
        super().__init__(task, sentence_avg)
        self.band_padding = adaptive_loss_legacy_padding

    def compute_loss(self, model: TrainedModel, net_output: Any, sample: Sample) -> Loss:
        # Two bounds are one band: such a softmax is a full one.
        if not isinstance(model.output_layer, BandedSoftmax) or len(model.output_layer.bounds) == 2:
            raise UserError(
                "`criterion` adaptive_loss: the model's softmax has no bands; use `criterion` cross_entropy"
            )
        return super().compute_loss(model, net_output, sample)
