"""Methods of fairseq's tasks that scripts call: batches of a dataset, and generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fairseq.inference.engine import Reader
from fairseq.interop.fairseq import datasets, encoders
from fairseq.interop.fairseq.data_utils import batch_by_size, filter_by_size
from fairseq.interop.fairseq.generator import SequenceGenerator
from fairseq.interop.fairseq.iterators import EpochBatchIterator

GENERATION_SETTINGS = """
beam lenpen max_len_a max_len_b min_len temperature no_repeat_ngram_size sampling sampling_topk sampling_topp
"""
GENERATION = {"beam": "beam_size", "lenpen": "len_penalty"}  # settings: arguments of the generator


def get_batch_iterator(
    self: Any,
    dataset: Any,
    max_tokens: int | None = None,
    max_sentences: int | None = None,
    max_positions: Any = None,
    ignore_invalid_inputs: bool = False,
    required_batch_size_multiple: int = 1,
    seed: int = 1,
    num_shards: int = 1,
    shard_id: int = 0,
    num_workers: int = 0,
    epoch: int = 1,
    **unused: Any,
) -> EpochBatchIterator:
    """The batches of *dataset* in the order of its ``ordered_indices``, for a loop of the caller's own.

    Raises:
        UserError: an example is longer than *max_positions* or *max_tokens*, without *ignore_invalid_inputs*.
    """
    indices = filter_by_size(dataset.ordered_indices(), dataset, max_positions, not ignore_invalid_inputs)
    limits = (max_tokens, max_sentences, required_batch_size_multiple)
    batches = batch_by_size(indices, dataset.num_tokens, None, *limits)
    return EpochBatchIterator(dataset, dataset.collater, batches, seed, num_shards, shard_id, num_workers, epoch)


def filter_indices_by_size(
    self: Any, indices: Any, dataset: Any, max_positions: Any = None, ignore_invalid_inputs: bool = False
) -> Any:
    """The *indices* of examples of *dataset* that are not longer than *max_positions*.

    Raises:
        UserError: there are others, without *ignore_invalid_inputs*.
    """
    return filter_by_size(indices, dataset, max_positions, not ignore_invalid_inputs)


def can_reuse_epoch_itr(self: Any, dataset: Any) -> bool:
    """Return False: batches are asked for once a run."""
    return False


def build_generator(
    self: Any,
    models: Sequence[Any],
    cfg: Any,
    seq_gen_cls: Any = None,
    extra_gen_cls_kwargs: Any = None,
    **unused: Any,
) -> SequenceGenerator:
    """The generator with the settings *cfg* of fairseq's generation, by their names."""
    values = {GENERATION.get(name, name): getattr(cfg, name, None) for name in GENERATION_SETTINGS.split()}
    options = {name: value for name, value in values.items() if value is not None} | dict(extra_gen_cls_kwargs or {})
    if getattr(self.cfg, "add_bos_token", False):  # readers put <s> before every row
        models = [Reader(model, begin=self.target_dictionary.begin()) for model in models]
    return (seq_gen_cls or SequenceGenerator)(models, self.target_dictionary, **options)


def inference_step(
    self: Any, generator: Any, models: Sequence[Any], sample: Any, prefix_tokens: Tensor | None = None, **options: Any
) -> list[list[dict[str, Any]]]:
    """The hypotheses of each row of *sample*, which begin with *prefix_tokens*, or else with its ``src_tokens``."""
    return generator.generate(models, sample, prefix_tokens=prefix_tokens, **options)


def build_dataset_for_inference(self: Any, src_tokens: Sequence[Tensor], src_lengths: Any, **unused: Any) -> Any:
    """A dataset of the lines *src_tokens*, whose batches :func:`inference_step` takes."""
    pad, lines = self.source_dictionary.pad(), datasets.ListDataset([line.long() for line in src_tokens], src_lengths)
    net_input = {"src_tokens": datasets.LeftPadDataset(lines, pad), "src_lengths": datasets.NumelDataset(lines)}
    return datasets.NestedDictionaryDataset({"id": datasets.IdDataset(), "net_input": net_input}, [src_lengths])


def build_bpe(self: Any, args: Any) -> Any:
    """The subwords that the settings *args* name; see :func:`fairseq.interop.fairseq.encoders.build_bpe`."""
    return encoders.build_bpe(args)


def build_tokenizer(self: Any, args: Any) -> Any:
    """The word tokenizer that *args* name; see :func:`fairseq.interop.fairseq.encoders.build_tokenizer`."""
    return encoders.build_tokenizer(args)
