"""Settings of ``transformer_lm``, from Vaswani et al. (2017) to today's decoders."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import flag
from fairseq.config.shared import MOST_LAYERS, BlockModelConfig, NGramNotesConfig, check_cutoffs
from fairseq.errors import SettingError
from fairseq.modules import ACTIVATIONS, NORMS


@dataclass(frozen=True)
class DecoderLayerConfig(BlockModelConfig):
    """Settings of a decoder's layers: all are alike."""

    activation_fn: str = flag("relu", "activation of the feed-forward networks", choices=ACTIVATIONS)
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
    decoder_norm: str = flag("layer", "kind of norm", choices=NORMS)
    decoder_norm_eps: float = flag(1e-5, "number added to the variance in norms", above=0, below=1, rare=True)
    decoder_gated_ffn: bool = flag(False, "gated feed-forward networks: SwiGLU with silu, GEGLU with gelu")
    decoder_biases: str = flag("all", "biases of the layers", choices=("all", "qkv", "none"), rare=True)
    decoder_parallel_residual: bool = flag(False, "attention and feed-forward network in parallel", rare=True)
    qk_norm: bool = flag(False, "RMS norm of each head's queries and keys")
    zero_init_residual: bool = flag(False, "start the last projections of attention and feed-forward at zero")
    rotary_fraction: float = flag(
        0.0, "rotary positions: share of each head's channels that rotate", low=0, high=1, rare=True
    )
    rotary_base: float = flag(10000.0, "rotary positions: base of the frequencies", above=1)
    rotary_scaling: float = flag(1.0, "rotary positions: number by which positions are divided", low=1, rare=True)
    rotary_trained_positions: int = flag(
        0, "rotary positions: Llama 3's scaling after training with this many tokens", low=0, rare=True
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
    def rotary_channels(self) -> int:
        """Channels of a head that turn with the position; 0 without rotary positions."""
        return int(self.rotary_fraction * (self.decoder_embed_dim // self.decoder_attention_heads))

    def check(self) -> None:
        heads = f"`decoder_attention_heads` {self.decoder_attention_heads}"
        if self.decoder_embed_dim % self.decoder_attention_heads:
            raise SettingError(f"{heads}: must divide `decoder_embed_dim` {self.decoder_embed_dim}")
        if self.decoder_kv_heads and self.decoder_attention_heads % self.decoder_kv_heads:
            raise SettingError(f"{heads}: must be a multiple of `decoder_kv_heads` {self.decoder_kv_heads}")
        if self.decoder_parallel_residual and not self.decoder_normalize_before:
            raise SettingError("`decoder_parallel_residual`: needs `decoder_normalize_before`")
        if not self.rotary_fraction:
            return
        if self.rotary_channels < 2 or self.rotary_channels % 2:
            channels = self.decoder_embed_dim // self.decoder_attention_heads
            raise SettingError(
                f"`rotary_fraction` {self.rotary_fraction}: {self.rotary_channels} of {channels} channels of a head "
                "turn; choose an even number of them"
            )
        if self.position_infused_attention:
            raise SettingError("`rotary_fraction`: replaces `position_infused_attention`; leave one of them out")


@dataclass(frozen=True)
class TransformerLMConfig(NGramNotesConfig, DecoderLayerConfig):
    """The settings of a transformer language model."""

    decoder_output_dim: int | None = flag(None, "width of the output (default: `decoder_embed_dim`)", low=1, rare=True)
    decoder_input_dim: int | None = flag(
        None, "width of the input embeddings (default: `decoder_embed_dim`)", low=1, rare=True
    )
    decoder_layers: int = flag(6, "number of layers", low=1, high=MOST_LAYERS)
    decoder_layers_to_keep: list[int] | None = flag(
        None, "checkpoint layers to keep, from 0, e.g. 0,2,5 (default: all)", metavar="LAYERS", rare=True
    )
    no_decoder_final_norm: bool = flag(False, "omit the layer norm after the last layer", rare=True)
    adaptive_softmax_cutoff: list[int] | None = flag(None, "adaptive softmax: first word id of each tail band")
    adaptive_softmax_dropout: float = flag(0.0, "dropout of the adaptive softmax", low=0, below=1)
    adaptive_softmax_factor: float = flag(4.0, "adaptive softmax: width ratio of successive bands", low=1, rare=True)
    no_token_positional_embeddings: bool = flag(False, "omit position embeddings")
    share_decoder_input_output_embed: bool = flag(False, "tie the output weights to the input embeddings")
    decoder_learned_pos: bool = flag(False, "learned position embeddings instead of sinusoids")
    decoder_layerdrop: float = flag(0.0, "LayerDrop: probability of skipping a layer in training", low=0, below=1)
    adaptive_input: bool = flag(False, "adaptive input embeddings")
    adaptive_input_factor: float = flag(4.0, "adaptive input: width ratio of successive bands", low=1, rare=True)
    adaptive_input_cutoff: list[int] | None = flag(None, "adaptive input: first word id of each tail band")
    tie_adaptive_weights: bool = flag(False, "tie the adaptive softmax to the adaptive input's embeddings")
    tie_adaptive_proj: bool = flag(False, "tie the adaptive softmax to the adaptive input's projections")
    no_scale_embedding: bool = flag(False, "do not scale embeddings by the square root of their width", rare=True)
    embed_init_std: float | None = flag(
        None, "standard deviation of initial embeddings (default: 1 / sqrt(width))", above=0, high=1
    )
    layernorm_embedding: bool = flag(False, "layer norm after the embeddings", rare=True)
    character_embeddings: bool = flag(False, "character-built word embeddings (not supported)", rare=True)
    token_shift: int = flag(0, "previous tokens whose embeddings are added to each input", low=0, high=16)

    def at_block_length(self, tokens: int, longest: int) -> dict[str, object]:
        """The cache has the length of a block; a table
        of learned positions is made for the longest one."""
        changes: dict[str, object] = {"tokens_from_prev": tokens} if self.tokens_from_prev > 0 else {}
        return {**changes, "max_target_positions": longest} if self.decoder_learned_pos else changes

    def with_memory(self, tokens: int, longest: int) -> dict[str, object] | None:
        """The cache, with positions that are the same with and without one."""
        has_positions = self.rotary_fraction > 0 or self.position_infused_attention
        return {"tokens_from_prev": tokens} if has_positions or not longest else None

    def check(self) -> None:
        super().check()
        keep = self.decoder_layers_to_keep
        if keep is not None and (not keep or len(set(keep)) < len(keep) or min(keep) < 0):
            numbers = ",".join(map(str, keep))
            raise SettingError(f"`decoder_layers_to_keep` {numbers}: give different numbers of layers, from 0")
        if self.character_embeddings:
            raise SettingError("`character_embeddings`: not supported; leave it out")
        if self.position_infused_attention and (self.decoder_learned_pos or self.no_token_positional_embeddings):
            raise SettingError("`position_infused_attention`, `tokens_from_prev`: need sinusoidal positions")
        if self.rotary_fraction and self.decoder_learned_pos:
            raise SettingError("`rotary_fraction`: replaces `decoder_learned_pos`; leave one of them out")
        self.check_vocabulary()
        dim = self.decoder_embed_dim
        differ = (self.decoder_input_dim or dim) != (self.decoder_output_dim or dim)
        if self.tie_adaptive_weights:
            if not self.adaptive_input or self.adaptive_softmax_cutoff is None:
                raise SettingError("`tie_adaptive_weights`: needs `adaptive_input` and `adaptive_softmax_cutoff`")
            if self.adaptive_input_cutoff != self.adaptive_softmax_cutoff:
                raise SettingError(
                    "`tie_adaptive_weights`: `adaptive_input_cutoff` and `adaptive_softmax_cutoff` differ; "
                    "make them equal"
                )
            if self.adaptive_input_factor != self.adaptive_softmax_factor:
                raise SettingError(
                    "`tie_adaptive_weights`: `adaptive_input_factor` and `adaptive_softmax_factor` differ"
                )
            if differ:
                raise SettingError("`tie_adaptive_weights`: `decoder_input_dim` and `decoder_output_dim` differ")
        if self.share_decoder_input_output_embed:
            if self.adaptive_input:
                raise SettingError(
                    "`share_decoder_input_output_embed`: with `adaptive_input` use `tie_adaptive_weights`"
                )
            if differ:
                raise SettingError(
                    "`share_decoder_input_output_embed`: `decoder_input_dim` and `decoder_output_dim` differ"
                )

    def check_vocabulary(self, vocabulary: int | None = None) -> None:
        """Raise SettingError if a band has no width or,
        where the number of words is known, no words."""
        bands: list[tuple[str, list[int], int | None, float]] = []
        if self.adaptive_softmax_cutoff is not None:
            bands.append(
                ("softmax", self.adaptive_softmax_cutoff, self.decoder_output_dim, self.adaptive_softmax_factor)
            )
        if self.adaptive_input:
            if self.adaptive_input_cutoff is None:
                raise SettingError("`adaptive_input`: needs `adaptive_input_cutoff`")
            bands.append(("input", self.adaptive_input_cutoff, self.decoder_input_dim, self.adaptive_input_factor))
        for part, cutoffs, dim, factor in bands:
            check_cutoffs(f"adaptive_{part}_cutoff", cutoffs, vocabulary)
            tails, width = len(cutoffs), dim or self.decoder_embed_dim
            if width < factor**tails:
                raise SettingError(
                    f"`adaptive_{part}_factor` {factor}: band {tails} of width {width} / {factor}^{tails} is empty"
                )
