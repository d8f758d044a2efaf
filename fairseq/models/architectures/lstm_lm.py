"""The named sets of defaults of ``lstm_lm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairseq.config.registry import Complete, completed


def _complete(defaults: Mapping[str, object], cutoffs: list[int]) -> Complete:
    """Complete settings by *defaults*; as in fairseq,
    only ``--criterion adaptive_loss`` has an adaptive softmax."""

    def complete(settings: Mapping[str, object]) -> dict[str, Any]:
        if settings.get("criterion") == "adaptive_loss":
            return completed({**defaults, "adaptive_softmax_cutoff": cutoffs}, settings)
        # Also where the user gave cutoffs, which fairseq ignores under another criterion.
        return {**completed(defaults, settings), "adaptive_softmax_cutoff": None}

    return complete


TINY = {"decoder_embed_dim": 32, "decoder_out_embed_dim": 32, "decoder_layers": 2}  # for tests

LSTM_LM: dict[str, Complete] = {
    "lstm_lm": _complete({}, [10000, 50000, 200000]),
    "lstm_lm_tiny": _complete(TINY, [200, 600]),
}
