"""``fairseq.optim.fused_adam``: apex's Adam is chosen by :mod:`fairseq.optim.adam`, not by plug-ins."""

from __future__ import annotations


def get_fused_adam_class() -> None:
    """Return None, at which a plug-in takes its own Adam."""
