"""Extensions: what changes data and model of a task from outside, by settings of its own.

An extension is registered in :data:`~fairseq.config.registry.EXTENSIONS` under the name of the switch among its
settings. Where the switch is on, a task makes one of itself; no task or model knows any by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from fairseq.data.dataset import Dataset
from fairseq.models import BaseFairseqModel
from fairseq.tasks.carried import CarriedState


class Extension(Protocol):
    """An extension of one task, made as ``cls(task)`` while the task is."""

    decisive_settings: ClassVar[tuple[str, ...]]
    """Settings of the extension that change what a model computes, but not the names and shapes of its parameters."""
    loading_settings: ClassVar[tuple[str, ...]]
    """Settings of how a checkpoint is used, which :meth:`finished` and :meth:`measured` read; none stores them."""
    kinds: ClassVar[tuple[CarriedState, ...]]
    """Further kinds of state that a step hands to the next."""
    subsets: ClassVar[tuple[str, ...]]
    """Names of the subsets of tokens that its samples mark."""

    @staticmethod
    def extends(part: Any) -> bool:
        """Return whether *part*, a registered class, is a task that has this extension's settings."""

    @staticmethod
    def extend_model(model: BaseFairseqModel, cfg: Any, task: Any) -> None:
        """Add to *model*, just built for *task*, what *cfg* says, the settings of the extension."""

    @staticmethod
    def finished(
        args: Mapping[str, Any], parameters: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Settings and parameters of a model that is used without the extension, unless *args* keep it."""

    @staticmethod
    def measured(args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Settings of the task that evaluates a model with *args*, changed as these ask for."""

    def extend_dataset(
        self, dataset: Dataset, model: BaseFairseqModel, split: str, folder: Path, *, training: bool
    ) -> Dataset:
        """The examples of *split* in *folder*, selected, with what *model* reads of them in addition."""
