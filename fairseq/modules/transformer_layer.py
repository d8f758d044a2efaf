"""A layer of a transformer: attention and a feed-forward network with residual connections;
activations."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.errors import UserError, nearest
from fairseq.modules import ACTIVATIONS
from fairseq.modules.attention import CAUSAL, AttentionMask
from fairseq.modules.dropout import add_dropout, dropout, relu_dropout, variational_dropout
from fairseq.modules.linear import Linear, lowered
from fairseq.modules.memory import LayerCache
from fairseq.modules.norms import layer_norm
from fairseq.system.deferred import names_of

EmbeddingHook = Callable[[Tensor], Tensor]
"""A function of the summed embeddings [B, T, E], applied before their layer norm, that returns the
same shape."""


def relu_squared(x: Tensor) -> Tensor:
    """The square of the positive part (So et al. 2021, "Primer")."""
    return F.relu(x).square()


_BY_TANH = functools.partial(F.gelu, approximate="tanh")  # for which fairseq has two names
_FUNCTIONS = (F.relu, relu_squared, F.gelu, _BY_TANH, _BY_TANH, F.silu, torch.tanh, lambda x: x)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = dict(zip(ACTIVATIONS, _FUNCTIONS, strict=True))


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation function called *name*; raise UserError if there is none."""
    if name not in FUNCTIONS:
        raise UserError(f"activation {name}: unknown; {nearest(name, FUNCTIONS)}")
    return FUNCTIONS[name]


class TransformerLayer(nn.Module):
    """Self-attention, then a feed-forward network (Vaswani et al. 2017, §3.1).

    Args:
        attention: the attention to use; the layer does not choose it.
        embed_dim: channels C.
        ffn_dim: width of the feed-forward network.
        dropout: after attention and after the feed-forward network.
        activation_dropout: inside the feed-forward network.
        activation_fn: name of the activation.
        normalize_before: layer norm before each part (pre-norm), not after it.
        apex: allow apex's fused layer norm.
        remember_input: the memory holds the layer's inputs
            (Transformer-XL), not what attention read of them (Shortformer):
            with pre-norm they are normalised anew, together with the segment.
        variational: one dropout mask for all time steps.
        layer_norm_eps: added to the variance in norms.
        norm: kind of the norms; see :func:`layer_norm`.
        bias: whether the feed-forward network and layer norms have biases.
        gated: multiply the activations by another linear map of the input (Shazeer 2020, "GLU
            variants improve Transformer"): SwiGLU with ``silu``, GEGLU with ``gelu``.
        parallel: both parts read the layer's input, each through its norm (Wang & Komatsuzaki 2021,
            "GPT-J"); pre-norm only.
    """

    def __init__(
        self,
        attention: nn.Module,
        embed_dim: int,
        ffn_dim: int,
        *,
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        activation_fn: str = "relu",
        normalize_before: bool = True,
        apex: bool = True,
        remember_input: bool = False,
        variational: bool = False,
        layer_norm_eps: float = 1e-5,
        norm: str = "layer",
        bias: bool = True,
        gated: bool = False,
        parallel: bool = False,
    ) -> None:
        super().__init__()
        if parallel and not normalize_before:
            raise ValueError("parallel parts of a layer need pre-norm")
        # fairseq's names, in its order: checkpoints load strictly, and optimizer states are
        # numbered by it.
        self.self_attn = attention
        self.self_attn_layer_norm = layer_norm(embed_dim, apex, layer_norm_eps, norm, bias)
        self.fc1 = Linear(embed_dim, ffn_dim, bias)
        self.fc2 = Linear(ffn_dim, embed_dim, bias)
        self.final_layer_norm = layer_norm(embed_dim, apex, layer_norm_eps, norm, bias)
        self.fc3 = Linear(embed_dim, ffn_dim, bias) if gated else None
        for projection in (self.fc1, self.fc2, self.fc3):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
            if projection is not None and bias:
                nn.init.zeros_(projection.bias)
        self.dropout = dropout
        self.activation_dropout = activation_dropout
        self.activation_fn = activation_fn
        self.activation = activation(activation_fn)
        self.normalize_before = normalize_before
        self.parallel = parallel
        self.remember_input = remember_input
        self.variational = variational

    def attention_input(self, x: Tensor) -> Tensor:
        """The input of the attention for the layer's input *x* [B, T, C]."""
        return lowered(self.self_attn_layer_norm(x) if self.normalize_before else x)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        positions: object = None,
        visible: AttentionMask = CAUSAL,
        cache: LayerCache | None = None,
        past_length: int = 0,
        skip: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Apply the layer to *x* [B, T, C]; the other arguments but *skip* go to the attention.

        Args:
            skip: return *x* unchanged, as LayerDrop does in training (Fan et al. 2020); it is
                remembered all the same.

        Returns:
            The output [B, T, C], and the part of a memory that *x* makes [B, T, C].
        """
        attention_input = self.attention_input(x)
        # Detached here: a compiled layer would add a gradient of zeros to its input's.
        remembered = (x if self.remember_input and self.normalize_before else attention_input).detach()
        if skip:
            return x, remembered
        if self.remember_input and memory is not None:
            # Remembered are inputs of the layer:
            # its norm is applied to them with the present weights.
            memory = self.attention_input(memory.to(x.dtype))
        attended = self.self_attn(
            attention_input, memory=memory, positions=positions, visible=visible, cache=cache, past_length=past_length
        )
        if self.parallel:
            inner = self._feed_forward(self.final_layer_norm(x))
            return self._add(self._add(x, attended), inner), remembered
        x = self._add(x, attended)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        h = self.final_layer_norm(x) if self.normalize_before else x
        x = self._add(x, self._feed_forward(h))
        if not self.normalize_before:
            x = self.final_layer_norm(x)
        return x, remembered

    def _feed_forward(self, x: Tensor) -> Tensor:
        if self.fc3 is None:
            return self.fc2(self._activate(self.fc1(x)))
        x = lowered(x)  # once for both products
        inner, other = self.fc1(x), self.fc3(x)
        gated = self.activation(inner) * other
        drop = variational_dropout if self.variational else dropout
        return self.fc2(drop(gated, self.activation_dropout, self.training))

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation_fn == "relu":
            # Nothing else reads the product, so without gradients it needs no second tensor.
            if not self.training and not torch.is_grad_enabled():
                return x.relu_()
            if not self.variational:
                return relu_dropout(x, self.activation_dropout, self.training)
        drop = variational_dropout if self.variational else dropout
        return drop(self.activation(x), self.activation_dropout, self.training)

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        if self.variational:
            return x + variational_dropout(branch, self.dropout, self.training)
        return add_dropout(x, branch, self.dropout, self.training)


def skips_layer(probability: float, training: bool) -> bool:
    """Draw whether the next layer is skipped, as LayerDrop does in training (Fan et al. 2020)."""
    # From the CPU's generator: reading a number that a GPU drew would synchronise.
    return training and probability > 0 and float(torch.rand(())) < probability


__getattr__, _ = names_of(  # fairseq's
    __name__,
    {
        "fairseq.modules.fairseq_layers": """
            TransformerDecoderLayer TransformerEncoderLayer TransformerDecoderLayerBase=TransformerDecoderLayer
            TransformerEncoderLayerBase=TransformerEncoderLayer
        """
    },
)
