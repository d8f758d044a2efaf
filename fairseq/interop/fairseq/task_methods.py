"""Methods of fairseq's tasks that plug-ins override: ``load_dataset``, ``get_batch_iterator`` and steps."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fairseq.data.dataset import Dataset, Sample
from fairseq.data.samplers import Batching, Sampler
from fairseq.errors import UserError
from fairseq.interop.fairseq.iterators import EpochBatchIterator, IteratorSampler
from fairseq.tasks.fairseq_task import FairseqTask, LossGraph

EXPECTED = {
    "load_dataset": "(split, combine=False, **kwargs)",
    "train_step": "(sample, model, criterion, optimizer, update_num, ignore_grad=False)",
    "valid_step": "(sample, model, criterion)",
    "get_batch_iterator": "(dataset, max_tokens, max_sentences, max_positions, ignore_invalid_inputs, …)",
}
KEYWORDS = {  # passed by name to methods that take them
    "train_step": "update_num ignore_grad",
    "get_batch_iterator": "max_tokens max_sentences max_positions ignore_invalid_inputs required_batch_size_multiple "
    "seed num_shards shard_id num_workers epoch data_buffer_size disable_iterator_cache",
}


def overrides(task: type, name: str) -> bool:
    """Return whether the class *task* overrides the method *name* of the base class."""
    return getattr(task, name, None) is not getattr(FairseqTask, name, None)


def check_methods(task: Any, model: Any) -> None:
    """Check overridden methods: they must be called here, take the arguments of fairseq, and need no memory.

    Raises:
        UserError: a check failed; the message names the method.
    """
    name = task.settings.chosen.task or type(task).__name__
    # As many values as the call here has: `bind` checks the signature without calling the method.
    calls = {"load_dataset": ("train", True), "train_step": (None,) * 4, "valid_step": (None,) * 3}
    for method, values in {**calls, "get_batch_iterator": (None,)}.items():
        if overrides(type(task), method):
            try:
                inspect.signature(getattr(task, method)).bind(*values, **keywords(task, method))
            except TypeError as error:
                raise UserError(f"--task {name}: {method} must take {EXPECTED[method]} ({error})") from None
            # A step of fairseq returns no memory, and its batches do not continue the rows of the last ones.
            if method != "load_dataset" and model.memory_length:
                raise UserError(
                    f"--task {name}: its {method} cannot carry the model's memory "
                    "(--tokens-from-prev, --mem-len); use a model without memory"
                )


def keywords(task: Any, method: str, *values: Any) -> dict[str, Any]:
    """The *values* of fairseq's keyword arguments that the method of *task* accepts: versions differ in them."""
    names = KEYWORDS.get(method, "").split()
    parameters = inspect.signature(getattr(task, method)).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    pairs = zip(names, values or names, strict=True)
    return {name: value for name, value in pairs if open_ended or name in parameters}


def loaded_dataset(task: Any, split: str, training: bool) -> Dataset:
    """Return the dataset that ``load_dataset`` of *task* stores in ``self.datasets``.

    Raises:
        UserError: it stores none, or one without the required methods.
    """
    task.load_dataset(split, combine=training)
    dataset = task.datasets.get(split)
    # A dataset of this package, which a plug-in may make, too; it needs no adapter.
    if hasattr(dataset, "batch"):
        return dataset
    if not all(hasattr(dataset, name) for name in ("__getitem__", "__len__", "collater")):
        raise UserError(
            f"--task {task.settings.chosen.task}: load_dataset left {type(dataset).__name__} in "
            f"self.datasets[{split!r}]; expected a dataset with __getitem__, __len__, num_tokens and collater"
        )
    return CollatedDataset(dataset)


