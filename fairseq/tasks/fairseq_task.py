"""Base class of tasks: the interface that the trainer uses."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fairseq.config import fields
from fairseq.config.namespaces import namespace_with_methods
from fairseq.config.registry import ARCHITECTURES, EXTENSIONS, MODELS, TASKS, is_outside, set_up
from fairseq.config.settings import DataConfig, Settings, TrainingSettings, typed_settings
from fairseq.config.shared import Part
from fairseq.criterions.fairseq_criterion import FairseqCriterion, Sample, build_criterion, runs_model, subset_figures
from fairseq.data.dataset import Dataset
from fairseq.data.folders import data_folders
from fairseq.data.iterator import EpochDatasets, EpochIterator
from fairseq.data.samplers import Batching, Sampler
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.logging.figures import Figure
from fairseq.models.base import BaseFairseqModel
from fairseq.models.loading import build_model
from fairseq.modules import devices
from fairseq.tasks.carried import Carried, CarriedState, RowMemory
from fairseq.tasks.fairseq_methods import FairseqMethods
from fairseq.text.dictionary import Dictionary

logger = logging.getLogger(__name__)

C = TypeVar("C")
StepOutput = tuple[Tensor, int, dict[str, Any]]


class LossGraph(nn.Module):
    """A model and its criterion as one module, the unit that is wrapped for distributed training.

    Attributes:
        update_num: updates done so far; set before each.
    """

    def __init__(self, model: BaseFairseqModel, criterion: FairseqCriterion) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion
        self.update_num = 0

    def forward(self, sample: Sample, inputs: Mapping[str, object]) -> tuple[StepOutput, Mapping[str, Any]]:
        """See :meth:`FairseqCriterion.step`."""
        return self.criterion.step(self.model, sample, inputs)


class Extension(Protocol):
    """What changes data and model of one task from outside,
    by settings of its own; made as ``cls(task)``.

    Registered in :data:`~fairseq.config.registry.EXTENSIONS` under the name of the switch among its
    settings. Where the switch is on, a task makes one of itself; no task or model knows any by
    name. The dataclass of the settings has a function ``extends(task)`` that returns whether
    *task*, a registered class or its declaration, has these settings.
    """

    decisive_settings: ClassVar[tuple[str, ...]]
    """Settings of the extension that change what a model computes, but not the names and shapes of
    its parameters."""
    loading_settings: ClassVar[tuple[str, ...]]
    """Settings of how a checkpoint is used, which :meth:`strip_for_inference` and
    :meth:`eval_overrides` read; none stores them."""
    kinds: ClassVar[tuple[CarriedState, ...]]
    """Further kinds of state that a step hands to the next."""
    subsets: ClassVar[tuple[str, ...]]
    """Names of the subsets of tokens that its samples mark."""

    @staticmethod
    def extend_model(model: BaseFairseqModel, cfg: Any, task: object) -> None:
        """Add to *model*, just built for *task*, what *cfg* says, the settings of the extension."""

    @staticmethod
    def strip_for_inference(
        args: Mapping[str, object], parameters: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Settings and parameters of a model that is used
        without the extension, unless *args* keep it."""

    @staticmethod
    def eval_overrides(args: Mapping[str, object]) -> Mapping[str, Any]:
        """Settings of the task that evaluates a model with *args*, changed as these ask for."""

    def extend_dataset(
        self, dataset: Dataset, model: BaseFairseqModel, split: str, folder: Path, *, training: bool
    ) -> Dataset:
        """The examples of *split* in *folder*, selected,
        with what *model* reads of them in addition."""


