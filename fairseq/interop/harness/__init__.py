"""Models for EleutherAI's lm-eval."""

from __future__ import annotations

import importlib.util
from typing import Any

from fairseq.errors import UserError


def harness_model() -> Any:
    """Return the model class of the harness, registered there
    as ``fairseq``; UserError if that is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("needs lm-eval, which is not installed; pip install lm-eval")
    from fairseq.interop.harness.model import FairseqLM

    return FairseqLM


__all__ = ["harness_model"]
