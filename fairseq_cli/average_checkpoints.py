"""``fairseq-average-checkpoints``: the mean of several checkpoints' parameters, as a checkpoint."""

from __future__ import annotations

import argparse

from fairseq.config.parser import Parser
from fairseq.errors import UserError
from fairseq_cli import command


def get_average_parser() -> Parser:
    examples = [
        "fairseq-average-checkpoints --inputs own --num-epoch-checkpoints 5 --out av.pt",
        "fairseq-average-checkpoints --inputs checkpoint8.pt checkpoint9.pt --out av.pt",
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


def main(args: argparse.Namespace) -> None:
    """Average ``args.inputs``, or the newest checkpoints of that folder, to ``args.output``."""
    from fairseq import checkpoint
    from fairseq.checkpoint.averaging import average, maximizes_metric, newest
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
        paths = [str(path) for path in newest(paths[0], kind, count, args.checkpoint_upper_bound, maximizes_metric)]
    if not asked:
        paths = [str(find_checkpoint(path)) for path in paths]
    # Before the inputs are read, which takes minutes
    # for large models; none of them may be overwritten.
    prepare_file("--output", args.output, {f"--inputs {path}": path for path in paths}, ARCHIVE)
    # As functions: the room of checkpoints knows neither tasks nor models.
    checkpoint.save(args.output, average(paths, stored_digest, decisive_settings))
    print(f"Wrote {args.output}: the mean of {', '.join(paths)}")


cli_main = command(main, get_average_parser, logs=False)

if __name__ == "__main__":
    cli_main()
