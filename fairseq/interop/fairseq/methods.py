"""Methods of fairseq's classes that classes of this package lack, or have with other arguments.

:data:`fairseq.interop.fairseq.names.METHODS` names the class here that has each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq.config.registry import is_outside
from fairseq.data.dataset import Sample
from fairseq.errors import UserError
from fairseq.inference.engine import Reader
from fairseq.interop.fairseq import datasets, encoders
from fairseq.interop.fairseq.block_datasets import collate
from fairseq.interop.fairseq.data_utils import batch_by_size, filter_by_size
from fairseq.interop.fairseq.generator import SequenceGenerator
from fairseq.interop.fairseq.iterators import EpochBatchIterator
from fairseq.interop.fairseq.utils import tokenize_line
from fairseq.models.bert import EncoderModel
from fairseq.models.sentence import ClassificationHead, SentenceModel
from fairseq.text.dictionary import Dictionary

# Settings of fairseq's generation, with the arguments of the generator where they are called otherwise.
GENERATION = """
    beam=beam_size lenpen=len_penalty max_len_a max_len_b min_len temperature no_repeat_ngram_size sampling
    sampling_topk sampling_topp
"""


def encode_line(
    self: Any,
    line: str,
    line_tokenizer: Callable[[str], list[str]] = tokenize_line,
    add_if_not_exist: bool = True,
    consumer: Callable[[str, int], Any] | None = None,
    append_eos: bool = True,
    reverse_order: bool = False,
) -> Tensor:
    """The ids of the words of *line*: int32 [T]. *consumer* is called with each word and its id."""
    words = line_tokenizer(line)[:: -1 if reverse_order else 1]
    ids = [self.add_symbol(word) if add_if_not_exist else self.index(word) for word in words]
    for word, index in zip(words, ids, strict=True):
        if consumer is not None:
            consumer(word, index)
    return torch.tensor([*ids, self.eos()] if append_eos else ids, dtype=torch.int32)


def string(
    self: Any,
    tensor: Any,
    bpe_symbol: str | None = None,
    escape_unk: bool = False,
    extra_symbols_to_ignore: Collection[int] = (),
    unk_string: str | None = None,
    include_eos: bool = False,
    separator: str = " ",
) -> str:
    """The words of *tensor* [T], or of each row of [B, T] in a line."""
    if torch.is_tensor(tensor) and tensor.dim() == 2:
        rest = (bpe_symbol, escape_unk, extra_symbols_to_ignore, unk_string, include_eos, separator)
        return "\n".join(string(self, row, *rest) for row in tensor)
    silent = {self.bos(), self.pad(), *extra_symbols_to_ignore} | (set() if include_eos else {self.eos()})
    unknown = self.unk_string(escape_unk) if unk_string is None else unk_string
    words = [unknown if index == self.unk() else self[index] for index in map(int, tensor) if index not in silent]
    text = separator.join(words)
    # The blank at the end lets the mark of the last word match like the others, as when a text ends within a word.
    return text if bpe_symbol is None else (text + " ").replace(bpe_symbol.rstrip() + " ", "").rstrip()


def unk_string(self: Any, escape: bool = False) -> str:
    """The unknown symbol, in brackets with *escape*."""
    return f"<{self.unk_word}>" if escape else self.unk_word


def add_from_file(self: Any, f: Any) -> None:
    """Add the words of a ``dict.txt``, a path or an open file.

    Raises:
        UserError: it cannot be read, or is malformed.
    """
    is_path = isinstance(f, str | Path)
    self.update(Dictionary.load(f) if is_path else Dictionary.parse(f.read().encode(), getattr(f, "name", "")))


def dummy_sentence(self: Any, length: int) -> Tensor:
    """*length* random words, the last of them ``</s>``: int64 [T]."""
    # From the second word on, fairseq's own bound.
    tokens = torch.randint(self.nspecial + 1, len(self), (length,))
    tokens[-1] = self.eos()
    return tokens


def __getitem__(self: Any, index: int) -> dict[str, Any]:
    """``id``, ``source`` and ``target`` [T] of example *index*."""
    if not 0 <= index < len(self):
        raise IndexError(index)
    sample = self.batch(np.array([index]))
    return {"id": int(index), "source": sample["net_input"]["src_tokens"][0], "target": sample["target"][0]}


def collater(self: Any, samples: Sequence[dict[str, Any]]) -> Sample:
    """The examples *samples* as one batch, padded on the right."""
    # Masked blocks wrap the blocks that know the padding.
    return collate(samples, getattr(self, "blocks", self).pad)


def num_tokens(self: Any, index: int) -> int:
    return int(self.sizes[index])


size = num_tokens


def ordered_indices(self: Any) -> np.ndarray:
    """The numbers of the examples in their order."""
    return np.arange(len(self))


def register_classification_head(
    self: EncoderModel, name: str, num_classes: int = 2, inner_dim: int | None = None, **unused: Any
) -> None:
    """Add a head over the first token to a model of this package, for a plug-in's ``build_model``.

    The model becomes a :class:`~fairseq.models.sentence.SentenceModel`: its output layer is dropped.

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
    self: Any, models: Any, cfg: Any, seq_gen_cls: Any = None, extra_gen_cls_kwargs: Any = None, **unused: Any
) -> SequenceGenerator:
    """The generator with the settings *cfg* of fairseq's generation, by their names."""
    pairs = (entry.partition("=") for entry in GENERATION.split())
    values = {argument or name: getattr(cfg, name, None) for name, _, argument in pairs}
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
