"""Settings of this package's parts under fairseq's names, as dataclasses that a plug-in's settings can extend."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from fairseq.config.shared import AdaptiveCriterionConfig
from fairseq.criterions.cross_entropy import CrossEntropyConfig, LabelSmoothedCrossEntropyConfig
from fairseq.interop.fairseq.dataclass import FairseqDataclass
from fairseq.models.architectures.transformer_lm import PLAIN
from fairseq.models.lstm_lm import LSTMLMConfig
from fairseq.models.transformer_lm import TransformerLMConfig
from fairseq.optim.adam import AdamConfig
from fairseq.optim.lr_scheduler.cycles import CosineConfig, TriangularConfig
from fairseq.optim.lr_scheduler.decays import (
    FixedConfig,
    InverseSqrtConfig,
    PolynomialDecayConfig,
    ReduceLROnPlateauConfig,
    TriStageConfig,
)
from fairseq.optim.sgd import NAGConfig
from fairseq.tasks.language_modeling import LanguageModelingTaskConfig
from fairseq.tasks.masked_lm import MaskedLMTaskConfig
from fairseq.tasks.sentence_prediction import SentencePredictionTaskConfig


def extendable(name: str, config: type, **defaults: Any) -> type:
    """A dataclass called *name* with the fields of *config*, which is frozen and so cannot be extended itself.

    *defaults* are the defaults of fairseq's dataclass that differ.
    """
    hints = typing.get_type_hints(config)
    fields = []
    for field in dataclasses.fields(config):
        default = (
            # Fields are copied: a `Field` belongs to the class that it was made for.
            dataclasses.field(default=defaults.get(field.name, field.default), metadata=field.metadata)
            if field.default_factory is dataclasses.MISSING
            else dataclasses.field(default_factory=field.default_factory, metadata=field.metadata)
        )
        fields.append((field.name, hints[field.name], default))
    return dataclasses.make_dataclass(name, fields, bases=(FairseqDataclass,), namespace={"__doc__": config.__doc__})


_CONFIGS: dict[str, type] = {
    "AdaptiveLossConfig": AdaptiveCriterionConfig,
    "CosineLRScheduleConfig": CosineConfig,
    "CrossEntropyCriterionConfig": CrossEntropyConfig,
    "FairseqAdamConfig": AdamConfig,
    "FairseqNAGConfig": NAGConfig,
    "FixedLRScheduleConfig": FixedConfig,
    "InverseSquareRootLRScheduleConfig": InverseSqrtConfig,
    "LabelSmoothedCrossEntropyCriterionConfig": LabelSmoothedCrossEntropyConfig,
    "LanguageModelingConfig": LanguageModelingTaskConfig,
    "LSTMLanguageModelConfig": LSTMLMConfig,
    "MaskedLMConfig": MaskedLMTaskConfig,
    "PolynomialDecayLRScheduleConfig": PolynomialDecayConfig,
    "ReduceLROnPlateauLRScheduleConfig": ReduceLROnPlateauConfig,
    "SentencePredictionConfig": SentencePredictionTaskConfig,
    "TriangularLRScheduleConfig": TriangularConfig,
    "TriStageLRScheduleConfig": TriStageConfig,
}
globals().update({name: extendable(name, config) for name, config in _CONFIGS.items()})
TransformerLanguageModelConfig = extendable("TransformerLanguageModelConfig", TransformerLMConfig, **PLAIN)
