"""Base class of our optimizers: float32 arithmetic
for every parameter, few kernels, no device synchronisation.

torch's own optimizers consist of ``torch._foreach_*`` as well, which have no public names.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fairseq.errors import UserError

T = TypeVar("T")
K = TypeVar("K")
Group = dict[str, Any]
"""Settings of a group of parameters, as torch's optimizers hold them."""
State = dict[str, Any]
"""What is kept of one parameter between updates, by name."""
States = list[State]
Tensors = list[Tensor]
Factor = Tensor | float | None
"""What gradients are multiplied by before an update; None: nothing."""

CHUNK = 1 << 22
"""Elements of half precision that are widened to float32 at a time: 16 MiB for each temporary
tensor."""

ROW_STEPS = "row_steps"
"""In the state of a parameter whose gradients are sparse: the number of updates of each row."""

RESET = "use another checkpoint or `reset_optimizer`"


class MultiTensorOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose update of all parameters is a handful of multi-tensor operations.

    Parameters of half precision (``--memory-efficient-fp16``) are updated in float32: their state
    is float32, and only the result is rounded. They are widened :data:`CHUNK` elements at a time,
    so that a step allocates no more than a few chunks. Updates are given contiguous tensors. They
    are elementwise, so that equal inputs give equal bits.

    Where :attr:`sliceable` is false, an update needs
    whole parameters, which are widened one at a time.

    Subclasses define :meth:`new_state` and :meth:`update`, and :meth:`begin_step` and
    :meth:`end_step` where something changes once a step.
    """

    sliceable = True

    # torch excludes these from compilation, and imports its compiler to do so: two seconds at the
    # start of every run.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    _restore = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

    def new_state(self, group: Group, zeros: Callable[[], Tensor]) -> State:
        """Return the initial state of a parameter;
        *zeros* makes a tensor of its shape in the state's dtype."""
        raise NotImplementedError

    def begin_step(self, group: Group, states: States) -> None:
        """Advance what changes once a step, however many chunks it has; before the update."""

    def update(self, group: Group, params: Tensors, grads: Tensors, states: States, factor: Factor) -> None:
        """Update *params* and the tensors of *states* in place, of one group or of a chunk of it,
        in float32 or more.

        In a chunk the tensors are one-dimensional slices of the parameters and of their states.
        Gradients count times *factor*, by which *grads* may be multiplied in place.
        """
        raise NotImplementedError

    def end_step(self, group: Group) -> None:
        """Like :meth:`begin_step`, after the update."""

    def update_rows(self, group: Group, param: nn.Parameter, state: State, factor: Factor) -> None:
        """Update the rows of *param* that have a gradient, which is sparse, and no others."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None, *, factor: Factor = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the loss, as torch's optimizers take it.
            factor: applied in float32. Gradients of half precision stay as they are, others are
                scaled in place.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if p.grad.is_sparse:
                    self.update_rows(group, p, self.state[p], factor)
            if dense := [p for p in params if not p.grad.is_sparse]:
                self._step_group(group, dense, factor)
        return loss

    def _step_group(self, group: Group, params: list[nn.Parameter], factor: Factor) -> None:
        for p in params:
            # At the first gradient, as torch does: a parameter that is never used takes no memory.
            if not self.state[p]:
                # Contiguous, as a restored state is.
                zeros = functools.partial(torch.zeros, p.shape, dtype=_wide(p), device=p.device)
                self.state[p].update(self.new_state(group, zeros))
        self.begin_step(group, [self.state[p] for p in params])
        full = [p for p in params if not _is_copied(p)]
        if full:
            grads = [p.grad.contiguous() for p in full if p.grad is not None]
            self.update(group, [p.detach() for p in full], grads, [self.state[p] for p in full], factor)
        pieces = (piece for p in params if _is_copied(p) for piece in _pieces(p, self.state[p], self.sliceable))
        for chunk in fused_groups(pieces, lambda piece: piece[0].numel(), CHUNK):
            narrow = [piece[0] for piece in chunk]
            wide, grads = [_widened(p) for p in narrow], [_widened(piece[1]) for piece in chunk]
            self.update(group, wide, grads, [piece[2] for piece in chunk], factor)
            torch._foreach_copy_(narrow, wide)
        self.end_step(group)

    def load_state_dict(self, state_dict: dict[str, Any], adopt: bool = False) -> None:
        """Restore a state in torch's layout. Its tensors are copied, to the parameter's device,
        never below float32.

        With *adopt* tensors that have device and type already are used instead.
        """
        self._restore(state_dict)
        self._check_entries()
        stored = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        # torch casts a state to the type of its parameter, so that float32 values would lose
        # digits: taken from the file again.
        for index, p in zip(stored, params, strict=True):
            self.state[p] = {name: value for name, value in self.state[p].items() if value is not None}
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    self.state[p][name] = value.to(
                        p.device, _wide(p), copy=not adopt, memory_format=torch.contiguous_format
                    )

    def _check_entries(self) -> None:
        """Raise UserError if the state of a parameter lacks
        what an update reads, or has it in another shape.

        Fused kernels trust shapes: they would write beyond a smaller tensor.
        """
        for group in self.param_groups:
            for p in group["params"]:
                # Without memory: which entries there are depends on the shape only.
                empty = functools.partial(torch.empty, p.shape, device="meta")
                # Rows have their own, checked by shape like all others.
                needed = self.new_state(group, empty) if self.state[p] and ROW_STEPS not in self.state[p] else {}
                for name, value in needed.items():
                    shape = getattr(value, "shape", ())
                    if name not in self.state[p] or getattr(self.state[p][name], "shape", ()) != shape:
                        raise UserError(f"checkpoint: its optimizer state lacks a valid {name} of a parameter; {RESET}")


class CountingOptimizer(MultiTensorOptimizer):
    """A base of optimizers whose arithmetic depends on the number of a parameter's updates,
    ``step`` in its state.

    Subclasses define :meth:`update_at`, and :meth:`new_state` unless they keep two moments.
    """

    def new_state(self, group: Group, zeros: Callable[[], Tensor]) -> State:
        return {"step": 0, "exp_avg": zeros(), "exp_avg_sq": zeros()}

    def begin_step(self, group: Group, states: States) -> None:
        for state in states:
            state["step"] = int(state["step"]) + 1

    def update(self, group: Group, params: Tensors, grads: Tensors, states: States, factor: Factor) -> None:
        scale_(grads, factor)
        for step, indices in buckets(params, (state["step"] for state in states), CHUNK):
            self.update_at(
                step, group, [params[i] for i in indices], [grads[i] for i in indices], [states[i] for i in indices]
            )

    def update_at(self, step: int, group: Group, params: Tensors, grads: Tensors, states: States) -> None:
        """Update *params* and *states* in place, as :meth:`update`
        does without a factor, in their *step*-th update."""
        raise NotImplementedError


def scale_(gradients: Tensors, factor: Factor) -> None:
    """Multiply *gradients* by *factor* in place."""
    if isinstance(factor, Tensor):
        # With --cpu-offload gradients are on the host.
        torch._foreach_mul_(gradients, factor.to(gradients[0].device) if gradients else factor)
    elif factor is not None:
        torch._foreach_mul_(gradients, float(factor))


def divisor(factor: Factor, multiple: float, device: torch.device) -> Tensor:
    """What fused kernels divide gradients by, to multiply
    them by *factor* and *multiple*: a float32 scalar.

    It is made on the device: a copy from the host would synchronise.
    """
    if isinstance(factor, Tensor):
        # In float32: a factor of half precision would round the gradients.
        return (factor.to(device, torch.float32) * multiple).reciprocal()
    return torch.full((), multiple if factor is None else multiple * factor, device=device).reciprocal()


def slices(tensor: Tensor) -> Iterator[Tensor]:
    """One-dimensional views of *tensor* of at most :data:`CHUNK`
    elements; *tensor* itself if it is not contiguous."""
    yield from tensor.view(-1).split(CHUNK) if tensor.is_contiguous() else (tensor,)


def fused_groups(items: Iterable[T], numel: Callable[[T], int], largest: float) -> Iterator[list[T]]:
    """*items* in order, in lists of at most *largest* elements or one item, so that temporary
    tensors are small."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and size + numel(item) > largest:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += numel(item)
    if batch:
        yield batch


