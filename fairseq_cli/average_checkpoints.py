"""``fairseq-average-checkpoints``: the mean of several checkpoints' parameters, as a checkpoint."""

from __future__ import annotations

import argparse

from fairseq.config.parser import Parser
from fairseq_cli import command, program


def get_average_parser() -> Parser:
    examples = [
        "fairseq-average-checkpoints --inputs own --num-epoch-checkpoints 5 --out av.pt",
        "fairseq-average-checkpoints --inputs checkpoint8.pt checkpoint9.pt --out av.pt",
    ]
    parser = Parser("Average the parameters of checkpoints.", examples=examples, settings_file=False)
    parser.add_argument("--inputs", metavar="FILE", nargs="+", required=True, help="checkpoints, or their folder")
    parser.add_argument("--output", "--out", metavar="FILE", required=True, help="checkpoint to write")
    for kind in ("epoch", "update", "best"):
        text = f"number of newest {kind} checkpoints of a folder" if kind != "best" else "number of best checkpoints"
        parser.add_argument(f"--num-{kind}-checkpoints", metavar="N", type=_count, help=text)
    parser.add_argument("--checkpoint-upper-bound", metavar="N", type=_count, help="highest epoch or update to include")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text}")
    return int(text)


main = program("average_checkpoints")
cli_main = command(main, get_average_parser, logs=False)

if __name__ == "__main__":
    cli_main()
