"""Settings of the layers of ``transformer_lm``, from Vaswani et al. (2017) to today's decoders, and the layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fairseq.config.fields import flag
from fairseq.errors import SettingError
from fairseq.models.base import BlockModelConfig
from fairseq.modules.attention import PositionInfusedAttention, RotaryAttention, SelfAttention
from fairseq.modules.positions import Rotation
from fairseq.modules.transformer_layer import ACTIVATIONS, NORMS, TransformerLayer, layer_norm


@dataclass(frozen=True)
class DecoderLayerConfig(BlockModelConfig):
    """Settings of a decoder's layers: all are alike."""

    activation_fn: str = flag("relu", "activation of the feed-forward networks", choices=tuple(ACTIVATIONS))
    dropout: float = flag(0.1, "dropout after embeddings, attention and feed-forward networks", low=0, below=1)
    attention_dropout: float = flag(0.0, "dropout of attention weights", low=0, below=1)
    activation_dropout: float = flag(
        0.0, "dropout inside the feed-forward networks", aliases=("--relu-dropout",), low=0, below=1
    )
    decoder_embed_dim: int = flag(512, "width of the model", low=1)
    decoder_ffn_embed_dim: int = flag(2048, "width of the feed-forward networks", low=1)
    decoder_attention_heads: int = flag(8, "attention heads of each layer", low=1)
    decoder_kv_heads: int | None = flag(None, "heads of keys and values (default: `decoder_attention_heads`)", low=1)
    decoder_normalize_before: bool = flag(True, "pre-norm: layer norm before each part of a layer", negative=True)
    decoder_norm: str = flag("layer", "kind of the norms", choices=NORMS)
    decoder_norm_eps: float = flag(1e-5, "number added to the variance in norms", above=0, below=1)
    decoder_gated_ffn: bool = flag(False, "gated feed-forward networks: SwiGLU with silu, GEGLU with gelu")
    decoder_biases: str = flag("all", "biases of the layers", choices=("all", "qkv", "none"))
    decoder_parallel_residual: bool = flag(False, "attention and feed-forward network side by side")
    qk_norm: bool = flag(False, "RMS norm of each head's queries and keys")
    zero_init_residual: bool = flag(
        False, "initial weights of zero for the last projection of attention and feed-forward"
    )
    rotary_fraction: float = flag(0.0, "rotary positions: share of each head's channels that turn", low=0, high=1)
    rotary_base: float = flag(10000.0, "rotary positions: base of the frequencies", above=1)
    rotary_scaling: float = flag(1.0, "rotary positions: number by which positions are divided", low=1)
    rotary_trained_positions: int = flag(
        0, "rotary positions: Llama 3's scaling after training with this many tokens", low=0
    )
    attention_window: int | None = flag(None, "tokens that attention reads, its own included (default: all)", low=1)
    position_infused_attention: bool = flag(False, "Shortformer: add positions to queries and keys of every layer")
    tokens_from_prev: int = flag(0, "Shortformer: cache size in tokens; implies `position_infused_attention`", low=0)

    def __post_init__(self) -> None:
        # Their types are checked below. Rotary positions stand in queries and keys alone already.
        if isinstance(self.tokens_from_prev, int) and self.tokens_from_prev > 0 and not self.rotary_fraction:
            object.__setattr__(self, "position_infused_attention", True)
        super().__post_init__()

    @property
    def memory_length(self) -> int:
        """Tokens of the cache; 0 without one."""
        return self.tokens_from_prev

    @property
    def rotation(self) -> Rotation | None:
        """The rotary positions of a head; None without them."""
        if not self.rotary_fraction:
            return None
        turning = int(self.rotary_fraction * (self.decoder_embed_dim // self.decoder_attention_heads))
        return Rotation(turning, self.rotary_base, self.rotary_scaling, self.rotary_trained_positions)

    def check(self) -> None:
        heads = f"`decoder_attention_heads` {self.decoder_attention_heads}"
        if self.decoder_embed_dim % self.decoder_attention_heads:
            raise SettingError(f"{heads}: must divide `decoder_embed_dim` {self.decoder_embed_dim}")
        if self.decoder_kv_heads and self.decoder_attention_heads % self.decoder_kv_heads:
            raise SettingError(f"{heads}: must be a multiple of `decoder_kv_heads` {self.decoder_kv_heads}")
        if self.decoder_parallel_residual and not self.decoder_normalize_before:
            raise SettingError("`decoder_parallel_residual`: needs `decoder_normalize_before`")
        if self.rotation is None:
            return
        if self.rotation.dim < 2 or self.rotation.dim % 2:
            channels = self.decoder_embed_dim // self.decoder_attention_heads
            raise SettingError(
                f"`rotary_fraction` {self.rotary_fraction}: {self.rotation.dim} of {channels} channels of a head turn; "
                "choose an even number of them"
            )
        if self.position_infused_attention:
            raise SettingError("`rotary_fraction`: replaces `position_infused_attention`; leave one of them out")

    def norm(self) -> nn.Module:
        """A norm of hidden states."""
        bias = self.decoder_biases == "all"
        return layer_norm(self.decoder_embed_dim, not self.no_apex, self.decoder_norm_eps, self.decoder_norm, bias)

    def layer(self) -> TransformerLayer:
        """A layer."""
        attention = self._attention_class()(
            self.decoder_embed_dim,
            self.decoder_attention_heads,
            self.attention_dropout,
            kv_heads=self.decoder_kv_heads,
            bias=self.decoder_biases != "none",
            out_bias=self.decoder_biases == "all",
            qk_norm=self.qk_norm,
        )
        layer = TransformerLayer(
            attention,
            self.decoder_embed_dim,
            self.decoder_ffn_embed_dim,
            dropout=self.dropout,
            activation_dropout=self.activation_dropout,
            activation_fn=self.activation_fn,
            normalize_before=self.decoder_normalize_before,
            apex=not self.no_apex,
            layer_norm_eps=self.decoder_norm_eps,
            norm=self.decoder_norm,
            bias=self.decoder_biases == "all",
            gated=self.decoder_gated_ffn,
            parallel=self.decoder_parallel_residual,
        )
        # Each layer begins as the identity (Zhang et al. 2019, "Fixup").
        if self.zero_init_residual:
            for projection in (attention.out_proj, layer.fc2):
                nn.init.zeros_(projection.weight)
        return layer

    def _attention_class(self) -> type[SelfAttention]:
        if self.rotary_fraction:
            return RotaryAttention
        return PositionInfusedAttention if self.position_infused_attention else SelfAttention