def buckets(tensors: Tensors, keys: Iterable[K], largest: float) -> Iterator[tuple[K, list[int]]]:
    """Indices of *tensors* with equal *keys*, after their key; see :func:`fused_groups`."""
    members: dict[K, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        members[key].append(index)
    for key, indices in members.items():
        for bucket in fused_groups(indices, lambda index: tensors[index].numel(), largest):
            yield key, bucket


def _pieces(p: nn.Parameter, state: State, sliceable: bool) -> Iterator[tuple[Tensor, Tensor, State]]:
    """Slices of a parameter, of its gradient, and of its state."""
    assert p.grad is not None
    if not (sliceable and p.is_contiguous() and p.grad.is_contiguous()):
        yield p.detach(), p.grad, state
        return
    # Other entries, such as counts or Adafactor's means, belong to the whole parameter.
    of_shape = {name: v for name, v in state.items() if isinstance(v, Tensor) and v.dim() > 0 and v.shape == p.shape}
    sliced = {name: value.view(-1).split(CHUNK) for name, value in of_shape.items()}
    for number, (piece, grad) in enumerate(zip(slices(p.detach()), slices(p.grad), strict=True)):
        yield piece, grad, {**state, **{name: values[number] for name, values in sliced.items()}}


def _is_copied(p: Tensor) -> bool:
    """Return whether *p* is updated in a copy: of half precision,
    or not contiguous (fused kernels ignore strides)."""
    return is_half(p) or not p.is_contiguous()


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if is_half(tensor) else tensor.dtype


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(_wide(tensor)).contiguous()


def is_half(tensor: Tensor) -> bool:
    """Return whether *tensor* is float16 or bfloat16."""
    return tensor.dtype in (torch.float16, torch.bfloat16)
