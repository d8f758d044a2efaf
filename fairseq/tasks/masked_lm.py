"""Masked language modelling: prediction of chosen tokens from all others."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from fairseq.config.settings import Settings, typed_settings
from fairseq.data.dataset import Dataset
from fairseq.data.folders import check_split, data_folders, load_dictionary, open_corpus
from fairseq.data.masking import MaskedBlocks, Masking, special_symbols, word_parts, word_rule
from fairseq.data.samplers import Batching, Sampler
from fairseq.data.token_blocks import TokenBlocks
from fairseq.dataclass import settings_of
from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.tasks.fairseq_task import FairseqTask, check_symbols
from fairseq.tasks.settings import MaskedLMTaskConfig
from fairseq.text.dictionary import Dictionary


class MaskedLMTask(FairseqTask):
    """Prediction of chosen tokens of binarised text in the data folder.

    Rows begin with ``<s>``, and ``<mask>`` is added to the dictionary as its last symbol, both as
    in fairseq; the data folder is unchanged.
    """

    config_class = MaskedLMTaskConfig

    def __init__(self, args: Settings, dictionary: Dictionary) -> None:
        super().__init__(args)
        self.cfg = self.typed(MaskedLMTaskConfig)
        self.dictionary = dictionary
        self.word_rule = word_rule(dictionary) if self.cfg.mask_whole_words else None
        # An imported vocabulary has its own mask symbol, or none.
        if dictionary.nspecial:
            dictionary.add_mask()

    @classmethod
    def setup_task(cls, args: Settings, **kwargs: object) -> MaskedLMTask:
        return cls(args, load_dictionary(typed_settings(args).data_path))

    def batch_settings(self) -> dict[str, Any]:
        return {"tokens_per_sample": self.cfg.tokens_per_sample}

    @functools.cached_property
    def mask_idx(self) -> int:
        """The id of the symbol that stands for a masked token."""
        return self.dictionary.index("<mask>")

    def check_folder(self, split: str, folder: Path) -> None:
        check_split(folder, split)

    def dataset(self, split: str, *, training: bool = False, folder: str | Path | None = None) -> Dataset:
        folder = folder or data_folders(self.settings.data_path)[0]
        corpus = open_corpus(folder, split, self.dictionary, combine=self.combines(split, training))
        blocks = TokenBlocks(
            # One less: the begin symbol is put before each block.
            corpus,
            self.cfg.tokens_per_sample - 1,
            self.cfg.sample_break_mode,
            pad=self.dictionary.pad(),
            eos=self.dictionary.eos(),
        )
        return MaskedBlocks(blocks, self.masking(), self.dictionary.bos(), fixed=not training)

    def open_split(self, split: str, folder: Path, longest: int | None, *, training: bool) -> Dataset:
        """Lines longer than a row are cut; fairseq leaves them out."""
        dataset = super().open_split(split, folder, longest, training=training)
        if longest is None:
            return dataset
        assert isinstance(dataset, MaskedBlocks)
        # Blocks of more than one line that are too long
        # are a mistake in --tokens-per-sample, which is reported.
        return dataset.cut_long(max(longest, self.cfg.tokens_per_sample))

    def masking(self) -> Masking:
        """Return the masking of the settings; raise UserError if the dictionary lacks a symbol, or
        has no words."""
        check_symbols(self.dictionary, "masked_lm", "mask", "bos", "pad")
        special = special_symbols(self.dictionary)
        if special.all():
            raise UserError(f"{self.dictionary.path or 'dict.txt'}: no words; make the dictionary again")
        counts = np.where(special, 0.0, self.dictionary.count) if self.cfg.freq_weighted_replacement else None
        if counts is not None and not counts.any():
            raise UserError(
                f"`freq_weighted_replacement`: {self.dictionary.path or 'dict.txt'} counts no word; leave it out"
            )
        continues, joins = word_parts(self.dictionary, self.word_rule) if self.cfg.mask_whole_words else (None, None)
        return Masking(
            seed=self.settings.common.seed,
            prob=self.cfg.mask_prob,
            leave_prob=self.cfg.leave_unmasked_prob,
            random_prob=self.cfg.random_token_prob,
            mask=self.dictionary.mask(),
            special=special,
            continues=continues,
            joins=joins,
            counts=counts,
        )

    def sampler(self, dataset: Dataset, model: BaseFairseqModel, batching: Batching) -> Sampler:
        return batching.blocks(dataset.sizes, by_size=self.cfg.sample_break_mode != "none")


__getattr__ = settings_of(__name__, {}, MaskedLMConfig=MaskedLMTaskConfig)  # fairseq's names
