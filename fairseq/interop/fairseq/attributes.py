"""Attributes of fairseq's tasks that tasks of this package lack, and plug-ins' have not set.

:data:`fairseq.interop.fairseq.names.ATTRIBUTES` names the class here that has each.
"""

from __future__ import annotations

from argparse import Namespace

from fairseq.data.glue import Layout
from fairseq.interop.fairseq.namespaces import namespace_of
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.dictionary import Dictionary


def args(self: FairseqTask) -> Namespace:
    """The flat namespace of a task's settings."""
    return namespace_of(self.settings)


cfg = args


def datasets(self: object) -> dict[str, object]:
    """The datasets that ``load_dataset`` stores, by split."""
    return vars(self).setdefault("datasets", {})


def layout(self: FairseqTask) -> Layout:
    """The classes or scores of a plug-in's task of sentences, for the criterion; AttributeError if
    it is none."""
    settings = self.settings.flat
    if "num_classes" not in settings:
        raise AttributeError(f"{type(self).__name__} has no classes")
    if settings.get("regression_target"):
        return Layout((), labels=(), metrics=("pearson", "spearman"), scores=max(1, settings["num_classes"]))
    return Layout((), labels=tuple(map(str, range(settings["num_classes"]))))


def output_dictionary(self: FairseqTask) -> Dictionary:
    """The dictionary of the model's output."""
    return self.target_dictionary


def targets(self: object) -> list[str]:
    """What a language model predicts: the next tokens."""
    return ["future"]


def mask_idx(self: FairseqTask) -> int:
    """The id of the symbol that stands for a masked token."""
    return int(self.source_dictionary.index("<mask>"))
