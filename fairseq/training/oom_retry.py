"""Batches that exceed memory: their shape in the error message,
or with ``--oom-retry`` their halves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from fairseq.criterions.fairseq_criterion import Sample
from fairseq.errors import UserError, is_out_of_memory, out_of_memory_message
from fairseq.models.base import BaseFairseqModel
from fairseq.modules import devices

logger = logging.getLogger(__name__)

Samples = Sequence[Sample | None]
Rebatch = Callable[[np.ndarray], Sample]
"""Returns the examples of the given numbers, int64 [B], as one sample on the device."""


class BatchSplitter:
    """Repetition of the passes of an update with smaller batches, where memory does not suffice.

    Losses are sums over targets, and gradients are divided once an update, so that the halves add
    up to the whole, but for rounding and other random numbers of dropout.

    Args:
        enabled: ``--oom-retry``; otherwise a batch that exceeds memory is an error.
        model: without memory, whose rows continue from batch to batch.
        repeatable: whether a process may repeat its passes alone: there are no others, or gradients
            are reduced after the last pass only.

    Raises:
        UserError: *enabled*, and batches of *model*
            cannot be split or the passes cannot be repeated.
    """

    def __init__(self, enabled: bool, model: BaseFairseqModel, repeatable: bool) -> None:
        self.enabled = enabled
        if enabled and model.memory_length:
            raise UserError(
                "`oom_retry`: rows of a model with memory continue from batch to batch and cannot be split; "
                "lower `max_tokens` or `batch_size`"
            )
        if enabled and not repeatable:
            raise UserError(
                "`oom_retry`: with several processes needs `ddp_backend` no_c10d, which reduces gradients after the "
                "last pass"
            )

    def message_or_raise(self, error: Exception, samples: Samples, update: int) -> str:
        """Return the message of *update*, whose *samples* exceed memory; an *error* of another kind
        is raised again."""
        if not is_out_of_memory(error):
            raise error
        return out_of_memory_message(error, f"in update {update} on {_shapes(samples)}")

    def halves_or_raise(self, samples: Samples, rebatch: Rebatch | None, message: str) -> Samples:
        """Return *samples* in batches of half their rows.

        Batches that are not split, or have one row each, are a UserError with *message*.
        """
        if not self.enabled or rebatch is None:
            raise UserError(message)
        halves: list[Sample | None] = []
        for sample in samples:
            rows = 0 if sample is None else len(sample.get("id", ()))
            if sample is None or rows < 2:
                halves.append(sample)
            else:
                ids = sample["id"].cpu().numpy()
                halves += [rebatch(ids[: rows // 2]), rebatch(ids[rows // 2 :])]
        if len(halves) == len(samples):
            raise UserError(message)
        # The cached blocks have the sizes of the larger batches and cannot serve the smaller ones.
        devices.release_memory()
        logger.warning("%s; repeated as %s", message.partition(":")[0], _shapes(halves))
        return halves


def _shapes(samples: Samples) -> str:
    """The largest batch of *samples*."""
    shapes = [sample["net_input"]["src_tokens"].shape for sample in samples if sample is not None]
    rows, tokens = max(shapes, key=lambda shape: shape.numel(), default=(0, 0))
    many = f"{len(samples)} batches of up to " if len(samples) > 1 else "a batch of "
    return f"{many}{rows} rows × {tokens} tokens"
