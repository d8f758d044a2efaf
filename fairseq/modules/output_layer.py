"""Output layers: the interface, and the plain softmax with its cross entropy.

The [N, V] matrix of logits is the largest thing a language model computes. Here it exists some rows
at a time: a chunk's logits are turned into its loss and, while they are in cache, into the
gradients of both factors, so the backward pass only scales them: three matrix products, which is
the minimum, and memory for one chunk. torch's ``F.linear_cross_entropy`` is slower on CPUs and less
exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.modules import devices
from fairseq.modules.dispatch import kernels, on_cpu
from fairseq.modules.linear import is_by_onednn, linear, lowered, outer

# Logits of a chunk: 4 MiB in float32, which stay in a CPU's cache; on a GPU enough to fill it.
_CHUNK_ELEMENTS, _GPU_CHUNK_ELEMENTS = 1 << 20, 1 << 26
# Rows of a product by oneDNN are a multiple of it: that compiles kernels for each number of rows,
# which takes longer than the products of a narrow tail band, whose number of words changes from
# batch to batch.
_ROWS = 64
# With gradients, a chunk leaves a CPU's cache: every chunk adds to the weight's gradient [V, C]
# once more, which costs more, most of all in bfloat16 (twice the time of one chunk at 160 rows,
# 32,769 words, C = 768). C rows of logits take no more memory than that gradient, and with their
# transpose twice as much.
_GRADIENT_FACTOR = 8
_MOST_ELEMENTS = 1 << 26  # of them: 256 MiB


class OutputLayer(nn.Module):
    """The distribution over words, with three entry points that avoid materialising unused logits.

    A *partition* is the part of the loss that depends on the targets alone. It is made on the host,
    so that the loss needs no synchronisation with the device.
    """

    def partition(self, target: Tensor, padding_idx: int, band_padding: bool = False) -> Any:
        """Rows of *target* [N], on the CPU, that are not
        padding (None: all of them), and their targets."""
        keep = target != padding_idx
        if bool(keep.all()):
            return None, target
        rows = keep.nonzero().squeeze(1)
        return rows, target[rows]

    def loss(self, hidden: Tensor, partition: Any) -> Tensor:
        """Summed negative log-likelihood (natural log) of the targets that *partition* was made of;
        hidden [N, C]."""
        raise NotImplementedError

    def target_log_probs(self, hidden: Tensor, target: Tensor, chunk: int | None = None) -> Tensor:
        """Log-probability of each target: hidden [N, C],
        target [N], best on the CPU → [N]. No gradient."""
        raise NotImplementedError

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words: hidden [..., C] → [..., V]."""
        raise NotImplementedError


