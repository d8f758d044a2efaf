"""Settings of fairseq 0.12 that this package does not have, with fairseq's defaults: plug-ins read
any of them."""

from __future__ import annotations

import argparse

from fairseq.config.foreign_flags import fairseq_defaults

OF_PARTS: dict[str, object] = {  # settings of parts, which a run without the part lacks
    **dict.fromkeys(
        ("add_bos_token", "character_embeddings", "freq_weighted_replacement", "include_target_tokens"), False
    ),
    **dict.fromkeys(("mask_whole_words", "no_cross_attention", "regression_target", "sentence_avg"), False),
    "classification_head_name": "sentence_classification_head",
    "max_source_positions": None,
}
FORMER = {"max_sentences": "batch_size", "max_sentences_valid": "batch_size_valid"}  # names before fairseq 0.10


def complete(args: argparse.Namespace) -> None:
    """Set on *args* the settings of fairseq that it lacks."""
    vars(args).update({name: value for name, value in missing().items() if name not in vars(args)})


def missing() -> dict[str, object]:
    """Settings of fairseq that this package does not have, or has for some parts alone."""
    return {**fairseq_defaults(), **OF_PARTS}


def complete_script(args: argparse.Namespace) -> None:
    """Set on *args*, which a script has parsed, what :func:`complete` sets, and former names."""
    complete(args)
    for name, present in FORMER.items():
        if name not in vars(args) and present in vars(args):
            setattr(args, name, vars(args)[present])
