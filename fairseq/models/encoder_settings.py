"""Settings of BERT and ELECTRA."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fairseq.config.fields import flag
from fairseq.config.shared import MOST_LAYERS, ModelConfig
from fairseq.errors import SettingError
from fairseq.modules import ACTIVATIONS

INIT_STD = 0.02  # of all weights, as in the code of BERT's authors (Devlin et al. 2019, appendix A.2)


@dataclass(frozen=True)
class BertConfig(ModelConfig):
    """Settings of an encoder."""

    encoder_layers: int = flag(12, "number of layers", low=1, high=MOST_LAYERS)
    encoder_embed_dim: int = flag(768, "width of the model", low=1)
    encoder_input_dim: int | None = flag(None, "width of the embeddings (default: `encoder_embed_dim`)", low=1)
    encoder_ffn_embed_dim: int = flag(3072, "width of the feed-forward networks", low=1)
    encoder_attention_heads: int = flag(12, "attention heads of each layer", low=1)
    activation_fn: str = flag("gelu", "activation of the feed-forward networks", choices=ACTIVATIONS)
    head_activation_fn: str | None = flag(
        None, "activation of the output layer (default: `activation_fn`)", choices=ACTIVATIONS
    )
    dropout: float = flag(0.1, "dropout after embeddings, attention and feed-forward networks", low=0, below=1)
    attention_dropout: float = flag(0.1, "dropout of attention weights", low=0, below=1)
    activation_dropout: float = flag(
        0.0, "dropout inside the feed-forward networks", aliases=("--relu-dropout",), low=0, below=1
    )
    encoder_layerdrop: float = flag(0.0, "LayerDrop: probability of skipping a layer in training", low=0, below=1)
    max_positions: int = flag(512, "maximum tokens per row", low=1)
    token_types: int = flag(0, "number of token types (0: none)", low=0)
    layer_norm_eps: float = flag(1e-5, "constant added to the variance in layer norms", above=0)
    init_std: float = flag(INIT_STD, "standard deviation of initial weights", low=0)
    untie_weights_roberta: bool = flag(False, "output weights separate from the token embeddings")

    def check(self) -> None:
        if self.encoder_embed_dim % self.encoder_attention_heads:
            raise SettingError(
                f"`encoder_attention_heads` {self.encoder_attention_heads}: "
                f"must divide `encoder_embed_dim` {self.encoder_embed_dim}"
            )

    @property
    def embedding_dim(self) -> int:
        """Width of the embeddings; projected to the model's where the two differ."""
        return self.encoder_input_dim or self.encoder_embed_dim

    @property
    def head_activation(self) -> str:
        """Activation of the output layer."""
        return self.head_activation_fn or self.activation_fn


@dataclass(frozen=True)
class ElectraConfig(BertConfig):
    """Settings of ELECTRA; encoder settings are of the discriminator."""

    generator_size: float = flag(
        1 / 3, "generator width as a fraction of the discriminator's (0: no generator)", low=0, high=1
    )

    @property
    def generator_width(self) -> tuple[int, int]:
        """Channels and heads of the generator: a fraction of the discriminator's (§3.2)."""
        heads = max(1, round(self.encoder_attention_heads * self.generator_size))
        return round(self.encoder_embed_dim * self.generator_size), heads

    def check(self) -> None:
        super().check()
        dim, heads = self.generator_width
        if self.generator_size and (dim < heads or dim % heads):
            raise SettingError(
                f"`generator_size` {self.generator_size:.4g}: {heads} heads do not divide a generator of width {dim}; "
                "give a fraction such as 0.25 or 0.5"
            )

    @property
    def of_generator(self) -> BertConfig:
        """The generator's settings; its feed-forward networks
        are the same fraction of the discriminator's."""
        dim, heads = self.generator_width
        return replace(
            self,
            encoder_embed_dim=dim,
            encoder_input_dim=self.embedding_dim,
            encoder_attention_heads=heads,
            encoder_ffn_embed_dim=round(self.encoder_ffn_embed_dim * self.generator_size),
            generator_size=0.0,
        )
