"""The decoders that exported code can build, with their settings; an export has its own one only."""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer_lm import TransformerDecoder, TransformerLMConfig
from fairseq.models.transformer_xl import TransformerXLConfig, TransformerXLDecoder

PARTS: dict[str, Any] = {
    "transformer_lm": (TransformerLMConfig, TransformerDecoder),
    "transformer_xl": (TransformerXLConfig, TransformerXLDecoder),
}
