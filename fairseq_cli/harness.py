"""``fairseq-harness``: evaluate a language model on minimal pairs, and on tasks of EleutherAI's
lm-evaluation-harness, also by that library's own command line."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from fairseq.config.command_settings import HarnessConfig
from fairseq.config.fields import typed
from fairseq.config.parser import Parser, version
from fairseq_cli import command, group


def get_harness_parser() -> Parser:
    examples = [
        "fairseq-harness checkpoints --pairs blimp.jsonl",
        "fairseq-harness checkpoints --pairs blimp/data --results-path results",
    ]
    description = (
        "Evaluate a language model on minimal pairs. fairseq-harness lm-eval runs tasks of EleutherAI's "
        "lm-evaluation-harness: it is that library's own command line, with --model fairseq."
    )
    parser = Parser(description, [HarnessConfig], examples=examples)
    parser.add_user_dir()
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of a language model, or its folder")
    return parser


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Print a table of the accuracies, and write it with ``--results-path``.

    Returns:
        For each phenomenon its metrics.
    """
    from fairseq.interop.harness.evaluation import evaluate

    return evaluate(args.checkpoint, typed(HarnessConfig, args))


def lm_eval() -> None:
    """Run ``lm_eval`` on the process's command line."""
    if "--version" in sys.argv[1:]:
        print(version())
        return
    # Imports torch, which takes longer than to show the version.
    from fairseq.interop.harness import harness_model

    harness_model()  # registers it
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


cli_main = group(
    "Evaluate a language model.", default=command(main, get_harness_parser), lm_eval=command(lm_eval, logs=False)
)

if __name__ == "__main__":
    cli_main()
