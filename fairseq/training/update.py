"""One update, from samples to the applied step.

The host synchronises once per applied update, to see that loss and gradient are finite.
Metrics stay on the device until the log or the progress bar shows them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fairseq.criterions.fairseq_criterion import Sample
from fairseq.data.iterator import chunks_of
from fairseq.logging.figures import SIZE, NamedSums
from fairseq.tasks.carried import Carried
from fairseq.training import nonfinite
from fairseq.training.gradients import gradient_factor, norm_and_factor
from fairseq.training.state import TrainingState


def update(state: TrainingState, samples: Sequence[Sample | None]) -> bool:
    """Update *state* from *samples*, this process's batches, as many on every rank; None for an
    empty one. They are used up, also by an update that is skipped.

    Returns:
        False if the update was skipped, because its loss or gradients are not finite: weights and
        ``num_updates`` are as before; loss scale, count of skips and carried state may change.

    Raises:
        NonFinite: no more updates may be skipped; with a loss scale, no lower scale is left.
        UserError: memory does not suffice for a batch; the message gives its shape.
    """
    state.graph.train()
    state.graph.update_num = state.num_updates
    # A batch may be read in chunks of its rows, which are batches that share its memory.
    batches: Sequence[Sample | None]
    batches = [chunk for sample in samples for chunk in chunks_of(sample, state.cfg.batch_chunk)]
    loss = None
    while True:
        # Forward and backward, a batch at a time, in one round, unless memory does not suffice:
        # then all passes are repeated with halved batches. The state that steps carry begins a
        # round as last committed and goes from batch to batch as a value; gradients add up.
        carried, sums, host_size = state.task.carried, None, 0
        try:
            for number, sample in enumerate(batches):
                # With DDP, only the last backward pass reduces gradients over ranks.
                with state.reducer.accumulate(last=number == len(batches) - 1):
                    with state.precision.autocast(state.world.device):
                        # targets: what the gradient is divided by, a number on the host.
                        (loss, targets, log), carried = state.task.step(
                            state.reducer.module, sample, carried, state.world.device
                        )
                    (loss * state.scaler.scale if state.scaler is not None else loss).backward()
                batch = NamedSums.of(log, targets, state.world.device)
                sums = batch if sums is None else sums + batch
                host_size += int(targets)
            break
        except (MemoryError, RuntimeError) as error:
            message = state.splitter.message_or_raise(error, batches, state.num_updates + 1)
        # Outside of the handler: the traceback would keep the activations alive, as would the loss.
        loss = None
        state.optimizer.zero_grad()
        batches = state.splitter.halves_or_raise(batches, state.rebatch, message)
    assert sums is not None, "an update has at least one batch"

    # Reduction: gradients that the passes have not reduced (DDP: none), and all sums as one vector
    # over ranks, which also carries the callbacks' votes (stop, save, time limit).
    state.reducer.reduce()
    sums = state.votes.reduced(sums)

    # One factor divides by the global number of targets and the loss scale, and clips. The
    # optimizer applies it: gradients need not be rounded to float16. With several processes the
    # number is on the device, where reading it would wait for the backward pass.
    size = host_size if state.world.size == 1 else sums[SIZE]
    factor = gradient_factor(size, state.world.size, state.scaler.scale if state.scaler is not None else 1.0)
    gnorm, factor = norm_and_factor(
        state.parameters, factor, state.cfg.clip_norm, state.world.device, state.reducer.total_norm
    )

    # The only wait of an applied update. Both values are reduced: all ranks decide alike.
    finite = bool(torch.isfinite(gnorm) & torch.isfinite(sums["loss"]))
    # An overflow lowers the scale, enough updates without one raise it.
    if state.scaler is not None:
        state.scaler.update(not finite)
    if finite:
        state.optimizer.scaled_step(factor)
        state.num_updates += 1
        state.task.commit(carried, state.model, state.world)
        if state.average is not None:
            state.average.update(state.num_updates)
        state.lr_scheduler.step_update(state.num_updates)  # the rate of the next update
        # A percentage on the device: the log reads its mean, and no update waits for it.
        clipped = (gnorm > state.cfg.clip_norm).double() * (100.0 if state.cfg.clip_norm > 0 else 0.0)
        for meter in state.meters.values():
            meter.add(sums, gnorm=gnorm, clip=clipped)
    else:
        _skip(state, batches, carried, sums)
    state.optimizer.zero_grad()
    return finite


def _skip(state: TrainingState, samples: Sequence[Sample | None], carried: Carried, sums: NamedSums) -> None:
    """Handle an update of *samples* that is not finite: count it, or raise NonFinite."""

    def find() -> nonfinite.Finding:
        parameters = dict(state.reducer.named_parameters())
        finding = nonfinite.find(
            state.graph, state.task, samples, parameters, state.precision, state.world, state.num_updates + 1
        )
        state.reducer.reset()
        return finding

    # Overflows of float16 are expected: they are searched for only when no lower scale is left.
    if state.scaler is not None:
        nonfinite.check_scale(state.scaler, find)
    else:
        state.skipped.skip(find())
    # With a finite loss the carried state is finite, too, and follows the text: gradients alone
    # overflowed, most often by the loss scale. Otherwise it stays as it was before this update.
    if bool(torch.isfinite(sums["loss"])):
        state.task.skip(carried)
