"""Sizes and parts of an exported language model, for Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

UNLIMITED = -1  # clamp_length: distances are used as they are


class FairseqConfig(PretrainedConfig):
    """Sizes and parts of a model.

    Attributes:
        positions: ``sinusoidal`` or ``learned`` (added to embeddings), ``infused`` (added to what queries and keys are
            computed from), ``relative`` (Transformer-XL), ``none``.
        first_position: number of the first position in tables of positions.
        segment_length: tokens read at once through a cache.
        memory_length: tokens of earlier segments that attention also reads.
        zero_memory: whether a text begins with a memory of zeros.
        same_length: whether every position reads ``memory_length`` keys.
        clamp_length: farthest distance of relative positions, or -1.
        cutoffs: first word of each band of embeddings after the first; None: one table.
        embedding_widths: width of each band.
        embedding_projections: ``own``, ``shared`` or ``none``.
        output: ``linear``, ``adaptive`` (fairseq's) or ``clustered`` (Transformer-XL's).
        output_cutoffs: first word of each tail band of the output.
        output_widths: width of each of its bands.
        tied_projections: bands whose output projection is that of the embeddings.
        own_biases: whether each layer has its own u and v.
        settings: the model's settings in fairseq-short; ``fairseq-import`` reads them.
    """

    model_type = "fairseq_lm"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 1000,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 2,
        head_dim: int = 32,
        intermediate_size: int = 128,
        hidden_act: str = "relu",
        pre_norm: bool = True,
        final_norm: bool = True,
        embedding_norm: bool = False,
        positions: str = "sinusoidal",
        first_position: int = 2,
        segment_length: int = 128,
        memory_length: int = 0,
        zero_memory: bool = False,
        same_length: bool = False,
        clamp_length: int = UNLIMITED,
        embedding_scale: float = 1.0,
        cutoffs: Sequence[int] | None = None,
        embedding_widths: Sequence[int] = (64,),
        embedding_projections: str = "none",
        output: str = "linear",
        output_cutoffs: Sequence[int] = (),
        output_widths: Sequence[int] = (64,),
        tie_word_embeddings: bool = True,
        tied_projections: Sequence[int] = (),
        own_biases: bool = True,
        settings: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        values = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        kwargs.setdefault("max_position_embeddings", segment_length + memory_length)
        super().__init__(**kwargs)
        for name, value in values.items():
            setattr(self, name, value)
