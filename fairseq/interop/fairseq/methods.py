"""Methods of fairseq's classes that classes of this package lack, or have with other arguments.

:data:`fairseq.interop.fairseq.names.METHODS` names the class here that has each.
"""

from __future__ import annotations

import logging
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq.config.fields import add_flags
from fairseq.config.registry import is_outside
from fairseq.config.shared import Part
from fairseq.criterions.fairseq_criterion import Loss
from fairseq.data.dataset import Dataset, Sample
from fairseq.data.folders import data_folders
from fairseq.errors import UserError
from fairseq.inference.engine import Reader
from fairseq.interop.fairseq import datasets, encoders, hooks, hub_utils, roberta_hub
from fairseq.interop.fairseq.block_datasets import collate
from fairseq.interop.fairseq.criterions import log_aggregated, log_figures
from fairseq.interop.fairseq.data_utils import batch_by_size, filter_by_size, numpy_seed
from fairseq.interop.fairseq.generator import SequenceGenerator, SequenceScorer
from fairseq.interop.fairseq.iterators import EpochBatchIterator
from fairseq.interop.fairseq.language_modeling import __init__, eval_lm_dataloader, setup_dictionary  # noqa: F401
from fairseq.interop.fairseq.roberta import RobertaModel
from fairseq.interop.fairseq.transformer import build_embedding  # noqa: F401 - a method
from fairseq.interop.fairseq.utils import tokenize_line
from fairseq.interop.fairseq.views import plain
from fairseq.models.bert import EncoderModel
from fairseq.models.sentence import ClassificationHead, SentenceModel
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.dictionary import Dictionary

logger = logging.getLogger(__name__)

# Settings of fairseq's generation, with arguments of the generator that have other names.
GENERATION = """
    beam=beam_size lenpen=len_penalty max_len_a max_len_b min_len temperature no_repeat_ngram_size sampling
    sampling_topk sampling_topp unkpen=unk_penalty match_source_len
"""
NOT_IMPLEMENTED = {  # settings of other searches: values at which there is none
    "diverse_beam_groups": (-1, 0),
    "diversity_rate": (-1, -1.0),
    "constraints": (False, ""),
    "print_alignment": (False, ""),
    "prefix_allowed_tokens_fn": (),
}


def __getitem__(self: Dataset, index: int) -> dict[str, object]:
    """``id``, ``source`` and ``target`` [T] of example *index*."""
    if not 0 <= index < len(self):
        raise IndexError(index)
    sample = self.batch(np.array([index]))
    return {"id": int(index), "source": sample["net_input"]["src_tokens"][0], "target": sample["target"][0]}


def collater(self: Any, samples: Sequence[dict[str, Any]]) -> Sample:
    """The examples *samples* as one batch, padded on the right."""
    # Masked blocks wrap the blocks that know the padding.
    return collate(samples, getattr(self, "blocks", self).pad)


def num_tokens(self: Dataset, index: int) -> int:
    return int(self.sizes[index])


size = num_tokens


def ordered_indices(self: Dataset) -> np.ndarray:
    """The numbers of the examples in their order."""
    return np.arange(len(self))


def register_classification_head(
    self: EncoderModel, name: str, num_classes: int = 2, inner_dim: int | None = None, **unused: object
) -> None:
    """Add a head over the first token to a model of this package, for a plug-in's ``build_model``.

    The model becomes a :class:`~fairseq.models.sentence.SentenceModel` without output layer.

    Raises:
        UserError: the model is of a plug-in's class.
    """
    if isinstance(self, SentenceModel):
        self.classification_heads[name] = ClassificationHead(self.cfg.encoder_embed_dim, num_classes)
        return
    if is_outside(type(self)):
        raise UserError(f"{type(self).__name__}: register_classification_head: derive the class from RobertaModel")
    headed = SentenceModel(self, name, num_classes)
    # In place: the plug-in returns the model that it adds heads to.
    self.__class__, self.__dict__ = SentenceModel, headed.__dict__


def load_dataset(self: Any, split: str, combine: bool = False, **options: object) -> None:
    """Put the examples of *split* into ``self.datasets``."""
    self.datasets[split] = self.dataset(split, training=combine)


