"""The decoders that exported code can build, with their settings; an export has its own one
only."""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer_lm import TransformerDecoder
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.models.transformer_xl import TransformerXLDecoder
from fairseq.models.transformer_xl_settings import TransformerXLConfig

PARTS: dict[str, Any] = {
    "transformer_lm": (TransformerLMConfig, TransformerDecoder),
    "transformer_xl": (TransformerXLConfig, TransformerXLDecoder),
}
