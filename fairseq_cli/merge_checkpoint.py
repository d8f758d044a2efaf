"""Write a checkpoint of sharded training as one file."""

from __future__ import annotations

from fairseq.config.parser import Parser
from fairseq_cli import command, program


def get_merge_parser() -> Parser:
    examples = [
        "fairseq-merge-checkpoint checkpoints/checkpoint_best.pt best.pt",
        "fairseq-merge-checkpoint own/checkpoint_last.pt w.pt --no-save-optimizer-state",
    ]
    description = "Merge the folder of a sharded checkpoint into one file."
    parser = Parser(description, examples=examples, settings_file=False)
    parser.add_argument("source", metavar="CHECKPOINT", help="checkpoint of --ddp-backend fully_sharded")
    parser.add_argument("target", metavar="FILE", help="file to write")
    parser.add_argument("--no-save-optimizer-state", action="store_true", help="leave out the optimizer state")
    return parser


main = program("merge_checkpoint")
cli_main = command(main, get_merge_parser, logs=False)

if __name__ == "__main__":
    cli_main()
