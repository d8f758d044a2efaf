"""Gradients: dynamic loss scaling for float16, and their norm and clipping without copies or
waiting for the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fairseq.config.settings import CommonConfig
from fairseq.optim.elementwise import is_half, slices

logger = logging.getLogger(__name__)

# After as many halvings, the largest float32 would be smaller than the smallest: no scale is left
# that was not tried. Only --threshold-loss-scale and --fp16-scale-tolerance let a run get here.
LIMIT = 256

_STATE = ("scale", "updates", "last_rescale", "overflows", "last_overflow", "overflows_in_a_row")


class LossScaler:
    """Dynamic loss scaling: halved on overflow,
    doubled after ``window`` updates in a row without one.

    Without ``--fp16-scale-window`` the window is 2^14 batches, those of all *processes* together:
    :meth:`begin_epoch` says how many an update reads.
    """

    def __init__(self, common: CommonConfig, processes: int) -> None:
        self.scale = common.fp16_init_scale
        self.processes = processes
        self.fixed_window = common.fp16_scale_window
        self.begin_epoch(1)
        self.tolerance = common.fp16_scale_tolerance
        self.lowest = common.min_loss_scale
        self.threshold = common.threshold_loss_scale
        self.updates = self.last_rescale = self.overflows = self.last_overflow = self.overflows_in_a_row = 0

    def begin_epoch(self, update_freq: int) -> None:
        """Set the window for an epoch whose updates read *update_freq* batches on each process."""
        self.window = self.fixed_window or max(1, 2**14 // self.processes // update_freq)

    def update(self, overflow: bool) -> None:
        """Record one update; an overflow is logged."""
        self.updates += 1
        if overflow:
            self._overflow()
            return
        self.overflows_in_a_row = 0
        # A tolerated overflow leaves the scale as it is, and starts the window anew.
        if (self.updates - max(self.last_rescale, self.last_overflow)) % self.window == 0:
            self._rescale(self.scale * 2.0)

    def exhausted(self) -> str | None:
        """Return which bound says that no scale helps any more, naming its flag; None while
        training may go on."""
        if self.scale < self.lowest:
            return f"the loss scale fell below `min_loss_scale` {self.lowest:g}"
        if self.overflows_in_a_row < LIMIT:
            return None
        bounds = {"`threshold_loss_scale`": self.threshold, "`fp16_scale_tolerance`": self.tolerance}
        in_force = "".join(f", {flag} {value:g}" for flag, value in bounds.items() if value)
        return f"{LIMIT} updates in a row overflowed, the last one at loss scale {self.scale:g}{in_force}"

    def state_dict(self) -> dict[str, float | int]:
        """Return what changes."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore a state."""
        for name in _STATE:
            if name in state:
                setattr(self, name, state[name])

    def _overflow(self) -> None:
        self.last_overflow = self.updates
        self.overflows += 1
        self.overflows_in_a_row += 1
        # By the share of overflows since the last change,
        # so that --fp16-scale-tolerance can ignore single ones.
        if self.overflows / (self.updates - self.last_rescale) >= self.tolerance:
            lowered = self.scale / 2.0
            self._rescale(lowered if self.threshold is None else max(lowered, self.threshold))
        logger.info("NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: %s", self.scale)

    def _rescale(self, scale: float) -> None:
        self.scale = scale
        self.last_rescale = self.updates
        self.overflows = 0


def gradient_factor(targets: int | Tensor, processes: int, scale: float = 1.0) -> Tensor | float:
    """Return the reciprocal of what summed gradients are divided by: an update's *targets* times
    the loss *scale*.

    Args:
        targets: of all *processes*; on the device,
            where reading it would synchronise, if there are several.
    """
    if isinstance(targets, Tensor):
        # Reducers average over processes: the sum over
        # all targets is the average times their number.
        return processes / (targets.clamp(min=1).float() * scale)
    return 1.0 / (max(targets, 1) * scale)


def values_of(gradient: Tensor) -> Tensor:
    """The values of *gradient*; of a sparse and coalesced one, those of its rows."""
    return gradient.values() if gradient.is_sparse else gradient


def norm_and_factor(
    parameters: Sequence[torch.nn.Parameter],
    factor: Tensor | float,
    clip_norm: float,
    device: torch.device,
    total: Callable[[Tensor], Tensor] = lambda norm: norm,
) -> tuple[Tensor, Tensor | float]:
    """Return the norm of the gradients times *factor*, and *factor* lowered to clip that norm.

    Gradients stay as they are: the optimizer applies the factor, in float32.

    Args:
        parameters: those without a gradient do not count.
        factor: the reciprocal of what gradients are divided by,
            a number or a float32 scalar on *device*.
        clip_norm: the largest norm after clipping; 0: no clipping.
        total: returns the norm of all gradients from the norm of the local ones, where other
            processes have parts, too.

    Returns:
        The norm before clipping, a float32 scalar on *device*,
        and the factor: a scalar too, or a number.
    """
    gradients = [values_of(p.grad) for p in parameters if p.grad is not None]
    # torch widens a whole tensor of half precision before it reduces it, so it gets slices.
    pieces = [piece for gradient in gradients for piece in (slices(gradient) if is_half(gradient) else (gradient,))]
    norms = torch._foreach_norm(pieces, 2, torch.float32) if pieces else [torch.zeros((), device=device)]
    gnorm = total(torch.linalg.vector_norm(torch.stack(norms)).to(device)) * factor
    if clip_norm > 0:
        # 1e-6 as torch.nn.utils.clip_grad_norm_ and fairseq have it.
        factor = factor * (clip_norm / (gnorm + 1e-6)).clamp(max=1.0)
    return gnorm, factor
