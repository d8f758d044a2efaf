"""``fairseq-checkpoint``: the mean of several checkpoints, and a sharded one as one file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fairseq.config.parser import Parser
from fairseq.errors import UserError
from fairseq_cli import command, group

# ---- average -----------------------------------------------------------------------------------


def get_average_parser() -> Parser:
    examples = [
        "fairseq-checkpoint average --inputs own --num-epoch-checkpoints 5 --out av.pt",
        "fairseq-checkpoint average --inputs checkpoint8.pt checkpoint9.pt --out av.pt",
    ]
    parser = Parser("Average the parameters of checkpoints.", examples=examples)
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


def average(args: argparse.Namespace) -> None:
    """Average ``args.inputs``, or the newest checkpoints of that folder, to ``args.output``."""
    from fairseq import checkpoint
    from fairseq.checkpoint import averaging
    from fairseq.checkpoint.manager import find_checkpoint
    from fairseq.models.loading import decisive_settings
    from fairseq.system.files import ARCHIVE, prepare_file
    from fairseq.tasks.dictionary_digest import stored_digest

    asked = {kind: count for kind in ("epoch", "update", "best") if (count := vars(args)[f"num_{kind}_checkpoints"])}
    if len(asked) > 1:
        raise UserError("--num-epoch-checkpoints, --num-update-checkpoints, --num-best-checkpoints: give one of them")
    if args.checkpoint_upper_bound is not None and not asked.keys() & {"epoch", "update"}:
        raise UserError("--checkpoint-upper-bound: needs --num-epoch-checkpoints or --num-update-checkpoints")
    paths = list(args.inputs)
    for kind, count in asked.items():
        if len(paths) > 1:
            raise UserError(f"--num-{kind}-checkpoints: --inputs takes one folder, {len(paths)} are given")
        bound, maximizes = args.checkpoint_upper_bound, averaging.maximizes_metric
        paths = [str(path) for path in averaging.newest(paths[0], kind, count, bound, maximizes)]
    if not asked:
        paths = [str(find_checkpoint(path)) for path in paths]
    # Before the inputs are read, which takes minutes
    # for large models; none of them may be overwritten.
    prepare_file("--output", args.output, {f"--inputs {path}": path for path in paths}, ARCHIVE)
    # As functions: the room of checkpoints knows neither tasks nor models.
    checkpoint.save(args.output, averaging.average(paths, stored_digest, decisive_settings))
    print(f"Wrote {args.output}: the mean of {', '.join(paths)}")


# ---- merge -------------------------------------------------------------------------------------


def get_merge_parser() -> Parser:
    examples = [
        "fairseq-checkpoint merge checkpoints/checkpoint_best.pt best.pt",
        "fairseq-checkpoint merge own w.pt --no-save-optimizer-state",
    ]
    description = "Merge the folder of a sharded checkpoint into one file."
    parser = Parser(description, examples=examples)
    parser.add_argument("source", metavar="CHECKPOINT", help="checkpoint of --ddp-backend fully_sharded")
    parser.add_argument("target", metavar="FILE", help="file to write")
    parser.add_argument("--no-save-optimizer-state", action="store_true", help="leave out the optimizer state")
    return parser


def merge(args: argparse.Namespace) -> None:
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


cli_main = group(
    "Average checkpoints, or merge a sharded one.",
    average=command(average, get_average_parser, logs=False),
    merge=command(merge, get_merge_parser, logs=False),
)

if __name__ == "__main__":
    cli_main()
