"""What every task offers to the trainer."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq import config
from fairseq.criterions import build_criterion
from fairseq.criterions.fairseq_criterion import FairseqCriterion, Sample
from fairseq.data.dataset import Dataset
from fairseq.data.dictionary import Dictionary
from fairseq.data.iterator import EpochIterator
from fairseq.data.samplers import Batching, Sampler
from fairseq.errors import UserError
from fairseq.models import ARCHITECTURES, MODELS, BaseFairseqModel
from fairseq.modules.memory import Memory, keep_rows
from fairseq.settings import CommonConfig, DataConfig

logger = logging.getLogger(__name__)

StepOutput = tuple[Tensor, int, dict[str, Any]]


class LossGraph(nn.Module):
    """A model and its criterion as one module, so that whoever wraps it sees the whole computation."""

    def __init__(self, model: BaseFairseqModel, criterion: FairseqCriterion) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion
        self.plugin = type(criterion).forward is not FairseqCriterion.forward
        if self.plugin and model.memory_length:
            raise UserError(
                f"--criterion: {type(criterion).__name__} overrides forward, so it cannot carry the model's memory "
                "(--tokens-from-prev, --mem-len); define compute_loss instead"
            )

    def forward(self, sample: Sample, memory: Memory | None = None) -> tuple[StepOutput, Memory | None]:
        """The criterion's loss on *sample*, and the memory after it."""
        if self.plugin:
            return self.criterion(self.model, sample), None
        if not sample["nsentences"]:  # a dummy sample, which has not come through the iterator
            sample = self.criterion.prepare(self.model, sample)
        net_input = sample["net_input"] if memory is None else {**sample["net_input"], "memory": memory}
        net_output = self.model(**net_input)
        extra = net_output[1] if isinstance(net_output, tuple) and len(net_output) > 1 else None
        new_memory = extra.get("memory") if isinstance(extra, dict) else None
        return self.criterion.compute_loss(self.model, net_output, sample), new_memory


class FairseqTask:
    """A registered task.

    It owns the memory that its model carries from batch to batch, one for each split.
    """

    config_class: type | None = None

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.memories: dict[str, Memory | None] = {}

    @staticmethod
    def add_args(parser: argparse.ArgumentParser) -> None:
        """Add the task's flags; tasks with a dataclass of settings need not."""

    @classmethod
    def setup_task(cls, args: argparse.Namespace, **kwargs: Any) -> FairseqTask:
        """Load what the task needs before its data, and make it."""
        return cls(args, **kwargs)

    @property
    def source_dictionary(self) -> Dictionary:
        """The dictionary of the model's input."""
        raise NotImplementedError

    @property
    def target_dictionary(self) -> Dictionary:
        """The dictionary of the model's output."""
        return self.source_dictionary

    def build_model(self, args: argparse.Namespace) -> BaseFairseqModel:
        """The model that ``args.arch`` names."""
        return MODELS[ARCHITECTURES[args.arch].model].build_model(args, self)

    def build_criterion(self, args: argparse.Namespace) -> FairseqCriterion:
        """The criterion that ``args.criterion`` names."""
        return build_criterion(args, self)

    def dataset(self, split: str, *, training: bool = False, folder: str | Path | None = None) -> Dataset:
        """Return the examples of *split* in *folder* (default: the first data folder).

        Raises:
            UserError: the data are missing or damaged.
        """
        raise NotImplementedError

    def sampler(self, dataset: Dataset, model: BaseFairseqModel, batching: Batching) -> Sampler:
        """Return the batches of *dataset* for *model*: by default examples of similar sizes together."""
        return batching.blocks(dataset.sizes, by_size=True)

    def prepare(self, sample: Sample, epoch: int, *, training: bool) -> Sample:
        """Change a sample of *epoch* on the host; anything random must depend on seed, epoch and ``id`` only."""
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

        Raises:
            UserError: the data are missing or damaged, or do not fit the model or the batches.
        """
        data = config.extract(DataConfig, self.args)
        dataset = self._fitting(split, model, training, data.skip_invalid_size_inputs_valid_test)
        batching = _batching(data, config.extract(CommonConfig, self.args).seed, training, rank, world_size)
        return EpochIterator(
            dataset,
            self.sampler(dataset, model, batching),
            prepare=lambda sample, epoch: criterion.prepare(model, self.prepare(sample, epoch, training=training)),
            prefetch=data.num_workers if torch.device(device).type == "cuda" else 0,
            device=device,
        )

    def _fitting(self, split: str, model: BaseFairseqModel, training: bool, skip: bool) -> Dataset:
        """The examples of *split* that the model can read."""
        dataset = self.dataset(split, training=training)
        limit = model.max_positions()
        keep = dataset.sizes <= (limit if limit is not None else np.iinfo(np.int32).max)
        left_out = int((~keep).sum())
        if left_out:
            if not training and not skip:
                raise UserError(
                    f"{split}: {left_out} blocks are longer than the model's {limit} positions; "
                    "--skip-invalid-size-inputs-valid-test leaves them out"
                )
            logger.warning("%s: left out %d blocks longer than %d positions", split, left_out, limit)
            dataset = dataset.select(keep)
        if len(dataset) == 0:
            raise UserError(
                f"{split}: nothing is left of this split, all blocks are longer than the model's {limit} positions; "
                "raise --max-target-positions or lower --tokens-per-sample"
            )
        return dataset

    def dummy_sample(self, device: torch.device | str) -> Sample:
        """A sample without targets, for a process that has no batch when others have: its gradient is zero."""
        tokens = torch.full((1, 2), self.source_dictionary.eos(), dtype=torch.long, device=device)
        target = torch.full_like(tokens, self.target_dictionary.pad())
        return {"nsentences": 0, "ntokens": 0, "net_input": {"src_tokens": tokens}, "target": target}

    def step(self, graph: nn.Module, sample: Sample | None, split: str, device: torch.device | str) -> StepOutput:
        """Run *graph*, a :class:`LossGraph`, on *sample*, with the memory of *split* before it, and keep the new one.

        An empty batch (None) leaves the memory as it was.
        """
        if sample is None:
            return graph(self.dummy_sample(device), None)[0]
        memory = keep_rows(self.memories.get(split), sample["nsentences"])
        output, self.memories[split] = graph(sample, memory)
        return output

    def clear_memory(self, split: str) -> None:
        """Forget what was read of *split*."""
        self.memories.pop(split, None)


def _batching(data: DataConfig, seed: int, training: bool, rank: int, world_size: int) -> Batching:
    """The batches that *data* asks for, for training or for validation."""
    max_tokens, batch_size, limit = data.max_tokens, data.batch_size, "--max-tokens"
    if not training:
        if data.max_tokens_valid is not None:
            max_tokens, limit = data.max_tokens_valid, "--max-tokens-valid"
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
