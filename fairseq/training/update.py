"""One update, from samples to the applied step.

The host synchronises once, to see that loss and gradient are finite and what ranks ask for. Metrics
stay on the device until a line of the log is due.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fairseq.criterions.fairseq_criterion import Sample
from fairseq.data.iterator import chunks_of
from fairseq.errors import UserError, is_out_of_memory, out_of_memory_message
from fairseq.logging.figures import SIZE, NamedSums
from fairseq.modules import devices
from fairseq.tasks.carried import Carried
from fairseq.training import nonfinite
from fairseq.training.gradients import gradient_factor, norm_and_factor
from fairseq.training.state import Requests, TrainingState

Samples = Sequence[Sample | None]


def update(state: TrainingState, samples: Samples, ask: Callable[[], Requests] = Requests) -> bool:
    """Update *state* from *samples*, this process's batches, as many on every rank; None for an
    empty one. They are used up, also by an update that is skipped.

    *ask* tells, while the device computes, what this rank asks of all of them; ``state.requests``
    is then what any rank asked for.

    Returns:
        False if the update was skipped, because its loss or gradients are not finite: weights and
        ``num_updates`` are as before; loss scale, count of skips and carried state may change.

    Raises:
        NonFinite: no more updates may be skipped; with a loss scale, no lower scale is left.
        UserError: memory does not suffice for a batch; the message gives its shape.
    """
    world, scale = state.world, state.scaler.scale if state.scaler is not None else 1.0
    state.graph.train()
    state.graph.update_num = state.num_updates
    # A batch may be read in chunks of its rows, which are batches that share its memory.
    batches = [chunk for sample in samples for chunk in chunks_of(sample, state.cfg.batch_chunk)]

    # Forward and backward, a batch at a time. The state that steps carry begins as last committed
    # and goes from batch to batch as a value; gradients add up.
    carried, sums, host_size = state.task.carried, None, 0
    try:
        for number, sample in enumerate(batches):
            # With DDP, only the last backward pass reduces gradients over ranks.
            with state.reducer.accumulate(last=number == len(batches) - 1):
                with state.precision.autocast(world.device):
                    # targets: what the gradient is divided by, a number on the host.
                    (loss, targets, log), carried = state.task.step(state.reducer.module, sample, carried, world.device)
                (loss * scale if state.scaler is not None else loss).backward()
            batch = NamedSums.of(log, targets, world.device)
            sums = batch if sums is None else sums + batch
            host_size += int(targets)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        where = f"in update {state.num_updates + 1} on {_largest(batches)}"
        raise UserError(out_of_memory_message(error, where)) from None
    assert sums is not None, "an update has at least one batch"

    # Reduction: gradients that the passes have not reduced (DDP: none), then all sums and the
    # ranks' requests as one vector.
    state.reducer.reduce()
    sums = sums.gathered(world)  # of a plug-in's log, which needs the outputs of all ranks
    requests = ask()  # of this rank
    if world.size > 1:
        votes = devices.move(torch.tensor(requests, dtype=sums.values.dtype), sums.values.device)
        total = NamedSums((*sums.names, *Requests._fields), torch.cat([sums.values, votes]), sums.rows).reduced(world)
        votes = total.values[len(sums.names) :]  # of any rank
        sums = NamedSums(sums.names, total.values[: len(sums.names)], total.rows)

    # One factor divides by the global number of targets and the loss scale, and clips. The
    # optimizer applies it: gradients need not be rounded to float16. With several processes the
    # number is on the device, where reading it would wait for the backward pass.
    factor = gradient_factor(host_size if world.size == 1 else sums[SIZE], world.size, scale)
    gnorm, factor = norm_and_factor(
        state.parameters, factor, state.cfg.clip_norm, world.device, state.reducer.total_norm
    )

    # The only wait for the device. All of it is reduced: ranks decide alike.
    is_finite = torch.isfinite(gnorm) & torch.isfinite(sums["loss"])
    if world.size > 1:
        finite, *of_any = map(bool, torch.cat([is_finite.view(1).to(votes), votes]).tolist())
        requests = Requests(*of_any)
    else:
        finite = bool(is_finite)
    state.requests = requests

    # An overflow lowers the scale, enough updates without one raise it.
    if state.scaler is not None:
        state.scaler.update(not finite)
    if finite:
        if state.average is not None:
            state.average.before_update()
        state.optimizer.scaled_step(factor)
        state.num_updates += 1
        state.metric = None  # of the former weights
        state.task.commit(carried, state.model, world)
        if state.average is not None:
            state.average.update(state.num_updates)
        state.lr_scheduler.step_update(state.num_updates)  # the rate of the next update
        # A percentage on the device: the log reads its mean, and no update waits for it.
        clipped = devices.exact(gnorm > state.cfg.clip_norm) * (100.0 if state.cfg.clip_norm > 0 else 0.0)
        for meter in state.meters.values():
            meter.add(sums, gnorm=gnorm, clip=clipped)
    else:
        _skip(state, batches, carried, sums)
    state.optimizer.zero_grad()
    return finite


def _skip(state: TrainingState, samples: Samples, carried: Carried, sums: NamedSums) -> None:
    """Handle an update of *samples* that is not finite: count it, or raise NonFinite."""

    def find() -> nonfinite.NonFiniteReport:
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


def _largest(samples: Samples) -> str:
    """The largest of *samples*, as a message describes it."""
    shapes = [sample["net_input"]["src_tokens"].shape for sample in samples if sample is not None]
    rows, tokens = max(shapes, key=lambda shape: shape.numel(), default=(0, 0))
    many = f"{len(samples)} batches of up to " if len(samples) > 1 else "a batch of "
    return f"{many}{rows} rows × {tokens} tokens"
