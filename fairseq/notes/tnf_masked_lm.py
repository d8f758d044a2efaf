"""Masked language modelling with notes of rare words (Wu et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.registry import register_task
from fairseq.config.settings import Settings
from fairseq.notes.extension import NAME, Notes
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from fairseq.text.dictionary import Dictionary


@dataclass(frozen=True)
class TNFMaskedLMConfig(MaskedLMConfig):
    """Settings of masked language modelling with notes."""


@register_task("tnf_masked_lm", dataclass=TNFMaskedLMConfig)
class TNFMaskedLMTask(MaskedLMTask):
    """Prediction of chosen tokens by an encoder that reads notes of rare words, and takes new ones.

    The data folder was made with ``fairseq-preprocess --notes``. Batches and chosen tokens equal those of
    ``masked_lm``; models without notes can be trained and validated on this task, too.
    """

    def __init__(self, args: Settings, dictionary: Dictionary) -> None:
        super().__init__(args, dictionary)
        self.extend(NAME, Notes(self))
