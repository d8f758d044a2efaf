"""Evaluate a language model on tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import argparse
from typing import Any

from fairseq.config.command_settings import HarnessConfig
from fairseq.config.fields import typed
from fairseq.config.parser import Parser
from fairseq_cli import command


def get_harness_parser() -> Parser:
    examples = [
        "fairseq-harness checkpoints --tasks lambada_openai,hellaswag",
        "fairseq-harness checkpoints --pairs blimp.jsonl",
    ]
    description = "Evaluate a language model on tasks of EleutherAI's lm-evaluation-harness."
    parser = Parser(description, [HarnessConfig], examples=examples)
    parser.add_user_dir()
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of a language model, or its folder")
    return parser


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Print a table of the tasks' metrics, and write it with ``--results-path``.

    Returns:
        For each task its metrics.
    """
    from fairseq.interop.harness.evaluation import evaluate

    return evaluate(args.checkpoint, typed(HarnessConfig, args))


cli_main = command(main, get_harness_parser)

if __name__ == "__main__":
    cli_main()
