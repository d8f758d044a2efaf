"""Language modelling: predict each word of a corpus from those before it."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq import config
from fairseq.config import flag
from fairseq.criterions.fairseq_criterion import FairseqCriterion, Sample
from fairseq.data.dictionary import Dictionary
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.data.iterator import EpochIterator
from fairseq.data.samplers import BlockSampler, StreamSampler, rows_per_batch
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError
from fairseq.models import BaseFairseqModel
from fairseq.settings import BREAK_MODES, CommonConfig, DataConfig
from fairseq.tasks import register_task
from fairseq.tasks.fairseq_task import FairseqTask

logger = logging.getLogger(__name__)


@dataclass
class LanguageModelingConfig:
    """Settings of language modelling."""

    sample_break_mode: str = flag(
        "none",
        "where blocks end: none (every --tokens-per-sample tokens), complete (whole lines), complete_doc (lines of "
        "one document), eos (a line a block)",
        choices=BREAK_MODES,
    )
    tokens_per_sample: int = flag(1024, "tokens in a block", low=1)
    loss_positions: str = flag(
        "full",
        "training targets: full (every position of a segment) or half (its second half, which all have context)",
        choices=("full", "half"),
    )
    streams: bool = flag(
        False, "rows continue each other from batch to batch even if the model has no memory: for fair comparisons"
    )
    shuffle_lines: bool = flag(False, "put the training text's lines in another order each epoch, then cut it")


@register_task("language_modeling", dataclass=LanguageModelingConfig)
class LanguageModelingTask(FairseqTask):
    """Next-word prediction over binarised text in ``args.data``.

    With a model that has memory, or ``--streams``, the batches are streams: row r of one batch continues row r of the
    one before.
    """

    def __init__(self, args: argparse.Namespace, dictionary: Dictionary) -> None:
        super().__init__(args)
        self.cfg = config.extract(LanguageModelingConfig, args)
        self.dictionary = dictionary

    @classmethod
    def setup_task(cls, args: argparse.Namespace, **kwargs: Any) -> LanguageModelingTask:
        folder = Path(args.data)
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; make it with fairseq-preprocess --destdir {folder}")
        return cls(args, Dictionary.load(str(folder / "dict.txt")))

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    def corpus(self, split: str) -> IndexedCorpus:
        """The tokens of *split*, memory-mapped.

        Raises:
            UserError: its files are missing or damaged, or were made with another dictionary.
        """
        corpus = IndexedCorpus(str(Path(self.args.data) / split))
        corpus.check(self.dictionary)
        return corpus

    def blocks(self, split: str, block_size: int | None = None, training: bool = False) -> TokenBlocks:
        """*split* in blocks of ``tokens_per_sample``, or of *block_size* tokens; lines are shuffled for *training*."""
        shuffled = training and self.cfg.shuffle_lines
        return TokenBlocks(
            self.corpus(split),
            block_size or self.cfg.tokens_per_sample,
            self.cfg.sample_break_mode,
            pad=self.dictionary.pad(),
            eos=self.dictionary.eos(),
            shuffle_lines=config.extract(CommonConfig, self.args).seed if shuffled else None,
        )

    def iterator(
        self,
        split: str,
        model: BaseFairseqModel,
        criterion: FairseqCriterion,
        *,
        training: bool,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> EpochIterator:
        data = config.extract(DataConfig, self.args)
        max_tokens, batch_size = data.max_tokens, data.batch_size
        if not training:
            max_tokens = data.max_tokens_valid or max_tokens
            batch_size = data.batch_size_valid or batch_size
        if max_tokens is None and batch_size is None:
            raise UserError("--max-tokens or --batch-size: one of them is needed")
        blocks = self._fitting(split, model, training, data.skip_invalid_size_inputs_valid_test)
        length = self.cfg.tokens_per_sample
        streams = self.cfg.streams or model.memory_length > 0
        longest = length if streams else int(blocks.sizes.max())
        if not training and data.max_tokens_valid is not None and data.max_tokens_valid < longest:
            raise UserError(
                f"--max-tokens-valid {data.max_tokens_valid}: {split} has blocks of {longest} tokens; raise it"
            )
        sampler: BlockSampler | StreamSampler
        if streams:
            if self.cfg.sample_break_mode != "none":
                raise UserError(
                    f"--sample-break-mode {self.cfg.sample_break_mode}: streams, which a model with memory reads, need "
                    "none"
                )
            rows = rows_per_batch(max_tokens, batch_size, length, data.required_batch_size_multiple)
            sampler = StreamSampler(len(blocks), rows, rank=rank, world_size=world_size)
        else:
            sampler = BlockSampler(
                blocks.sizes,
                max_tokens=max_tokens,
                batch_size=batch_size,
                multiple=data.required_batch_size_multiple,
                seed=config.extract(CommonConfig, self.args).seed,
                curriculum=data.curriculum,
                shuffle=training,
                by_size=self.cfg.sample_break_mode != "none",
                rank=rank,
                world_size=world_size,
            )
        shorten = self._second_half if training and self.cfg.loss_positions == "half" else _whole
        return EpochIterator(
            blocks,
            sampler,
            prepare=lambda sample: criterion.prepare(model, shorten(sample)),
            prefetch=data.num_workers if torch.device(device).type == "cuda" else 0,
            device=device,
        )

    def _second_half(self, sample: Sample) -> Sample:
        """*sample* with targets in the second half of each row alone (Al-Rfou et al. 2018; Dai et al. 2019, §4.2)."""
        target = sample["target"].clone()
        lengths = (target != self.dictionary.pad()).sum(1, keepdim=True)
        target[torch.arange(target.size(1)) < lengths // 2] = self.dictionary.pad()
        return {**sample, "target": target, "ntokens": int((lengths - lengths // 2).sum())}

    def _fitting(self, split: str, model: BaseFairseqModel, training: bool, skip: bool) -> TokenBlocks:
        """The blocks of *split* that the model can read."""
        blocks = self.blocks(split, training=training)
        limit = model.max_positions()
        keep = blocks.sizes <= (limit if limit is not None else np.iinfo(np.int32).max)
        left_out = int((~keep).sum())
        if left_out:
            if not training and not skip:
                raise UserError(
                    f"{split}: {left_out} blocks are longer than the model's {limit} positions; "
                    "--skip-invalid-size-inputs-valid-test leaves them out"
                )
            logger.warning("%s: left out %d blocks longer than %d positions", split, left_out, limit)
            blocks = blocks.select(keep)
        if len(blocks) == 0:
            raise UserError(
                f"{split}: nothing is left of this split, all blocks are longer than the model's {limit} positions; "
                "raise --max-target-positions or lower --tokens-per-sample"
            )
        return blocks


def _whole(sample: Sample) -> Sample:
    return sample
