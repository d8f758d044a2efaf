"""Masked language modelling with notes of rare words (Wu et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq.config.registry import register_task
from fairseq.config.settings import Settings
from fairseq.criterions.fairseq_criterion import Sample
from fairseq.data.dataset import Dataset
from fairseq.data.folders import corpus_prefixes, data_folders
from fairseq.data.masking import MaskedBlocks
from fairseq.models import BaseFairseqModel
from fairseq.notes.blocks import SUBSETS, NotedBlocks
from fairseq.notes.spans import reopen_spans
from fairseq.notes.state import NoteState, dictionary_of
from fairseq.notes.words import NoteWords
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

    Attributes:
        note_words: the rare words; None if the task has only a dictionary.
    """

    kinds = (*MaskedLMTask.kinds, NoteState())
    subsets = SUBSETS

    def __init__(self, args: Settings, dictionary: Dictionary, note_words: NoteWords | None = None) -> None:
        super().__init__(args, dictionary)
        self.note_words = note_words

    @classmethod
    def setup_task(cls, args: Settings, **kwargs: Any) -> TNFMaskedLMTask:
        task = super().setup_task(args, **kwargs)
        assert isinstance(task, TNFMaskedLMTask)
        task.note_words = NoteWords.load(data_folders(task.settings.data_path)[0])
        return task

    def dataset(self, split: str, *, training: bool = False, folder: str | Path | None = None) -> Dataset:
        blocks = super().dataset(split, training=training, folder=folder)
        assert isinstance(blocks, MaskedBlocks)
        prefixes = corpus_prefixes(folder or data_folders(self.settings.data_path)[0], split, combine=training)
        return NotedBlocks(blocks, reopen_spans(prefixes, self.note_words))

    def cut_long(self, dataset: Dataset, longest: int) -> Dataset:
        assert isinstance(dataset, NotedBlocks)
        blocks = super().cut_long(dataset.blocks, longest)
        assert isinstance(blocks, MaskedBlocks)
        return NotedBlocks(blocks, dataset.spans)

    def prepare(self, sample: Sample, epoch: int, *, model: BaseFairseqModel, training: bool) -> Sample:
        return sample if dictionary_of(model) is not None else _without_spans(sample)


def _without_spans(sample: Sample) -> Sample:
    net_input = {name: value for name, value in sample["net_input"].items() if name not in ("spans", "longest_span")}
    return {**sample, "net_input": net_input}