class CollatedDataset:
    """A dataset with fairseq's interface: examples by number, sizes by ``num_tokens``, batches by ``collater``.

    ``src_lengths`` of its batches are dropped: no model here takes them. *indices*, int [n], are its examples, or all.
    """

    def __init__(self, dataset: Any, indices: np.ndarray | None = None) -> None:
        self.dataset = dataset
        self.indices = np.arange(len(dataset)) if indices is None else indices

    @property
    def sizes(self) -> np.ndarray:
        # Of a pair of texts `num_tokens` gives two numbers.
        return np.array([int(np.max(self.dataset.num_tokens(int(i)))) for i in self.indices], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: np.ndarray) -> Sample:
        sample = self.dataset.collater([self.dataset[int(i)] for i in self.indices[indices]])
        inputs = {
            # Tasks with several inputs to a row number them: net_input1, net_input2, …
            name: {key: tensor for key, tensor in value.items() if key != "src_lengths"}
            for name, value in sample.items()
            if name.startswith("net_input")
        }
        # The plug-in's own number of sentences, if its collater has one.
        return {"nsentences": len(indices), "net_input": next(iter(inputs.values())), **sample, **inputs}

    # A resumed run compares checksums of its data: without any it goes on whatever they are.
    def checksums(self) -> dict[str, int]:
        """Nothing: what a plug-in reads is not known."""
        return {}

    def at_epoch(self, epoch: int) -> CollatedDataset:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return self

    def select(self, keep: np.ndarray) -> CollatedDataset:
        return CollatedDataset(self.dataset, self.indices[keep])


def own_sampler(task: Any, dataset: Any, model: Any, batching: Batching) -> Sampler:
    """The batches of *dataset* that ``get_batch_iterator`` of *task*, a plug-in's, makes.

    Raises:
        UserError: it returned no iterator of ``fairseq.data.iterators``.
    """
    # The plug-in gets its own dataset, whose numbers count all examples; `numbers` are those that this run reads.
    examples, numbers = dataset, np.arange(len(dataset))
    if isinstance(dataset, CollatedDataset):
        examples, numbers = dataset.dataset, dataset.indices
    limits = batching.max_tokens, batching.batch_size, model.max_positions(), True, batching.multiple
    processes = batching.world_size, batching.rank
    options = keywords(task, "get_batch_iterator", *limits, batching.seed, *processes, 0, 1, 0, False)
    iterator = task.get_batch_iterator(examples, **options)
    if not isinstance(iterator, EpochBatchIterator):
        raise UserError(
            f"--task {task.settings.chosen.task}: get_batch_iterator returned {type(iterator).__name__}; "
            "expected fairseq.data.iterators.EpochBatchIterator"
        )
    return IteratorSampler(iterator, numbers, batching)


class DeferredOptimizer:
    """The optimizer argument of ``train_step``: ``backward`` stores the loss, the trainer computes gradients."""

    loss: Tensor | None = None

    def backward(self, loss: Tensor) -> None:
        """Add *loss* to what the step minimizes."""
        # Some steps call `backward` for each of several losses; their gradients add up, and so do the losses.
        self.loss = loss if self.loss is None else self.loss + loss


class StepGraph(LossGraph):
    """A model and its criterion under a task with its own ``train_step`` or ``valid_step``, as in fairseq.

    Raises:
        UserError: ``train_step`` passed no loss to ``optimizer.backward``.
    """

    def __init__(self, task: FairseqTask, model: Any, criterion: Any) -> None:
        super().__init__(model, criterion)
        self.task = task

    def forward(self, sample: Sample, inputs: Mapping[str, Any]) -> Any:
        # fairseq's trainer chooses between the two in the same way.
        if not self.training:
            return self.task.valid_step(sample, self.model, self.criterion), {}
        optimizer = DeferredOptimizer()
        arguments = keywords(self.task, "train_step", self.update_num, False)
        _, size, log = self.task.train_step(sample, self.model, self.criterion, optimizer, **arguments)
        if optimizer.loss is None:
            raise UserError(f"--task {self.task.settings.chosen.task}: train_step must call optimizer.backward(loss)")
        return (optimizer.loss, size, log), {}
