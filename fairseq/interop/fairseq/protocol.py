"""fairseq's order of calls, for runs in which the model, the task or the criterion is a plug-in's.

`set_up` is the one place where such a run differs from others: the task is given the methods of
:class:`Protocol`. Loop, checkpoints, log, precision and processes are this package's; iterators,
batches, steps and figures are fairseq's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq.config import fields
from fairseq.config.namespaces import namespace_of
from fairseq.config.registry import ARCHITECTURES, MODELS, is_outside
from fairseq.config.settings import Settings
from fairseq.criterions.fairseq_criterion import FairseqCriterion
from fairseq.data.collated import CollatedDataset
from fairseq.data.dataset import Sample
from fairseq.data.folders import data_folders
from fairseq.data.iterator import EpochDatasets, EpochIterator
from fairseq.data.iterators import EpochBatchIterator, IteratorSampler
from fairseq.data.position import FAIRSEQ
from fairseq.data.samplers import Batching, Sampler
from fairseq.dataclass import defaults
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.interop.fairseq import hooks
from fairseq.interop.fairseq.hooks import overrides
from fairseq.interop.fairseq.logged import Logged, LoggedFigures, without_outputs
from fairseq.models.base import PAD, BaseFairseqModel
from fairseq.models.views import PlainCriterion, logits_model, view
from fairseq.tasks.carried import Carried
from fairseq.tasks.fairseq_task import FairseqTask, LossGraph
from fairseq.text.dictionary import Dictionary
from fairseq.utils import resolve_max_positions

OF_DATA = ("load_dataset", "get_batch_iterator", "filter_indices_by_size")  # methods that make a task's own batches
STATE = "task_state"  # name of a task's own state in a checkpoint, beside what steps carry


def set_up(cls: type[FairseqTask], settings: Settings, dictionary: Dictionary | None) -> FairseqTask:
    """Return the task *cls* of *settings* under fairseq's protocol; with *dictionary*, its data are
    that file."""
    defaults.complete(namespace_of(settings))
    for name in fields.UNSTORED:
        # Paths, which a checkpoint's settings lack.
        settings.flat.setdefault(name, None)
    path = Path(settings.data_path)
    if dictionary is not None and path.name == "dict.txt" and is_outside(cls):
        # Constructors of plug-ins differ; their `setup_task` reads the folder.
        folder, dictionary = str(path.parent), None
        settings = dataclasses.replace(settings, data_path=folder, flat={**settings.flat, "data": folder})
    make: Any = cls
    given = cls.settings_of(settings) if is_outside(cls) else settings
    task: Any = cls.setup_task(given) if dictionary is None else make(given, dictionary)
    with contextlib.suppress(NotImplementedError):
        # Added by `add_symbol`, which knows no roles: a mask is no part of the dictionary's digest.
        if task.source_dictionary.symbols[-1] == "<mask>":
            task.source_dictionary.add_mask()
    made = type(task)
    cls = type(made.__name__, (Protocol, made), {"__module__": made.__module__, "plugin": made})
    # Another object with the attributes of the task: a plug-in's `setup_task` may name its class.
    under_protocol: Any = object.__new__(cls)
    object.__setattr__(under_protocol, "__dict__", vars(task))
    return under_protocol


def is_of_fairseq(model: BaseFairseqModel, criterion: FairseqCriterion) -> bool:
    """Return whether *model* is a plug-in's, or *criterion* one that runs it as fairseq's do."""
    return is_outside(type(model)) or not criterion.carries_state


class Protocol(FairseqTask):
    """What a task does in such a run instead of its own methods; *plugin* is its class without
    them."""

    plugin: type
    _training_epoch = 1
    _dummy: Sample | None = None

    def figures(self, criterion: FairseqCriterion) -> Any:
        """What ``reduce_metrics`` logs, known once it was called; without one those that
        *criterion* names."""
        return LoggedFigures() if hooks.logs_itself(self.plugin, criterion) else super().figures(criterion)

    def build_model(self, args: Any, *rest: Any, **options: Any) -> Any:
        return super().build_model(self._given(args), *rest, **options)

    def build_criterion(self, args: Any, *rest: Any, **options: Any) -> Any:
        return super().build_criterion(self._given(args), *rest, **options)

    def _given(self, settings: object) -> Any:
        """What methods of the task are given for *settings*: those of plug-ins the namespace."""
        is_typed = isinstance(settings, Settings) and is_outside(self.plugin)
        return namespace_of(settings) if is_typed else settings

    def model_class(self, arch: str) -> type:
        """The model of *arch*, in the form that plug-ins call it."""
        cls: type = MODELS[ARCHITECTURES[arch].model]
        if ARCHITECTURES[arch].model == "bert" and (arch.startswith("roberta") or arch == "xlm"):
            # Imported here: models of other kinds need none of it.
            from fairseq.models.roberta import RobertaModel

            return RobertaModel
        return cls

    def dataset(self, split: str, **options: Any) -> Any:
        """What ``load_dataset`` stored, as in fairseq, where a script gives the split alone."""
        datasets: Any = getattr(self, "datasets", {})
        if not options and (split in datasets or overrides(self.plugin, "load_dataset")):
            return datasets[split]
        return super().dataset(split, **options)

    def loss_graph(self, model: BaseFairseqModel, criterion: FairseqCriterion) -> LossGraph:
        # Here, before the first update: a wrong signature would show only after the data were read.
        hooks.check(self, model, criterion)
        super().loss_graph(model, criterion)
        return StepGraph(self, model, criterion)

    def iterator(
        self, split: str, model: BaseFairseqModel, criterion: FairseqCriterion, *, training: bool, **options: Any
    ) -> EpochIterator:
        batches = super().iterator(split, model, criterion, training=training, **options)
        if training and is_of_fairseq(model, criterion):
            # The order of fairseq's iterator: losses of its models and criterions can be repeated.
            batches.datasets.continuing(FAIRSEQ)

        def begin(epoch: int) -> None:
            if not training:
                self.begin_valid_epoch(self._training_epoch, model)
                return
            self._training_epoch = epoch
            self.begin_epoch(epoch, model)
            model.set_epoch(epoch)

        batches.begin = begin
        return batches

    def prepare(self, sample: Sample, epoch: int, *, model: BaseFairseqModel, training: bool) -> Sample:
        sample = super().prepare(sample, epoch, model=model, training=training)
        if not self._has_own_data:
            # The batches of fairseq's tasks have them.
            inputs = sample["net_input"]
            inputs.setdefault("src_lengths", inputs["src_tokens"].ne(PAD).sum(1))
        return sample

    @property
    def _has_own_data(self) -> bool:
        return any(overrides(self.plugin, name) for name in OF_DATA)

    def _epoch_datasets(self, split: str, model: BaseFairseqModel, training: bool, batching: Batching) -> EpochDatasets:
        if not self._has_own_data:
            return super()._epoch_datasets(split, model, training, batching)
        if getattr(self, "mixture", None):
            raise UserError(f"`mixture`: the task {self.settings.chosen.task} makes its own datasets; leave it out")
        # As in fairseq, several folders take turns by epoch, and validation reads the first.
        epochs = range(1, len(data_folders(self.settings.data_path)) + 1) if training else range(1, 2)

        def opener(epoch: int) -> Any:
            return lambda: self._open(split, epoch, model, training, batching)

        return (
            EpochDatasets.of_one(*opener(1)())
            if len(epochs) == 1
            else EpochDatasets([opener(epoch) for epoch in epochs])
        )

    def _open(
        self, split: str, epoch: int, model: BaseFairseqModel, training: bool, batching: Batching
    ) -> tuple[object, Sampler]:
        """The dataset that ``load_dataset`` stores, and the batches that ``get_batch_iterator``
        makes of it."""
        load: Any = getattr(self, "load_dataset")  # noqa: B009 - fairseq's, which tasks here do not declare
        load(split, **hooks.accepted(load, epoch=epoch, combine=training))
        task, datasets = self.settings.chosen.task, self.datasets
        dataset = datasets.get(split)
        # An iterator of the task's own may have another function that makes batches.
        methods = ("__getitem__", "__len__", *(() if overrides(self.plugin, "get_batch_iterator") else ("collater",)))
        if not all(hasattr(dataset, name) for name in methods):
            raise UserError(
                f"--task {task}: load_dataset left {type(dataset).__name__} in self.datasets[{split!r}]; "
                "expected a dataset with __getitem__, __len__ and collater"
            )
        skip = training or self.settings.data.skip_invalid_size_inputs_valid_test
        options: Any = hooks.accepted(
            self.get_batch_iterator,
            max_tokens=batching.max_tokens,
            max_sentences=batching.batch_size,
            max_positions=resolve_max_positions(self.max_positions(), model.max_positions()),
            ignore_invalid_inputs=skip,
            required_batch_size_multiple=batching.multiple,
            seed=batching.seed,
            num_shards=batching.world_size,
            shard_id=batching.rank,
            num_workers=0,
            epoch=epoch,
            data_buffer_size=0,
            disable_iterator_cache=False,
            skip_remainder_batch=training and bool(self.settings.flat.get("skip_remainder_batch")),
        )
        iterator = self.get_batch_iterator(dataset, **options)
        if not isinstance(iterator, EpochBatchIterator):
            raise UserError(
                f"--task {task}: get_batch_iterator returned {type(iterator).__name__}; "
                "expected fairseq.data.iterators.EpochBatchIterator"
            )
        return CollatedDataset(dataset, iterator.collate_fn), IteratorSampler(iterator, batching)

    def step(self, graph: Any, sample: Sample | None, carried: Carried, device: torch.device | str) -> Any:
        if sample is None:
            # As in fairseq: a rank without a batch repeats its first one, which counts nothing.
            (loss, size, log), _ = super().step(graph, self._dummy, carried, device)
            return (loss * 0, size * 0, without_outputs(log)), carried
        self._dummy = self._dummy or sample
        return super().step(graph, sample, carried, device)

    def save_carried(self, world: World) -> dict[str, object]:
        state = self.state_dict()
        return {**super().save_carried(world), **({STATE: state} if state else {})}

    def load_carried(self, saved: Mapping[str, object], rows: int, world: World) -> None:
        super().load_carried(saved, rows, world)
        if STATE in saved:
            state: Any = saved[STATE]
            self.load_state_dict(state)


class _DeferredOptimizer:
    """The optimizer argument of ``train_step``: ``backward`` stores the loss, the trainer computes
    gradients."""

    loss: Tensor | None = None

    def backward(self, loss: Tensor) -> None:
        """Add *loss* to what the step minimizes."""
        # Some steps call `backward` for each of several losses; their gradients add up, and so do
        # the losses.
        self.loss = loss if self.loss is None else self.loss + loss


class StepGraph(LossGraph):
    """A model and its criterion under the task's ``train_step`` and ``valid_step``.

    Raises:
        UserError: ``train_step`` passed no loss to ``optimizer.backward``.
    """

    def __init__(self, task: Protocol, model: BaseFairseqModel, criterion: FairseqCriterion) -> None:
        # Which the setter reads.
        self.task, self.is_seeded = task, is_outside(task.plugin) or is_of_fairseq(model, criterion)
        super().__init__(model, criterion)
        self._updates = -1

    @property
    def update_num(self) -> int:
        """Updates done so far; model, criterion and task are told before each."""
        return self._updates

    @update_num.setter
    def update_num(self, number: int) -> None:
        if number and number != getattr(self, "_updates", None):
            parts: tuple[object, ...] = (self.model, self.criterion, self.task)
            for part in parts:
                if hasattr(part, "set_num_updates"):
                    part.set_num_updates(number)
        self._updates = number
        # As in fairseq: random numbers of a validation must not change the updates after it.
        if self.is_seeded:
            torch.manual_seed(self.task.settings.common.seed + number)

    def forward(self, sample: Sample, inputs: Mapping[str, object]) -> Any:
        task = self.task
        if not any(overrides(task.plugin, name) for name in ("train_step", "valid_step")):
            ((loss, size, log), extra) = self.criterion.step(self.model, sample, inputs)
            return (loss, size, self._logged(log, loss, sample)), extra
        model, criterion = logits_model(self.model), self.criterion
        if not is_outside(type(criterion)):
            criterion = view(PlainCriterion, criterion)
        # fairseq's trainer chooses between the two in the same way.
        if not self.training:
            loss, size, log = task.valid_step(sample, model, criterion)
            return (loss, size, self._logged(log, loss, sample)), {}
        optimizer = _DeferredOptimizer()
        options: Any = hooks.accepted(task.train_step, update_num=max(self._updates, 0), ignore_grad=False)
        loss, size, log = task.train_step(sample, model, criterion, optimizer, **options)
        if optimizer.loss is None:
            raise UserError(f"--task {task.settings.chosen.task}: train_step must call optimizer.backward(loss)")
        return (optimizer.loss, size, self._logged(log, loss, sample)), {}

    def _logged(self, log: object, loss: object, sample: Sample) -> object:
        return Logged.of(log, loss, sample, self) if hooks.logs_itself(self.task.plugin, self.criterion) else log
