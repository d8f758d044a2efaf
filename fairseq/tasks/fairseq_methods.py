"""Methods of tasks that fairseq calls, and that scripts and plug-ins call and override."""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq.config.namespaces import namespace_of
from fairseq.config.settings import Settings
from fairseq.criterions.fairseq_criterion import Loss, log_aggregated, log_figures, logs_itself
from fairseq.data import datasets as data_sets
from fairseq.data import encoders
from fairseq.data.data_utils import batch_by_size, filter_by_size, numpy_seed
from fairseq.data.dataset import Sample
from fairseq.data.folders import data_folders
from fairseq.data.glue import TableLayout
from fairseq.data.iterators import EpochBatchIterator
from fairseq.errors import UserError
from fairseq.system import deferred
from fairseq.text.dictionary import Dictionary

logger = logging.getLogger(__name__)


class FairseqMethods:
    """What :class:`~fairseq.tasks.fairseq_task.FairseqTask` has of fairseq beside what this
    package's trainer calls.

    Attributes:
        args, cfg: the flat namespace of all settings, where a task sets no others.
        datasets: what :meth:`load_dataset` stores, by split.
    """

    settings: Settings
    dataset: Any
    source_dictionary: Any
    target_dictionary: Any

    @functools.cached_property  # which a task may set
    def args(self) -> Namespace:
        return namespace_of(self.settings)

    @functools.cached_property
    def cfg(self) -> Any:
        return namespace_of(self.settings)

    state: Any = None

    @functools.cached_property
    def dataset_to_epoch_iter(self) -> dict[Any, Any]:
        # Copies of fairseq's methods look here first.
        return {}

    @functools.cached_property
    def datasets(self) -> dict[str, Any]:
        return {}

    @functools.cached_property
    def layout(self) -> TableLayout:
        """The classes or scores of a plug-in's task of sentences, for the criterion; AttributeError
        if it is none."""
        settings = self.settings.flat
        if "num_classes" not in settings:
            raise AttributeError(f"{type(self).__name__} has no classes")
        if settings.get("regression_target"):
            return TableLayout((), labels=(), metrics=("pearson", "spearman"), scores=max(1, settings["num_classes"]))
        return TableLayout((), labels=tuple(map(str, range(settings["num_classes"]))))

    @classmethod
    def load_dictionary(cls, filename: str) -> Dictionary:
        """The dictionary in the file *filename*."""
        return Dictionary.load(filename)

    def load_dataset(self, split: str, combine: bool = False, **options: object) -> None:
        """Put the examples of *split* into ``self.datasets``."""
        self.datasets[split] = self.dataset(split, training=combine)

    def get_batch_iterator(
        self,
        dataset: Any,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        max_positions: object = None,
        ignore_invalid_inputs: bool = False,
        required_batch_size_multiple: int = 1,
        seed: int = 1,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        disable_iterator_cache: bool = False,
        skip_remainder_batch: bool = False,
        grouped_shuffling: bool = False,
        update_epoch_batch_itr: bool = False,
    ) -> EpochBatchIterator:
        """The batches of *dataset*, examples in its order, for training and the caller's loops.

        Raises:
            UserError: an example is longer than *max_positions* or *max_tokens*, without
                *ignore_invalid_inputs*.
        """
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        with numpy_seed(seed):
            # A plug-in's dataset may have the few methods that this package asks for.
            indices = dataset.ordered_indices() if hasattr(dataset, "ordered_indices") else np.arange(len(dataset))
        if max_positions is not None:
            indices = self.filter_indices_by_size(indices, dataset, max_positions, ignore_invalid_inputs)
        limits = (max_tokens, max_sentences, required_batch_size_multiple)
        if hasattr(dataset, "batch_by_size"):
            names = ("max_tokens", "max_sentences", "required_batch_size_multiple")
            batches = dataset.batch_by_size(indices, **dict(zip(names, limits, strict=True)))
        else:
            batches = batch_by_size(indices, dataset.num_tokens, None, *limits)
        return EpochBatchIterator(
            dataset,
            dataset.collater,
            batches,
            seed,
            num_shards,
            shard_id,
            num_workers,
            epoch,
            skip_remainder_batch=skip_remainder_batch,
        )

    def filter_indices_by_size(
        self: object,
        indices: np.ndarray,
        dataset: Any,
        max_positions: object = None,
        ignore_invalid_inputs: bool = False,
    ) -> np.ndarray:
        """The *indices* of examples of *dataset* that are not longer than *max_positions*.

        Raises:
            UserError: there are others, without *ignore_invalid_inputs*.
        """
        if not hasattr(dataset, "filter_indices_by_size"):
            return filter_by_size(indices, dataset, max_positions, not ignore_invalid_inputs)
        fitting, ignored = dataset.filter_indices_by_size(indices, max_positions)
        if len(ignored):
            if not ignore_invalid_inputs:
                size = dataset.size(ignored[0])
                raise UserError(
                    f"example {ignored[0]} has {size} tokens, more than {max_positions}; "
                    "`skip_invalid_size_inputs_valid_test` leaves such examples out"
                )
            logger.warning("left out %d examples longer than %s, such as %s", len(ignored), max_positions, ignored[:10])
        return fitting

    def can_reuse_epoch_itr(self, dataset: object) -> bool:
        """Whether the batches of *dataset* are the same in every epoch."""
        return bool(getattr(dataset, "can_reuse_epoch_itr_across_epochs", False))

    def has_sharded_data(self, split: str) -> bool:
        """Whether epochs read several data folders in turn."""
        return len(data_folders(self.settings.data_path)) > 1

    def max_positions(self) -> object:
        """The most tokens of an example; None: as many as the model takes."""
        return None

    def begin_epoch(self, epoch: int, model: object) -> None:
        """Do what precedes an epoch of training; plug-ins override it."""

    def begin_valid_epoch(self, epoch: int, model: object) -> None:
        """Do what precedes a validation; plug-ins override it."""

    def train_step(
        self,
        sample: Sample,
        model: nn.Module,
        criterion: nn.Module,
        optimizer: Any,
        update_num: int = 0,
        ignore_grad: bool = False,
    ) -> Loss:
        """Give the loss on *sample* to ``optimizer.backward``; return loss, sample size and log."""
        model.train()
        loss, sample_size, log = criterion(model, sample)
        # Not left out: all parameters get gradients, of zero, as other processes expect.
        optimizer.backward(loss * 0 if ignore_grad else loss)
        return loss, sample_size, log

    def valid_step(self, sample: Sample, model: nn.Module, criterion: nn.Module) -> Loss:
        """Loss, sample size and log of *sample*."""
        model.eval()
        with torch.no_grad():
            return criterion(model, sample)

    def optimizer_step(self, optimizer: Any, model: object, update_num: int) -> None:
        """Make the step of *optimizer*, in a loop of the caller's own."""
        optimizer.step()

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint holds of the task: nothing; plug-ins override it."""
        return {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Go on from :meth:`state_dict`; plug-ins override it."""

    def get_interactive_tokens_and_lengths(
        self: Any, lines: Sequence[str], encode_fn: Callable[[str], str]
    ) -> tuple[list[Tensor], list[int]]:
        """The ids of *lines* after *encode_fn*, and their numbers."""
        tokens = [
            self.source_dictionary.encode_line(encode_fn(line), add_if_not_exist=False, line_tokenizer=str.split).long()
            for line in lines
        ]
        return tokens, [row.numel() for row in tokens]

    def logging_outputs_can_be_summed(self, criterion: Any) -> bool:
        """Whether outputs may be summed before they are reduced."""
        return bool(type(criterion).logging_outputs_can_be_summed())

    def aggregate_logging_outputs(self, logging_outputs: object, criterion: Any) -> Any:
        """The figures of outputs, in the manner of fairseq before 0.8; plug-ins override it."""
        return type(criterion).aggregate_logging_outputs(logging_outputs)

    def reduce_metrics(self, logging_outputs: Any, criterion: Any) -> None:
        """Log the figures of *logging_outputs*, as *criterion* defines them."""
        if type(self).aggregate_logging_outputs is not FairseqMethods.aggregate_logging_outputs:
            log_aggregated(self.aggregate_logging_outputs(logging_outputs, criterion))
        elif logs_itself(type(criterion)):
            type(criterion).reduce_metrics(logging_outputs)
        else:
            log_figures(criterion.figures(), logging_outputs)

    def inference_step(
        self,
        generator: Any,
        models: Sequence[object],
        sample: Mapping[str, Any],
        prefix_tokens: Tensor | None = None,
        **options: Any,
    ) -> list[list[dict[str, Any]]]:
        """The hypotheses of each row of *sample*, which begin with *prefix_tokens*, or else with
        its ``src_tokens``."""
        return generator.generate(models, sample, prefix_tokens=prefix_tokens, **options)

    def build_dataset_for_inference(
        self, src_tokens: Sequence[Tensor], src_lengths: object, **unused: object
    ) -> data_sets.NestedDictionaryDataset:
        """A dataset of the lines *src_tokens*, whose batches :meth:`inference_step` takes."""
        pad = self.source_dictionary.pad()
        lines = data_sets.ListDataset([line.long() for line in src_tokens], src_lengths)
        net_input = {"src_tokens": data_sets.LeftPadDataset(lines, pad), "src_lengths": data_sets.NumelDataset(lines)}
        return data_sets.NestedDictionaryDataset({"id": data_sets.IdDataset(), "net_input": net_input}, [src_lengths])

    def build_generator(
        self,
        models: Sequence[object],
        cfg: object,
        seq_gen_cls: Callable[..., Any] | None = None,
        extra_gen_cls_kwargs: Mapping[str, Any] | None = None,
        prefix_allowed_tokens_fn: object = None,
    ) -> Any:
        """See :func:`fairseq.sequence_generator.build_generator`."""
        return deferred.plugins().build_generator(
            self, models, cfg, seq_gen_cls, extra_gen_cls_kwargs, prefix_allowed_tokens_fn
        )

    def build_bpe(self, args: object) -> Any:
        """The subwords that *args* name; see :func:`fairseq.data.encoders.build_bpe`."""
        return encoders.build_bpe(args)

    def build_tokenizer(self, args: object) -> Any:
        """The words that *args* name; see :func:`fairseq.data.encoders.build_tokenizer`."""
        return encoders.build_tokenizer(args)
