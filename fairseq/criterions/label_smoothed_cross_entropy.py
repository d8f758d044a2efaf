"""Names that fairseq has in this module."""

from fairseq.criterions import cross_entropy
from fairseq.criterions.cross_entropy import LabelSmoothedCrossEntropyCriterion as LabelSmoothedCrossEntropyCriterion
from fairseq.criterions.cross_entropy import label_smoothed_nll_loss as label_smoothed_nll_loss

LabelSmoothedCrossEntropyCriterionConfig = cross_entropy.LabelSmoothedCrossEntropyCriterionConfig
