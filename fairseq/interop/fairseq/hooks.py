"""Methods that plug-ins override in fairseq's base classes: which are called, and which are refused
by name."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from fairseq.config.registry import is_outside
from fairseq.criterions import fairseq_criterion
from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.modules.output_layer import OutputLayer
from fairseq.tasks.fairseq_task import FairseqTask

logger = logging.getLogger(__name__)

REFUSED = {  # methods of a task that nothing here calls, and what to do instead
    "optimizer_step": "put it into an optimizer",
}
EXPECTED = {
    "load_dataset": "(split, combine=False, **kwargs)",
    "train_step": "(sample, model, criterion, optimizer, update_num, ignore_grad=False)",
    "valid_step": "(sample, model, criterion)",
    "get_batch_iterator": "(dataset, max_tokens, max_sentences, max_positions, ignore_invalid_inputs, …)",
    "reduce_metrics": "(logging_outputs, criterion)",
    "begin_epoch": "(epoch, model)",
    "begin_valid_epoch": "(epoch, model)",
}
ARGUMENTS: dict[str, tuple[object, ...]] = {  # as many values as the calls have
    "load_dataset": ("train",),
    "train_step": (None,) * 4,
    "valid_step": (None,) * 3,
    "get_batch_iterator": (None,),
    "reduce_metrics": (None,) * 2,
    "begin_epoch": (None,) * 2,
    "begin_valid_epoch": (None,) * 2,
}
OPTIONS = {  # passed by name to methods that take them
    "load_dataset": "epoch combine",
    "train_step": "update_num ignore_grad",
    "get_batch_iterator": "max_tokens max_sentences max_positions ignore_invalid_inputs required_batch_size_multiple "
    "seed num_shards shard_id num_workers epoch data_buffer_size disable_iterator_cache",
}
OF_MODELS = ("get_normalized_probs", "get_normalized_probs_scriptable", "get_targets")
"""Methods of models that nothing calls where an output layer computes losses and probabilities."""
WITHOUT_MEMORY = ("train_step", "valid_step", "load_dataset", "get_batch_iterator")


def overrides(part: type, name: str, base: type = FairseqTask) -> bool:
    """Return whether the class *part* overrides the method *name* of *base*."""
    return getattr(part, name, None) is not getattr(base, name, None)


def logs_itself(task: type, criterion: object) -> bool:
    """Return whether the figures of a run are what ``reduce_metrics`` of *task* or *criterion*
    logs."""
    names = ("reduce_metrics", "aggregate_logging_outputs")
    return any(overrides(task, name) for name in names) or fairseq_criterion.logs_itself(type(criterion))


def accepted(method: Callable[..., object], **options: object) -> dict[str, Any]:
    """Those *options* that *method* takes: versions of fairseq differ in them."""
    parameters = inspect.signature(method).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in options.items() if open_ended or name in parameters}


def check(task: Any, model: BaseFairseqModel, criterion: object) -> None:
    """Check the methods that *task* overrides: they must be called here, with its arguments, and
    need no memory.

    Raises:
        UserError: a check failed; the message names the method.
    """
    made = type(model)
    if is_outside(made) and isinstance(model.output_layer, OutputLayer):
        for method in OF_MODELS:
            if is_outside(getattr(made, method)):
                raise UserError(
                    f"--arch {task.settings.chosen.arch}: {made.__name__}.{method} is not called: the output layer of "
                    "the model that it extends computes losses; extend FairseqLanguageModel, with a decoder of its own"
                )
    cls, name = task.plugin, task.settings.chosen.task or type(task).__name__
    if hasattr(cls, "build_dictionary"):
        logger.warning("--task %s: build_dictionary is not called: fairseq-preprocess makes the dictionary", name)
    for method, advice in REFUSED.items():
        if overrides(cls, method):
            raise UserError(f"--task {name}: {method} is not called here; {advice}")
    for method, values in ARGUMENTS.items():
        if not overrides(cls, method):
            continue
        bound = getattr(task, method)
        try:
            # `bind` checks the signature without calling the method.
            options = accepted(bound, **dict.fromkeys(OPTIONS.get(method, "").split()))
            # fairseq passes this one to every task.
            options |= {"combine": None} if method == "load_dataset" else {}
            inspect.signature(bound).bind(*values, **options)
        except TypeError as error:
            raise UserError(f"--task {name}: {method} must take {EXPECTED[method]} ({error})") from None
        # A step of fairseq returns no memory, and its batches do not continue the rows of the last
        # ones.
        if method in WITHOUT_MEMORY and model.memory_length:
            raise UserError(
                f"--task {name}: its {method} cannot carry the model's memory "
                "(--tokens-from-prev, --mem-len); use a model without memory"
            )
