"""Entry points of ``torch.hub.load(REPOSITORY, NAME, …)``."""

from __future__ import annotations

from fairseq.hub import LanguageModel, load_model
from fairseq.hub_utils import from_pretrained as transformer_lm

language_model = LanguageModel.from_pretrained

dependencies = ["torch", "numpy"]

__all__ = ["language_model", "load_model", "transformer_lm"]
