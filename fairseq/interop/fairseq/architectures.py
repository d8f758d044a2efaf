"""Architectures as the functions on a namespace that plug-ins call in their own."""

from __future__ import annotations

import argparse

from fairseq.config.registry import ARCHITECTURES, completed
from fairseq.interop.fairseq.former_names import TRANSFORMERS
from fairseq.models.architectures.transformer_lm import BASE


def base_lm_architecture(args: argparse.Namespace) -> None:
    """Set what all architectures of fairseq but ``transformer_lm`` begin with."""
    vars(args).update(completed(BASE, vars(args)))


globals().update({name: ARCHITECTURES[name].fill for name in TRANSFORMERS})
