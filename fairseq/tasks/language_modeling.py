"""Language modelling: predict each word of a corpus from those before it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fairseq.config.settings import Settings, typed_settings
from fairseq.config.shared import LanguageModelingTaskConfig
from fairseq.criterions.fairseq_criterion import FairseqCriterion
from fairseq.data.block_datasets import LMContextWindowDataset
from fairseq.data.dataset import Dataset, Sample
from fairseq.data.datasets import FairseqDataset
from fairseq.data.folders import check_split, data_folders, load_dictionary, open_corpus
from fairseq.data.indexed_dataset import IndexedCorpus, JoinedCorpus
from fairseq.data.mixture import Mixture, parse_mixture, source_names
from fairseq.data.samplers import Batching, Sampler
from fairseq.data.token_blocks import TokenBlocks, document_positions
from fairseq.dataclass import settings_of
from fairseq.errors import UserError
from fairseq.logging.figures import Figure
from fairseq.models.base import BaseFairseqModel
from fairseq.models.transformer_xl_settings import TransformerXLConfig
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.dictionary import Dictionary

logger = logging.getLogger(__name__)


class LanguageModelingTask(FairseqTask):
    """Next-word prediction over binarised text in the data folder.

    With a model that has memory, or ``--streams``, the batches are streams: row r of a batch
    continues row r of the previous batch.
    """

    config_class = LanguageModelingTaskConfig
    evaluated_by = "eval_lm"

    def __init__(
        self,
        args: Settings,
        dictionary: Dictionary,
        output_dictionary: Dictionary | None = None,
        targets: Sequence[str] | None = None,
    ) -> None:
        """Make a task whose model predicts words of *output_dictionary*, and whose examples have
        *targets*.

        Raises:
            UserError: they are other ones than the dictionary and the next word, without a
                ``load_dataset`` of the task's own.
        """
        super().__init__(args)
        self.cfg = self.typed(LanguageModelingTaskConfig)
        self.mixture = self._mixture()
        self.subsets = (*self.subsets, *self.mixture)
        self.dictionary, self.output_dictionary = dictionary, output_dictionary or dictionary
        self.targets = list(targets or ["future"])
        is_plain = self.output_dictionary is dictionary and self.targets == ["future"]
        if not is_plain and type(self).load_dataset is LanguageModelingTask.load_dataset:
            raise UserError(
                f"{type(self).__name__}: its examples have the dictionary's next words as targets; other targets or "
                "another output_dictionary need a load_dataset of its own"
            )

    # Which a plug-in's constructor may leave to these defaults.
    @functools.cached_property
    def output_dictionary(self) -> Dictionary:
        return self.dictionary

    @functools.cached_property
    def targets(self) -> list[str]:
        return ["future"]

    @property
    def target_dictionary(self) -> Dictionary:
        return self.output_dictionary

    @classmethod
    def setup_dictionary(cls, args: Any, **unused: object) -> tuple[Dictionary, Dictionary]:
        """The dictionaries of input and output, which are one; plug-ins override it."""
        return (load_dictionary(args.data_path if isinstance(args, Settings) else args.data),) * 2

    @classmethod
    def setup_task(cls, args: Settings, **kwargs: object) -> LanguageModelingTask:
        dictionary, output_dictionary = cls.setup_dictionary(args, **kwargs)
        # fairseq's arguments, as far as a plug-in's constructor names them.
        known = inspect.signature(cls).parameters
        options: dict[str, Any] = {"output_dictionary": output_dictionary, "targets": ["future"]}
        return cls(args, dictionary, **{name: value for name, value in options.items() if name in known})

    def _mixture(self) -> dict[str, tuple[Path, float]]:
        """The folders of ``--mixture`` with their shares, by short names; empty without it.

        Raises:
            UserError: the setting is malformed, another one cannot be used with it, or the folders
                have different dictionaries or tokenizers.
        """
        if not self.cfg.mixture:
            return {}
        shares = parse_mixture(self.cfg.mixture)
        first = data_folders(self.settings.data_path)
        if len(first) > 1:
            raise UserError(f"`mixture`: DATA {self.settings.data_path} is another folder each epoch; give one folder")
        for name in (*self.extensions, "save_interval_words", "save_interval_tokens"):
            if self.settings.flat.get(name):
                raise UserError(f"`{name}`: cannot be used with `mixture`; leave one of them out")
        load_dictionary(first[0], shares)
        folders = [*first, *shares]
        parts = zip(folders, [1 - sum(shares.values()), *shares.values()], strict=True)
        return dict(zip(source_names(folders), parts, strict=True))

    @property
    def reads_streams(self) -> bool:
        """Whether rows continue from batch to batch for models without memory, too."""
        return self.cfg.streams

    def batch_settings(self) -> dict[str, Any]:
        shuffled = {"shuffled_with": self.settings.common.seed} if self.cfg.shuffle_lines else {}
        # Shuffled lines depend on the seed: with another one, rows continue other text.
        return {"tokens_per_sample": self.cfg.tokens_per_sample, **shuffled}

    def corpus(self, split: str) -> IndexedCorpus | JoinedCorpus:
        """The tokens of *split* in the first data folder, left in its files.

        Raises:
            UserError: its files are missing, damaged or made with another dictionary.
        """
        # One folder, joined or not: training may read several, an analysis reads one text.
        return open_corpus(data_folders(self.settings.data_path)[0], split, self.dictionary)

    def check_folder(self, split: str, folder: Path) -> None:
        check_split(folder, split)

    def dataset(self, split: str, *, training: bool = False, folder: str | Path | None = None) -> TokenBlocks:
        shuffled = training and self.cfg.shuffle_lines
        folder = folder or data_folders(self.settings.data_path)[0]
        corpus = open_corpus(folder, split, self.dictionary, combine=self.combines(split, training))
        if training and self.cfg.document_mask and not (corpus.sizes == 1).any():
            raise UserError(
                f"`document_mask`: {folder}/{split} has no blank lines, which separate documents; preprocess a text "
                "with them, or leave the flag out"
            )
        return TokenBlocks(
            corpus,
            self.cfg.tokens_per_sample,
            self.cfg.sample_break_mode,
            pad=self.dictionary.pad(),
            eos=self.dictionary.eos(),
            shuffle_lines=self.settings.common.seed if shuffled else None,
            bos=self.dictionary.begin() if self.cfg.add_bos_token else None,
        )

    def figures(self, criterion: FairseqCriterion) -> dict[str, Figure]:
        figures = super().figures(criterion)
        for name in self.mixture:
            if f"{name}_loss" in criterion.figures():
                raise UserError(f"`mixture`: {name}_loss is a figure of the criterion; rename the folder {name}")
        return figures

    def open_split(self, split: str, folder: Path, longest: int | None, *, training: bool) -> Dataset:
        if not self.mixture:
            return super().open_split(split, folder, longest, training=training)
        sources = {name: self.dataset(split, training=training, folder=at) for name, (at, _) in self.mixture.items()}
        mixture = Mixture(
            sources,
            [share for _, share in self.mixture.values()],
            self.settings.common.seed if training else None,
        )
        if training:
            read = zip(sources.items(), mixture.counts.tolist(), mixture.shares, strict=True)
            texts = [f"{100 * share:.3g}% {name} ({n / len(blocks):.3g} times)" for (name, blocks), n, share in read]
            logger.info("an epoch reads %s", ", ".join(texts))
        return mixture

    def sampler(self, dataset: Dataset, model: BaseFairseqModel, batching: Batching) -> Sampler:
        if self.cfg.document_mask and (self.extensions or not model.reads_documents):
            raise UserError(
                "`document_mask`: needs a transformer_lm, gpt2, llama or pythia architecture, no memory, no `notes`; "
                f"{type(model).__name__} with these settings reads a row as one text; leave the flag out"
            )
        mode = self.cfg.sample_break_mode
        passage = self.cfg.passage_tokens
        if not (self.reads_streams or model.memory_length > 0):
            if passage is not None:
                raise UserError(f"`passage_tokens` {passage}: the model has no memory; leave it out or add `streams`")
            # fairseq permutes all blocks and leaves out the long ones afterwards; its order needs
            # to know which these are.
            selection = dataset.selection if isinstance(dataset, TokenBlocks) else None
            return batching.blocks(dataset.sizes, by_size=mode != "none", selection=selection)
        if self.mixture:
            raise UserError("`mixture`: a model with memory reads one text in order; leave one of them out")
        if mode != "none":
            raise UserError(f"`sample_break_mode` {mode}: models with memory and `streams` need none")
        if self.cfg.add_bos_token:
            raise UserError("`add_bos_token`: rows of models with memory and `streams` continue; leave it out")
        length = self.cfg.tokens_per_sample
        # A later stage may have longer blocks, and in passages of one block no row would continue.
        return batching.streams(len(dataset), length, 0 if passage is None else max(2, passage // length))

    def prepare(self, sample: Sample, epoch: int, *, model: BaseFairseqModel, training: bool) -> Sample:
        if self.cfg.document_mask:
            inputs = sample["net_input"]
            positions = document_positions(inputs["src_tokens"], self.dictionary.eos())
            sample = {**sample, "net_input": {**inputs, "document_positions": positions}}
        if not training or self.cfg.loss_positions == "full":
            return sample
        # Targets in the second half of each row only (Al-Rfou et al. 2018; Dai et al. 2019, §4.2).
        target = sample["target"].clone()
        lengths = (target != self.dictionary.pad()).sum(1, keepdim=True)
        # Of a short last row its own second half, so that the row has targets at all.
        target[torch.arange(target.size(1)) < lengths // 2] = self.dictionary.pad()
        return {**sample, "target": target, "ntokens": int((lengths - lengths // 2).sum())}

    def eval_lm_dataloader(
        self,
        dataset: FairseqDataset,
        max_tokens: int | None = 36000,
        batch_size: int | None = None,
        max_positions: object = None,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 1,
        data_buffer_size: int = 10,
        context_window: int = 0,
    ) -> Any:
        """The batches of *dataset* in its order, each row after *context_window* tokens of the rows
        before."""
        if context_window:
            pad = self.source_dictionary.pad()
            dataset = LMContextWindowDataset(dataset, self.cfg.tokens_per_sample, context_window, pad)
        batches = self.get_batch_iterator(
            dataset,
            max_tokens,
            batch_size,
            max_positions,
            ignore_invalid_inputs=True,
            num_shards=num_shards,
            shard_id=shard_id,
            num_workers=num_workers,
        )
        return batches.next_epoch_itr(shuffle=False)


class TruncatedBPTTLMTask(LanguageModelingTask):
    """Language modelling over rows that continue from batch to batch,
    under the name in fairseq's ``truncated_bptt``.

    The architecture ``transformer_xl`` has the example's defaults with this task; cutoffs beyond
    the dictionary are left out, as there.
    """

    @property
    def reads_streams(self) -> bool:
        return True

    def build_model(self, args: Settings, from_checkpoint: bool = False) -> BaseFairseqModel:
        settings = typed_settings(args)
        cfg, words = settings.model, len(self.dictionary)
        if isinstance(cfg, TransformerXLConfig) and cfg.cutoffs and cfg.cutoffs[-1] >= words:
            cutoffs = [cutoff for cutoff in cfg.cutoffs if cutoff < words]
            logger.info("`cutoffs`: those beyond the dictionary of %d symbols are left out", words)
            settings = settings.changed(cutoffs=cutoffs or None)
        return super().build_model(settings)


__getattr__ = settings_of(__name__, {}, LanguageModelingConfig=LanguageModelingTaskConfig)  # fairseq's names