def get_batch_iterator(
    self: Any,
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
    self: object, indices: np.ndarray, dataset: Any, max_positions: object = None, ignore_invalid_inputs: bool = False
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


def can_reuse_epoch_itr(self: object, dataset: object) -> bool:
    """Whether the batches of *dataset* are the same in every epoch."""
    return bool(getattr(dataset, "can_reuse_epoch_itr_across_epochs", False))


def has_sharded_data(self: FairseqTask, split: str) -> bool:
    """Whether epochs read several data folders in turn."""
    return len(data_folders(self.settings.data_path)) > 1


def max_positions(self: object) -> object:
    """The most tokens of an example; None: as many as the model takes."""
    return None


def begin_epoch(self: object, epoch: int, model: object) -> None:
    """Do what precedes an epoch of training; plug-ins override it."""


def begin_valid_epoch(self: object, epoch: int, model: object) -> None:
    """Do what precedes a validation; plug-ins override it."""


def train_step(
    self: object,
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
    # Multiplied and not left out: all parameters get gradients, of zero, as other processes expect.
    optimizer.backward(loss * 0 if ignore_grad else loss)
    return loss, sample_size, log


def valid_step(self: object, sample: Sample, model: nn.Module, criterion: nn.Module) -> Loss:
    """Loss, sample size and log of *sample*."""
    model.eval()
    with torch.no_grad():
        return criterion(model, sample)


def optimizer_step(self: object, optimizer: Any, model: object, update_num: int) -> None:
    """Make the step of *optimizer*, in a loop of the caller's own."""
    optimizer.step()


def state_dict(self: object) -> dict[str, object]:
    """What a checkpoint holds of the task: nothing; plug-ins override it."""
    return {}


def load_state_dict(self: object, state_dict: dict[str, object]) -> None:
    """Go on from :func:`state_dict`; plug-ins override it."""


def get_interactive_tokens_and_lengths(
    self: Any, lines: Sequence[str], encode_fn: Callable[[str], str]
) -> tuple[list[Tensor], list[int]]:
    """The ids of *lines* after *encode_fn*, and their numbers."""
    tokens = [
        self.source_dictionary.encode_line(encode_fn(line), add_if_not_exist=False, line_tokenizer=tokenize_line).long()
        for line in lines
    ]
    return tokens, [row.numel() for row in tokens]


def logging_outputs_can_be_summed(self: object, criterion: Any) -> bool:
    """Whether outputs may be summed before they are reduced."""
    return bool(type(criterion).logging_outputs_can_be_summed())


def aggregate_logging_outputs(self: object, logging_outputs: object, criterion: Any) -> Any:
    """The figures of outputs, in the manner of fairseq before 0.8; plug-ins override it."""
    return type(criterion).aggregate_logging_outputs(logging_outputs)


def reduce_metrics(self: Any, logging_outputs: Any, criterion: Any) -> None:
    """Log the figures of *logging_outputs*, as *criterion* defines them; plug-ins override it."""
    if hooks.overrides(type(self), "aggregate_logging_outputs"):
        log_aggregated(self.aggregate_logging_outputs(logging_outputs, criterion))
    elif hasattr(criterion, "reduce_metrics"):
        type(criterion).reduce_metrics(logging_outputs)
    else:
        log_figures(criterion.figures(), logging_outputs)


def build_generator(
    self: Any,
    models: Sequence[object],
    cfg: object,
    seq_gen_cls: Callable[..., SequenceGenerator] | None = None,
    extra_gen_cls_kwargs: Mapping[str, Any] | None = None,
    prefix_allowed_tokens_fn: object = None,
) -> Any:
    """The generator with the settings *cfg* of fairseq's generation, by their names; with
    ``score_reference`` the scorer.

    Raises:
        UserError: *cfg* asks for a search that is not implemented.
    """
    for name, neutral in NOT_IMPLEMENTED.items():
        if (value := getattr(cfg, name, None)) not in (None, *neutral):
            raise UserError(f"`{name}` {value}: not implemented; leave it out")
    if getattr(cfg, "score_reference", False):
        return SequenceScorer(self.target_dictionary)
    pairs = (entry.partition("=") for entry in GENERATION.split())
    values = {argument or name: getattr(cfg, name, None) for name, _, argument in pairs}
    options = {name: value for name, value in values.items() if value is not None} | dict(extra_gen_cls_kwargs or {})
    if prefix_allowed_tokens_fn is not None:
        raise UserError("`prefix_allowed_tokens_fn`: not implemented; leave it out")
    options["normalize_scores"] = not getattr(cfg, "unnormalized", False)
    if getattr(self.cfg, "add_bos_token", False):  # readers put <s> before every row
        models = [Reader(plain(model), begin=self.target_dictionary.begin()) for model in models]
    return (seq_gen_cls or SequenceGenerator)(models, self.target_dictionary, **options)


def inference_step(
    self: object,
    generator: SequenceGenerator,
    models: Sequence[object],
    sample: Mapping[str, Any],
    prefix_tokens: Tensor | None = None,
    **options: Any,
) -> list[list[dict[str, Any]]]:
    """The hypotheses of each row of *sample*, which begin with *prefix_tokens*, or else with its
    ``src_tokens``."""
    return generator.generate(models, sample, prefix_tokens=prefix_tokens, **options)


def build_dataset_for_inference(
    self: FairseqTask, src_tokens: Sequence[Tensor], src_lengths: object, **unused: object
) -> datasets.NestedDictionaryDataset:
    """A dataset of the lines *src_tokens*, whose batches :func:`inference_step` takes."""
    pad, lines = self.source_dictionary.pad(), datasets.ListDataset([line.long() for line in src_tokens], src_lengths)
    net_input = {"src_tokens": datasets.LeftPadDataset(lines, pad), "src_lengths": datasets.NumelDataset(lines)}
    return datasets.NestedDictionaryDataset({"id": datasets.IdDataset(), "net_input": net_input}, [src_lengths])


def build_bpe(self: object, args: object) -> Any:
    """The subwords that the settings *args* name; see :func:`encoders.build_bpe`."""
    return encoders.build_bpe(args)


def build_tokenizer(self: object, args: object) -> Any:
    """The word tokenizer that *args* name; see :func:`encoders.build_tokenizer`."""
    return encoders.build_tokenizer(args)


def from_pretrained(cls: type, *args: Any, **options: Any) -> Any:
    """The model in a folder: see :func:`hub_utils.from_pretrained`, and for encoders
    :func:`roberta_hub.from_pretrained`."""
    load = roberta_hub if issubclass(cls, RobertaModel) else hub_utils
    return load.from_pretrained(*args, **options)


def add_args(cls: type[Part], parser: ArgumentParser) -> None:
    """Add the flags of the dataclass of settings that *cls* has."""
    if cls.config_class is not None:
        add_flags(parser, cls.config_class)


def load_dictionary(cls: object, filename: str) -> Dictionary:
    """The dictionary in the file *filename*."""
    return Dictionary.load(filename)