class FairseqTask(FairseqMethods, Part):
    """A registered task: data, batches, model and criterion,
    and the state that training steps carry along.

    Args:
        args: all settings of the command.

    Attributes:
        settings: all settings, typed.
        cfg: the settings of the task.
        reads: settings that it implements and other tasks refuse.
        evaluated_by: module of :mod:`fairseq_cli` that evaluates
            a checkpoint, which the log of training names.
        extensions: what changes data and models of the task from outside, by name.
        kinds: the kinds of state that a step hands to the next.
        subsets: names of the subsets of tokens that samples mark
            (:mod:`fairseq.criterions.fairseq_criterion`).
        gives_positions: whether samples have the ``positions`` of targets, so that the losses of
            tokens are gathered.
        carried: their values in training. Only :meth:`commit`, :meth:`restart` and
            :meth:`load_carried` set it.
    """

    settings_name = "task"
    reads: tuple[str, ...] = ()
    evaluated_by = "validate"
    kinds: tuple[CarriedState, ...] = (RowMemory(),)
    subsets: tuple[str, ...] = ()
    gives_positions = False

    def __init__(self, args: Settings) -> None:
        self.settings = typed_settings(args)
        self.carried: Carried = {}
        self.extensions: dict[str, Extension] = {}
        for name in self.settings.extensions:
            self.extend(name, EXTENSIONS[name](self))

    def extend(self, name: str, extension: Extension) -> None:
        """Let *extension* change data and models of this task."""
        self.extensions[name] = extension
        self.kinds, self.subsets = (*self.kinds, *extension.kinds), (*self.subsets, *extension.subsets)

    @classmethod
    def setup_task(cls, args: Settings, **kwargs: object) -> FairseqTask:
        """Load what the task needs, such as the dictionary, and build the task."""
        return cls(args, **kwargs)

    def typed(self, cls: type[C]) -> C:
        """The settings of the task as *cls*; of a plug-in's task with its own dataclass the
        namespace, which has them."""
        if is_outside(type(self)) and not isinstance(self.settings.task, cls):
            return namespace_with_methods(cls, {**vars(self.args), **vars(fields.typed(cls, self.args))})
        cfg = self.settings.task
        return cfg if isinstance(cfg, cls) else fields.typed(cls, self.settings.flat)

    @property
    def source_dictionary(self) -> Dictionary:
        """The dictionary of the model's input: the attribute
        ``dictionary``, unless a task defines another."""
        if not hasattr(self, "dictionary"):
            raise NotImplementedError
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        """The dictionary of the model's output."""
        return self.source_dictionary

    def build_model(self, args: Settings, from_checkpoint: bool = False) -> BaseFairseqModel:
        """Return the model of the architecture that *args* select."""
        return build_model(args, self)

    def model_class(self, arch: str) -> Any:
        """The class of models of the architecture *arch*."""
        return MODELS[ARCHITECTURES[arch].model]

    def build_criterion(self, args: Settings) -> FairseqCriterion:
        """Return the criterion that *args* select."""
        return build_criterion(args, self)

    def figures(self, criterion: FairseqCriterion) -> dict[str, Figure]:
        """The figures of log and validation by name, of criterion and subsets."""
        return {**criterion.figures(), **subset_figures(self.subsets)}

    def dataset(self, split: str, *, training: bool = False, folder: str | Path | None = None) -> Dataset:
        """Return the examples of *split* in *folder* (default: the first data folder).

        Raises:
            UserError: the data are missing or damaged.
        """
        raise NotImplementedError

    def combines(self, split: str, training: bool) -> bool:
        """Whether the files *split*1, *split*2, … of a data folder belong to *split*."""
        return training or (split == "valid" and bool(self.settings.data.combine_valid_subsets))

    def check_folder(self, split: str, folder: Path) -> None:
        """Raise UserError, without reading it, unless *folder*
        has *split*; it may be opened after many epochs."""

    def sampler(self, dataset: Dataset, model: BaseFairseqModel, batching: Batching) -> Sampler:
        """Return the batches of *dataset* for *model*:
        by default batches of examples of similar size."""
        return batching.blocks(dataset.sizes, by_size=True)

    def prepare(self, sample: Sample, epoch: int, *, model: BaseFairseqModel, training: bool) -> Sample:
        """Change a sample of *epoch* for *model* on the host; randomness must depend on seed, epoch
        and ``id`` only."""
        return sample

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
        """Return the batches of *split*, for one of *world_size* processes.

        Training reads an epoch of each data folder in turn, validation the first. Of several
        folders one is opened when its epoch begins, a single one at once.

        Raises:
            UserError: the data are missing or damaged, or do not fit the model or the batches.
        """
        data = self.settings.data
        batching = _batching(data, self.settings.common.seed, training, rank, world_size)
        chunks = 1
        if training and isinstance(self.settings, TrainingSettings):
            optimization = self.settings.optimization
            batching = dataclasses.replace(batching, accumulated=max(optimization.update_freq))
            chunks = optimization.batch_chunk

        def prepare(sample: Sample, epoch: int) -> Sample:
            sample = self.prepare(sample, epoch, model=model, training=training)
            return sample if runs_model(type(criterion)) else criterion.prepare(model, sample)

        return EpochIterator(
            self._epoch_datasets(split, model, training, batching),
            prepare=prepare,
            chunks=chunks,
            # On a CPU, a thread that prepares batches takes time from the computation.
            prefetch=data.num_workers if devices.is_accelerator(torch.device(device)) else 0,
            device=device,
        )

    def folders(self, training: bool) -> list[Path]:
        """The data folders that epochs read in turn."""
        folders = data_folders(self.settings.data_path)
        return folders if training else folders[:1]

    def open_split(self, split: str, folder: Path, longest: int | None, *, training: bool) -> Dataset:
        """The examples of *split* in *folder*; a task may
        cut those that are longer than *longest* tokens."""
        return self.dataset(split, training=training, folder=folder)

    def _epoch_datasets(self, split: str, model: BaseFairseqModel, training: bool, batching: Batching) -> EpochDatasets:
        """The dataset and sampler of each epoch; a single one is open."""
        folders = self.folders(training)
        skip = training or self.settings.data.skip_invalid_size_inputs_valid_test
        limit = model.max_positions()
        longest = min((number for number in (limit, batching.max_tokens) if number is not None), default=None)

        def open_folder(folder: Path) -> tuple[Dataset, Sampler]:
            dataset = _fitting(self.open_split(split, folder, longest, training=training), split, limit, skip)
            # Before the extensions wrap it: tasks look at their own classes of datasets.
            sampler = self.sampler(dataset, model, batching)
            for extension in self.extensions.values():
                dataset = extension.extend_dataset(dataset, model, split, folder, training=training)
            return dataset, sampler

        if len(folders) == 1:
            return EpochDatasets.of_one(*open_folder(folders[0]))
        # At the start for all folders: an error in the last one would show after days.
        for folder in folders:
            self.check_folder(split, folder)
        return EpochDatasets([functools.partial(open_folder, folder) for folder in folders])

    def batch_settings(self) -> dict[str, Any]:
        """Settings that determine the batches:
        with other values, a saved memory belongs to other rows."""
        return {}

    def dummy_sample(self, device: torch.device | str) -> Sample:
        """A sample without targets, for ranks with no batch left: its gradient is zero.

        It has two rows of two tokens, because a compiled model has a separate graph for sizes of 1.
        """
        tokens = torch.full((2, 2), self.source_dictionary.eos(), dtype=torch.long, device=device)
        target = torch.full_like(tokens, self.target_dictionary.pad())
        empty = {name: torch.zeros_like(tokens, dtype=torch.bool) for name in self.subsets}
        net_input = {"src_tokens": tokens}
        sample = {"nsentences": 0, "ntokens": 0, "net_input": net_input, "target": target, "subsets": empty}
        return {**sample, "positions": torch.full_like(tokens, -1)} if self.gives_positions else sample

    def loss_graph(self, model: BaseFairseqModel, criterion: FairseqCriterion) -> LossGraph:
        """Return the loss graph; raise UserError if its parts
        are incompatible or cannot carry the task's state."""
        criterion.check(model)
        for kind in self.kinds:
            kind.check(model, criterion)
        return LossGraph(model, criterion)

    def step(
        self, graph: nn.Module, sample: Sample | None, carried: Carried, device: torch.device | str
    ) -> tuple[StepOutput, Carried]:
        """Run *graph*, a :class:`LossGraph`, on *sample*,
        with the state *carried* from earlier steps.

        Returns:
            The loss, and the carried values after it, which are not stored here. An empty batch
            (None) leaves them unchanged.
        """
        if sample is None:
            return graph(self.dummy_sample(device), {})[0], carried
        inputs: dict[str, object] = {}
        for kind in self.kinds:
            inputs |= kind.inputs(carried.get(kind.name), sample)
        output, extra = graph(sample, inputs)
        return output, {kind.name: kind.advance(carried.get(kind.name), extra, sample) for kind in self.kinds}

    def commit(self, carried: Carried, model: BaseFairseqModel, world: World) -> None:
        """Commit the state *carried* by the steps of an update that counted."""
        before = self.carried
        self.carried = {
            kind.name: kind.commit(before.get(kind.name), carried.get(kind.name), model, world) for kind in self.kinds
        }

    def skip(self, carried: Carried) -> None:
        """Go on after an update that is not applied,
        whose steps *carried* finite state all the same."""
        before = self.carried
        self.carried = {kind.name: kind.skip(before.get(kind.name), carried.get(kind.name)) for kind in self.kinds}

    def restart(self) -> None:
        """Reset the carried state at the beginning of an epoch."""
        self.carried = {kind.name: kind.restart(self.carried.get(kind.name)) for kind in self.kinds}

    def save_carried(self, world: World) -> dict[str, object]:
        """The carried state for a checkpoint, complete on rank 0; call it on every rank."""
        return {kind.name: kind.save(self.carried.get(kind.name), world) for kind in self.kinds}

    def load_carried(self, saved: Mapping[str, object], rows: int, world: World) -> None:
        """Restore the state from :meth:`save_carried`;
        *rows* is the number of rows of a batch on one rank."""
        self.carried = {
            kind.name: kind.load(saved[kind.name], rows, world) for kind in self.kinds if kind.name in saved
        }


