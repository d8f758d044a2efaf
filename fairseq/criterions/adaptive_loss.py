"""Names that fairseq has in this module."""

from fairseq.config.shared import AdaptiveCriterionConfig
from fairseq.criterions.cross_entropy import AdaptiveLoss as AdaptiveLoss
from fairseq.dataclass import extendable

AdaptiveLossConfig = extendable("AdaptiveLossConfig", AdaptiveCriterionConfig)
