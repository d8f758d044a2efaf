"""Write a checkpoint of sharded training as one file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fairseq.config.parser import Parser
from fairseq.errors import UserError
from fairseq_cli import command


def get_merge_parser() -> Parser:
    examples = [
        "fairseq-merge-checkpoint checkpoints/checkpoint_best.pt best.pt",
        "fairseq-merge-checkpoint own/checkpoint_last.pt w.pt --no-save-optimizer-state",
    ]
    description = "Merge the folder of a sharded checkpoint into one file."
    parser = Parser(description, examples=examples)
    parser.add_argument("source", metavar="CHECKPOINT", help="checkpoint of --ddp-backend fully_sharded")
    parser.add_argument("target", metavar="FILE", help="file to write")
    parser.add_argument("--no-save-optimizer-state", action="store_true", help="leave out the optimizer state")
    return parser


def main(args: argparse.Namespace) -> None:
    """Write the checkpoint in the folder ``args.source``
    to the file ``args.target``; all of it is verified."""
    from fairseq import checkpoint
    from fairseq.checkpoint import sharded
    from fairseq.checkpoint.manager import find_checkpoint
    from fairseq.system.files import ARCHIVE, prepare_file

    source = find_checkpoint(args.source)
    if not os.path.exists(source):
        raise UserError(f"{args.source}: file not found; check the path")
    if not sharded.is_folder(source):
        raise UserError(f"{args.source}: not a checkpoint of --ddp-backend fully_sharded, which is a folder")
    # A file beside the parts would make the folder invalid.
    if os.path.dirname(os.path.realpath(args.target)) == os.path.realpath(source):
        raise UserError(f"FILE {args.target}: is in the folder of the checkpoint; choose another file")
    prepare_file("FILE", args.target, begins=ARCHIVE)
    checkpoint.verify(source)
    state = checkpoint.load(source)
    if args.no_save_optimizer_state:
        state.pop("last_optimizer_state", None)
    checkpoint.save(args.target, state)
    print(f"{args.target}: {Path(args.target).stat().st_size / 2**20:,.1f} MiB")


cli_main = command(main, get_merge_parser, logs=False)

if __name__ == "__main__":
    cli_main()
