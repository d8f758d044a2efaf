"""The command line of EleutherAI's lm-evaluation-harness, with ``--model fairseq``."""

from __future__ import annotations

import sys

from fairseq.config.parser import version
from fairseq_cli import command


def main() -> None:
    """Run ``lm_eval`` on the process's command line."""
    if "--version" in sys.argv[1:]:
        print(version())
        return
    # Imports torch, which takes longer than to show the version.
    from fairseq.interop.harness import harness_model, task_data

    harness_model()  # registers it
    from lm_eval.__main__ import cli_evaluate

    with task_data():
        cli_evaluate()


cli_main = command(main, logs=False)

if __name__ == "__main__":
    cli_main()
