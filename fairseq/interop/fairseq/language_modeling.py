"""fairseq's ``LanguageModelingTask``, which plug-ins extend: its constructor, dictionaries and
targets."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from fairseq.data.folders import load_dictionary
from fairseq.errors import UserError
from fairseq.interop.fairseq.block_datasets import LMContextWindowDataset
from fairseq.interop.fairseq.datasets import FairseqDataset
from fairseq.interop.fairseq.hooks import accepted, overrides
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.text.dictionary import Dictionary


def __init__(
    self: Any, args: Any, dictionary: Dictionary, output_dictionary: object = None, targets: Sequence[str] | None = None
) -> None:
    """Make a task whose model predicts words of *output_dictionary*, and whose examples have
    *targets*.

    Raises:
        UserError: it has other ones than the dictionary and the next word, and no ``load_dataset``
            of its own.
    """
    LanguageModelingTask.__init__(self, args, dictionary)
    self.output_dictionary, self.targets = output_dictionary or dictionary, list(targets or ["future"])
    is_plain = self.output_dictionary is dictionary and self.targets == ["future"]
    if not is_plain and not overrides(type(self), "load_dataset"):
        raise UserError(
            f"{type(self).__name__}: its examples have the dictionary's next words as targets; other targets or "
            "another output_dictionary need a load_dataset of its own"
        )


def setup_dictionary(cls: object, args: Any, **unused: object) -> tuple[Dictionary, Dictionary]:
    """The dictionaries of input and output, which are one."""
    return (load_dictionary(args.data),) * 2


def adapt(part: Any) -> None:
    """Give the constructor of *part*, a plug-in's subclass, what fairseq's ``setup_task`` gives."""
    make: Callable[..., None] = part.__init__

    @functools.wraps(make)
    def call(self: Any, args: object, dictionary: Dictionary, *rest: object, **options: object) -> None:
        self.output_dictionary, self.targets = dictionary, ["future"]
        bound = inspect.signature(make).bind_partial(self, args, dictionary, *rest, **options).arguments
        usual = {name: getattr(self, name) for name in ("output_dictionary", "targets") if name not in bound}
        make(self, args, dictionary, *rest, **options, **accepted(make, **usual))

    part.__init__ = call
    if not overrides(part, "target_dictionary"):
        part.target_dictionary = property(lambda self: self.output_dictionary)


def eval_lm_dataloader(
    self: Any,
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
