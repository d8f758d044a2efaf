"""Muon: momentum made orthogonal for the hidden matrices, Adam for the other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq.config.fields import typed
from fairseq.errors import SettingError
from fairseq.modules.precision import fastest
from fairseq.optim.adam import Adam, FairseqAdam
from fairseq.optim.elementwise import Factor, Group, State, States, Tensors, buckets, scale_
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.groups import HIDDEN, hidden_apart
from fairseq.optim.settings import MuonConfig

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration: singular values reach 1 ± 0.3 in few steps (Jordan et al.
2024)."""

ADAM_RMS = 0.2
"""Root mean square of Adam's update at rate 1, to which a matrix's is scaled: one rate serves
both."""

BATCH = 1 << 24
"""Elements of equally shaped matrices that are orthogonalised together: 64 MiB of float32 for each
temporary tensor."""


class FairseqMuon(FairseqOptimizer):
    """``--optimizer muon``: :class:`Muon` for the matrices
    inside the layers, Adam for everything else.

    Embeddings, output layers, norms and biases are Adam's, also where they are matrices.
    ``--muon-lr`` follows the schedule of ``--lr``. With ``--bf16`` the iteration runs in bfloat16,
    whose error it corrects.
    """

    config_class = MuonConfig
    group_settings = {**FairseqAdam.group_settings, "momentum": "muon_momentum"}

    @classmethod
    def group_of(cls, name: str, role: str) -> Mapping[str, object]:
        return hidden_apart(name, role)

    def __init__(self, args: MuonConfig, params: Iterable[object]) -> None:
        super().__init__(args)
        self.config = config = typed(MuonConfig, args)
        groups: list[dict[str, Any]] = [p if isinstance(p, dict) else {"params": [p]} for p in params]
        if not any(group.get("group") == HIDDEN for group in groups):
            raise SettingError(
                "`optimizer` muon: the model has no transformer layers with matrices; use `optimizer` adam"
            )
        rate = config.muon_lr if config.muon_lr is not None else config.lr[0]
        factor = rate / config.lr[0] if config.lr[0] else 1.0
        groups = [{**group, "lr_factor": factor} if group.get("group") == HIDDEN else group for group in groups]
        self._optimizer = Muon(
            groups,
            iterations=config.muon_iterations,
            dtype=torch.bfloat16 if config.bf16 else torch.float32,
            **self.optimizer_config,
        )
        # Torch gave every group the same rate; this applies the factors.
        self.set_lr(config.lr[0])


class Muon(Adam):
    """Orthogonal updates for the groups of hidden matrices, :class:`~fairseq.optim.adam.Adam` for
    the other groups.

    With momentum buffer b ← μ·b + g and update u = g + μ·b (Nesterov), p ← p − η·(λ·p + 0.2·√max(n,
    m)·NS(u)), where NS(u) is the matrix u of n × m with its singular values near 1. Signs and
    relative sizes of rates are as in Adam.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et
    al. 2025, "Muon is scalable for LLM training", section 2.2, for the weight decay and the scale.

    Args:
        lr: rate of a group, unless it has its own.
        momentum: μ.
        dtype: precision of the iterations.
        adam: settings of Adam's groups; its weight decay applies to the matrices, too.
    """

    # A part of a matrix has other singular values.
    sliceable = False

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float, iterations: int, dtype: torch.dtype, **adam: Any
    ) -> None:
        super().__init__(params, lr, **adam)
        self.iterations, self.dtype = iterations, dtype
        for group in self.param_groups:
            if group.get("group") == HIDDEN:
                group["momentum"] = momentum

    def new_state(self, group: Group, zeros: Callable[[], Tensor]) -> State:
        return {"momentum_buffer": zeros()} if group.get("group") == HIDDEN else super().new_state(group, zeros)

    def begin_step(self, group: Group, states: States) -> None:
        if group.get("group") != HIDDEN:
            super().begin_step(group, states)

    def update(self, group: Group, params: Tensors, grads: Tensors, states: States, factor: Factor) -> None:
        if group.get("group") != HIDDEN:
            super().update(group, params, grads, states, factor)
            return
        scale_(grads, factor)
        buffers = [state["momentum_buffer"] for state in states]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, grads)
        updates = list(torch._foreach_add(grads, buffers, alpha=group["momentum"]))
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        for _, indices in buckets(updates, (update.shape for update in updates), BATCH * _ranks()):
            matrices = self._orthogonal([updates[i] for i in indices])
            # An orthogonal n × m matrix has the root mean square 1 / √max(n, m): this makes it 0.2
            # for every shape.
            scale = ADAM_RMS * max(matrices.shape[-2:]) ** 0.5
            steps = [matrix.to(params[i].dtype) for i, matrix in zip(indices, matrices, strict=True)]
            torch._foreach_add_([params[i] for i in indices], steps, alpha=-group["lr"] * scale)

    def _orthogonal(self, updates: Tensors) -> Tensor:
        """*updates*, equal on all processes, as orthogonal matrices [N, n, m].

        Each process iterates a share of them, and gets the others' results: the iteration takes far
        longer than to send its result.
        """
        dtype = fastest(self.dtype, updates[0].device)
        ranks = _ranks()
        if ranks == 1 or len(updates) == 1:
            return orthogonal(torch.stack(updates).to(dtype), self.iterations)
        share = -(-len(updates) // ranks)
        own = torch.zeros(share, *updates[0].shape, dtype=dtype, device=updates[0].device)
        if mine := updates[share * dist.get_rank() :][:share]:
            own[: len(mine)] = orthogonal(torch.stack(mine).to(dtype), self.iterations)
        matrices = own.new_empty(share * ranks, *own.shape[1:])
        # As bytes: gloo sends no bfloat16.
        dist.all_gather(list(matrices.view(torch.uint8).split(share)), own.view(torch.uint8))
        return matrices[: len(updates)]


def _ranks() -> int:
    """Processes that make the same update."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def orthogonal(matrices: Tensor, iterations: int) -> Tensor:
    """Return *matrices* [N, n, m] with singular values near 1: U·Vᵀ of U·S·Vᵀ, to within 0.3 of
    each singular value.

    A quintic Newton-Schulz iteration, X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ, from X of Frobenius
    norm 1. A zero matrix stays one.

    Source: Jordan et al. 2024; Higham 2008, "Functions
    of matrices", section 8.3, for the iteration.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # [N, short, long]: the products below are of the shorter side
    # The bound leaves a zero matrix at zero instead of NaN.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT  # [N, short, short]
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
