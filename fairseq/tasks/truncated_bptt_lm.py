"""fairseq's name for language modelling with memory, in its example ``truncated_bptt``."""

from __future__ import annotations

import logging

from fairseq.config.registry import register_task
from fairseq.config.settings import Settings, typed_settings
from fairseq.models import BaseFairseqModel
from fairseq.models.transformer_xl import TransformerXLConfig
from fairseq.tasks.language_modeling import LanguageModelingTask, LanguageModelingTaskConfig

logger = logging.getLogger(__name__)


@register_task("truncated_bptt_lm", dataclass=LanguageModelingTaskConfig)
class TruncatedBPTTLMTask(LanguageModelingTask):
    """Language modelling over rows that continue from batch to batch.

    The architecture ``transformer_xl`` has the example's defaults with this task; cutoffs beyond the dictionary are
    left out, as there.
    """

    @property
    def reads_streams(self) -> bool:
        return True

    def build_model(self, args: Settings) -> BaseFairseqModel:
        settings = typed_settings(args)
        cfg, words = settings.model, len(self.dictionary)
        if isinstance(cfg, TransformerXLConfig) and cfg.cutoffs and cfg.cutoffs[-1] >= words:
            cutoffs = [cutoff for cutoff in cfg.cutoffs if cutoff < words]
            logger.info("`cutoffs`: those beyond the dictionary of %d symbols are left out", words)
            settings = settings.changed(cutoffs=cutoffs or None)
        return super().build_model(settings)