class LinearOutput(OutputLayer):
    """The plain softmax over one weight [V, C],
    which may be the embeddings' own, and a bias [V] or none."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def loss(self, hidden: Tensor, partition: tuple[Tensor | None, Tensor]) -> Tensor:
        rows, target = partition
        # Before what precedes the projection: most tokens
        # of a masked language model have no target.
        chosen = hidden if rows is None else select_rows(hidden, rows)
        return linear_cross_entropy(self._transform(chosen), self.weight, target, self.bias)

    def target_log_probs(self, hidden: Tensor, target: Tensor, chunk: int | None = None) -> Tensor:
        target = devices.move(target, hidden.device)
        return target_log_probs(self._transform(hidden), self._logits, self.weight.size(0), target, chunk)

    def log_probs(self, hidden: Tensor) -> Tensor:
        return self._logits(self._transform(hidden)).float().log_softmax(-1)

    def _transform(self, hidden: Tensor) -> Tensor:
        """What the projection is applied to, for hidden
        states [..., C]; in subclasses layers before it."""
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight, self.bias)


def move_partition(partition: object, device: torch.device) -> Any:
    """*partition* with its tensors on *device*, copied without waiting."""
    if isinstance(partition, Tensor):
        return devices.move(partition, device)
    if isinstance(partition, tuple | list):
        return type(partition)(move_partition(part, device) for part in partition)
    return partition


def select_rows(hidden: Tensor, rows: Tensor) -> Tensor:
    """The *rows* [n] of *hidden* [N, C], and, for oneDNN, some more that no target belongs to."""
    if on_cpu(hidden) and (lowered(hidden[:0]).dtype != torch.float32 or is_by_onednn(hidden, hidden)):
        rows = F.pad(rows, (0, -rows.size(0) % _ROWS))
    return hidden.index_select(0, rows)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
    """Sum over n of −log softmax(W h_n + b)[target_n], in float32 (a scalar).

    Under autocast the matrix products run in the lower precision; logits' normalisation and the sum
    stay in float32.

    Shape: hidden [≥ N, C], weight [V, C], target [N] with values in 0 … V − 1, bias [V]. N may be
    0; rows of *hidden* beyond it, as :func:`select_rows` makes them, add nothing.

    Raises:
        ValueError: there are fewer rows than targets, or more than are made.
    """
    if not 0 <= hidden.size(0) - target.size(0) < _ROWS:
        raise ValueError(f"target {list(target.shape)}: expected one word for each of {hidden.size(0)} hidden states")
    learned = (hidden, weight) if bias is None else (hidden, weight, bias)
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in learned)
    return _LinearCrossEntropy.apply(hidden, weight, bias, target, needs_grad)


def target_log_probs(
    hidden: Tensor, logits_of: Callable[[Tensor], Tensor], words: int, target: Tensor, chunk: int | None = None
) -> Tensor:
    """log softmax(logits_of(h_n))[target_n] for each n, without gradient: [N], float32.

    *words* logits of at most *chunk* rows exist at once. Shape: hidden [≥ N, C], target [N].
    """
    lprobs = []
    for rows in row_chunks(hidden.size(0), words, hidden.device, chunk):
        some = target[rows]
        lprobs.append(-F.cross_entropy(logits_of(hidden[rows])[: len(some)].float(), some, reduction="none"))
    return torch.cat(lprobs or [hidden.new_empty(0, dtype=torch.float32)])


def row_chunks(
    rows: int, columns: int, device: torch.device, most: int | None = None, least: int = 0
) -> Iterator[slice]:
    """*rows* of *columns* logits, *least* to *most* at a time: few enough for a CPU's cache, enough
    to fill a GPU."""
    # Fewer than 64 rows make a slow matrix product, however large the vocabulary.
    elements = _CHUNK_ELEMENTS if device.type == "cpu" else _GPU_CHUNK_ELEMENTS
    limit = max(64, least, elements // max(columns, 1))
    step = min(limit, most or limit)
    for start in range(0, rows, step):
        yield slice(start, start + step)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, needs_grad: bool
    ) -> Tensor:
        device = hidden.device.type
        # The precision is chosen here: autocast would convert the weight anew in every chunk.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        with torch.autocast(device, enabled=False):
            h, w = hidden.detach().to(dtype), weight.detach().to(dtype)
            b = None if bias is None else bias.detach().to(dtype)
            columns = w.size(0) // (_GRADIENT_FACTOR if needs_grad and h.device.type == "cpu" else 1)
            # Kept on the device: reading the loss of each chunk would synchronise.
            loss = torch.zeros((), dtype=torch.float32, device=h.device)
            grads = None
            if needs_grad:
                options: Any = {"dtype": torch.float32, "device": h.device}
                of_bias = None if b is None else torch.zeros(b.shape, **options)
                grads = _Gradients(torch.empty(h.shape, **options), of_bias)
            wide = min(h.size(1), _MOST_ELEMENTS // max(w.size(0), 1))
            least = wide if needs_grad and h.device.type == "cpu" else 0
            for rows in row_chunks(h.size(0), columns, h.device, least=least):
                logits = linear(h[rows], w, b)  # (n, V)
                loss += _chunk(logits, target[rows], h[rows], w, rows, grads)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        if grads is not None:
            of_weight = torch.zeros(w.shape, **options) if grads.weight is None else grads.weight
            ctx.save_for_backward(grads.hidden, of_weight, grads.bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale: Tensor | None = grads[0]
        # On a CPU only: reading the value from a GPU would synchronise.
        if grads[0].device.type == "cpu" and float(grads[0]) == 1.0:
            # The usual case: no pass over the gradients.
            scale = None
        scaled = [
            None if dtype is None else (gradient if scale is None else gradient * scale).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None)


@dataclass
class _Gradients:
    """Gradients of both factors, in float32; the weight's,
    by far the largest, is made by the first chunk."""

    hidden: Tensor
    bias: Tensor | None
    weight: Tensor | None = None


def _chunk(logits: Tensor, target: Tensor, h: Tensor, w: Tensor, rows: slice, grads: _Gradients | None) -> Tensor:
    """The loss of one chunk; its logits become the gradient of the logits, and go into *grads*."""
    gradient = grads is not None
    some, spare = logits.tensor_split([len(target)])
    by_kernel = kernels("cross_entropy", some)
    if by_kernel is None:
        loss, probabilities = _cross_entropy(some, target, gradient)
        if len(spare):
            probabilities = torch.cat([probabilities, torch.zeros_like(spare, dtype=probabilities.dtype)])
    else:
        loss, probabilities = by_kernel.cross_entropy(some, target, gradient).sum(), logits
        spare.zero_()
    if grads is not None:
        if grads.bias is not None:
            grads.bias.add_(probabilities.sum(0, dtype=torch.float32))
        if w.dtype == torch.float32 and grads.weight is not None and not is_by_onednn(probabilities, w):
            torch.mm(probabilities, w, out=grads.hidden[rows])
            grads.weight.addmm_(probabilities.t(), h)
        else:
            boost = _float16_boost(probabilities, h, w) if w.dtype == torch.float16 else None
            scaled = (probabilities if boost is None else probabilities.mul_(boost)).to(w.dtype)
            products = linear(scaled, w.t()), outer(scaled, h)
            of_hidden, of_weight = products if boost is None else (product.float() / boost for product in products)
            grads.hidden[rows] = of_hidden
            grads.weight = of_weight.float() if grads.weight is None else grads.weight.add_(of_weight)
    return loss


def _cross_entropy(logits: Tensor, target: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """The summed loss, and the *gradient* of the logits, in float32; *logits* otherwise."""
    # The word with the largest logit: its probability is at least 1 / V, so that the logarithm has
    # all its digits.
    largest, word = logits.max(-1, keepdim=True)  # (n, 1)
    # One kernel that reads and writes once; logsumexp alone is six.
    probabilities = logits.softmax(-1, dtype=torch.float32)
    index = target.unsqueeze(1)
    normaliser = largest.float() - probabilities.gather(1, word).log()
    loss = (normaliser - logits.gather(1, index).float()).sum()
    if not gradient:
        return loss, logits
    return loss, probabilities.scatter_add_(1, index, torch.full_like(normaliser, -1.0))  # softmax minus one-hot


def _float16_boost(gradient: Tensor, h: Tensor, w: Tensor) -> Tensor:
    """A power of two that lifts small gradients into float16's range, as large as its products with
    *h* and *w* allow.

    The loss scale comes only in the backward pass, too late for what has become zero here.
    """
    bound = torch.maximum(gradient.abs().sum(0).amax() * h.abs().amax().float(), 2 * w.abs().amax().float())
    return torch.exp2(torch.floor(torch.log2(32768.0 / bound.clamp(min=1.0))))
