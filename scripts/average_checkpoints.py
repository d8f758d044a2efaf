"""fairseq's script of this name: ``fairseq-checkpoint average``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fairseq_cli import command
from fairseq_cli.checkpoint import average, get_average_parser


def average_checkpoints(inputs: Sequence[str]) -> dict[str, Any]:
    """See :func:`fairseq.checkpoint_utils.average_checkpoints`."""
    from fairseq import checkpoint_utils

    return checkpoint_utils.average_checkpoints(inputs)


if __name__ == "__main__":
    command(average, get_average_parser, logs=False)()