def _fitting(dataset: Dataset, split: str, limit: int | None, skip: bool) -> Dataset:
    """The examples of *split* of at most *limit* tokens;
    longer ones are left out if *skip*, else refused."""
    keep = dataset.sizes <= (limit if limit is not None else np.iinfo(np.int32).max)
    omitted = int((~keep).sum())
    if omitted:
        if not skip:
            raise UserError(
                f"{split}: {omitted} blocks are longer than the model's {limit} positions; "
                "`skip_invalid_size_inputs_valid_test` leaves them out"
            )
        logger.warning("%s: left out %d blocks longer than %d positions", split, omitted, limit)
        dataset = dataset.select(keep)
    if len(dataset) == 0:
        raise UserError(
            f"{split}: nothing is left of this split, all blocks are longer than the model's {limit} positions; "
            "raise `max_target_positions` or lower `tokens_per_sample`"
        )
    return dataset


def _batching(data: DataConfig, seed: int, training: bool, rank: int, world_size: int) -> Batching:
    """Batching from the settings *data*, for training or validation."""
    max_tokens, batch_size, limit = data.max_tokens, data.batch_size, "`max_tokens`"
    if not training:
        if data.max_tokens_valid is not None:
            max_tokens, limit = data.max_tokens_valid, "`max_tokens_valid`"
        batch_size = data.batch_size_valid or batch_size
    return Batching(
        max_tokens,
        batch_size,
        data.required_batch_size_multiple,
        seed=seed,
        curriculum=data.curriculum,
        shuffle=training,
        rank=rank,
        world_size=world_size,
        limit=limit,
    )


def check_symbols(dictionary: Dictionary, task: str, *roles: str) -> None:
    """Raise UserError if *dictionary* lacks a special symbol that the task called *task* needs."""
    for role in roles:
        if getattr(dictionary, f"{role}_index") < 0:
            raise UserError(
                f"{dictionary.path or 'dict.txt'}: `task` {task} needs a {role} symbol, which the dictionary lacks; "
                f"name one as {role}=WORD in its #specials line"
            )


def setup_task(settings: Settings, dictionary: Dictionary | None = None) -> FairseqTask:
    """Return the task that *settings* select, with its dictionary loaded, or with *dictionary*."""
    settings = typed_settings(settings)
    task: FairseqTask = set_up(TASKS[settings.chosen.task], settings, dictionary)
    return task


def get_task(name: str) -> Any:
    """The class of the task called *name*."""
    return TASKS[name]


LegacyFairseqTask = FairseqTask  # its name for tasks of the namespace, from fairseq 0.10 on
