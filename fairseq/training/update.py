"""One update, from samples to the applied step.

The host synchronises once per update, because a loss or gradient that is not finite decides whether
the update is applied. Metrics stay on the device until a line of the log is due.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fairseq.criterions.fairseq_criterion import Sample
from fairseq.logging.figures import SIZE, NamedSums
from fairseq.tasks.carried import Carried
from fairseq.training import nonfinite
from fairseq.training.gradients import gradient_factor, norm_and_factor
from fairseq.training.state import TrainingState


def update(state: TrainingState, samples: Sequence[Sample | None]) -> bool:
    """Update *state* from *samples*, this process's batches (None:
    an empty one), equally many on every rank.

    Returns:
        False if nothing was updated: half-precision gradients overflowed, or the update is skipped
            because its loss or
        gradients are not finite.

    Raises:
        NonFinite: the loss or gradients are not finite, and no more updates may be skipped.
        UserError: memory does not suffice for a batch; the message gives its shape.
    """
    state.graph.train()
    state.graph.update_num = state.num_updates
    batches, loss = samples, None
    while True:
        # Forward and backward, a batch at a time. The state that steps carry goes from batch to
        # batch as a value, provisionally; gradients add up.
        carried, sums, host_size = state.task.carried, None, 0
        try:
            for number, sample in enumerate(batches):
                # Only the last backward pass reduces gradients over ranks.
                with state.reducer.accumulate(last=number == len(batches) - 1):
                    with state.precision.autocast(state.world.device):
                        (loss, targets, log), carried = state.task.step(
                            state.reducer.module, sample, carried, state.world.device
                        )
                    (loss * state.scaler.scale if state.scaler is not None else loss).backward()
                batch = NamedSums.of(log, targets, state.world.device)
                sums = batch if sums is None else sums + batch
                host_size += int(targets)
            break
        except (MemoryError, RuntimeError) as error:
            message = state.splitter.describe(error, batches, state.num_updates + 1)
        # Outside of the handler: the traceback would keep the activations alive, as would the loss.
        loss = None
        state.optimizer.zero_grad()
        batches = state.splitter.halves(batches, state.rebatch, message)
    assert sums is not None, "an update has at least one batch"

    # Reduction: the gradients' last pieces, and all sums as one vector, with the ranks' votes.
    state.reducer.reduce()
    sums = state.votes.reduced(sums)

    # Normalisation by the global number of targets, and clipping, as one factor that the optimizer
    # applies: gradients need not be rounded to float16. The number stays on the device, where
    # reading it would wait for the backward pass.
    size = host_size if state.world.size == 1 else sums[SIZE]
    factor = gradient_factor(size, state.world.size, state.scaler.scale if state.scaler is not None else 1.0)
    gnorm, factor = norm_and_factor(
        state.parameters, factor, state.cfg.clip_norm, state.world.device, state.reducer.total_norm
    )

    # The only synchronisation: whether the update is applied decides everything below.
    finite = bool(torch.isfinite(gnorm) & torch.isfinite(sums["loss"]))
    # An update without overflow counts, too: enough of them raise the scale.
    if state.scaler is not None:
        state.scaler.update(not finite)
    if finite:
        state.optimizer.scaled_step(factor)
        state.num_updates += 1
        state.task.commit(carried, state.model, state.world)
        if state.average is not None:
            state.average.update(state.num_updates)
        state.lr_scheduler.step_update(state.num_updates)
        # A percentage on the device: the log reads its mean, and no update waits for it.
        clipped = (gnorm > state.cfg.clip_norm).double() * (100.0 if state.cfg.clip_norm > 0 else 0.0)
        for meter in state.meters.values():
            meter.add(sums, gnorm=gnorm, clip=clipped)
    else:
        _skip(state, samples, carried, sums)
    state.optimizer.zero_grad()
    return finite


def _skip(state: TrainingState, samples: Sequence[Sample | None], carried: Carried, sums: NamedSums) -> None:
    """Skip the update of *samples*, which is not finite;
    raise NonFinite if no more may be skipped."""

    def find() -> nonfinite.Finding:
        parameters = dict(state.reducer.named_parameters())
        finding = nonfinite.find(
            state.graph, state.task, samples, parameters, state.precision, state.world, state.num_updates + 1
        )
        state.reducer.reset()
        return finding

    if state.scaler is not None:
        nonfinite.check_scale(state.scaler, find)
    else:
        state.skipped.skip(find())
    # A finite loss was computed from finite states, which what follows in the text continues:
    # gradients alone overflowed, most often by the loss scale. Otherwise the state stays as of the
    # last finite forward pass.
    if bool(torch.isfinite(sums["loss"])):
        state.task.skip(carried)
