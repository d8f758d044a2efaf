"""Write a checkpoint of sharded training as one file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fairseq import checkpoint
from fairseq.checkpoint import sharded
from fairseq.checkpoint.manager import find_checkpoint
from fairseq.errors import UserError
from fairseq.system.files import ARCHIVE, prepare_file


def main(args: argparse.Namespace) -> None:
    """Write the checkpoint in the folder ``args.source``
    to the file ``args.target``; all of it is verified."""
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
