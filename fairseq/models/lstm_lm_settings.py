"""Settings of LSTM language models."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import flag
from fairseq.config.shared import BlockModelConfig, check_cutoffs
from fairseq.errors import SettingError


@dataclass(frozen=True)
class LSTMLMConfig(BlockModelConfig):
    """Settings of an LSTM language model."""

    dropout: float = flag(0.1, "dropout of embeddings and of every layer's output", low=0, below=1)
    decoder_embed_dim: int = flag(512, "width of the embeddings", low=1)
    decoder_hidden_size: int | None = flag(None, "width of the layers (default: `decoder_embed_dim`)", low=1)
    decoder_layers: int = flag(1, "number of layers", low=1, high=10_000)
    decoder_out_embed_dim: int = flag(512, "width of the output", low=1)
    decoder_dropout_in: float | None = flag(None, "dropout of embeddings (default: `dropout`)", low=0, below=1)
    decoder_dropout_out: float | None = flag(None, "dropout of layers' outputs (default: `dropout`)", low=0, below=1)
    residuals: bool = flag(False, "add a layer's previous state to the next layer's input")
    share_decoder_input_output_embed: bool = flag(False, "tie the output weights to the input embeddings")
    adaptive_softmax_cutoff: list[int] | None = flag(
        None, "with `criterion` adaptive_loss: first word of each band but the first"
    )

    @property
    def hidden_size(self) -> int:
        """Width of the layers."""
        return self.decoder_hidden_size or self.decoder_embed_dim

    def check(self) -> None:
        self.check_vocabulary()
        differ = self.decoder_embed_dim != self.decoder_out_embed_dim
        if self.adaptive_softmax_cutoff is None and self.share_decoder_input_output_embed and differ:
            raise SettingError(
                f"`share_decoder_input_output_embed`: needs `decoder_out_embed_dim` {self.decoder_embed_dim}, the "
                "width of the embeddings"
            )

    def check_vocabulary(self, vocabulary: int | None = None) -> None:
        """Raise SettingError if a band, where the number of words is known, has none."""
        if self.adaptive_softmax_cutoff is not None:
            check_cutoffs("adaptive_softmax_cutoff", self.adaptive_softmax_cutoff, vocabulary)
