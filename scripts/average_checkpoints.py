"""fairseq's script of this name: ``fairseq-average-checkpoints``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fairseq_cli.average_checkpoints import cli_main

if __name__ == "__main__":
    cli_main()
