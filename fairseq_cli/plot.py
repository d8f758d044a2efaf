"""Draw the curves of training runs and compare them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from fairseq.config import fields
from fairseq.config.fields import Config, flag
from fairseq.config.parser import Parser
from fairseq.errors import UserError
from fairseq_cli import command


@dataclass(frozen=True)
class PlotConfig(Config):
    """Curves: settings of ``fairseq-plot``."""

    figure: str = flag("loss", "metric of the log to draw", metavar="NAME")
    split: str = flag("valid", "validation splits, train_inner or train; of one run also train_inner", metavar="NAME,…")
    over: str = flag("updates", "horizontal axis", choices=("updates", "tokens", "hours"))
    reach: float | None = flag(None, "report when each run reaches this value of the metric")
    results_path: str | None = flag(
        None,
        "picture: .png, .svg or .pdf (default: curves.png in RUN, a folder)",
        aliases=("--out",),
        metavar="FILE",
    )


def get_plot_parser() -> Parser:
    examples = [
        "fairseq-plot own",
        "fairseq-plot BERT=bert1,bert2 notes=tnf1,tnf2 --over hours --reach 7.5",
    ]
    parser = Parser("Draw the curves of training runs and compare them.", [PlotConfig], examples=examples)
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="checkpoint folder or its metrics.jsonl, or NAME=RUN,RUN,… with one per seed",
    )
    return parser


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a table of the runs, and draw their curves into ``--results-path``.

    Returns:
        For each run the last and lowest value of the metric,
        and the position at which it reaches ``--reach``.
    """
    from fairseq.analysis.runs import compare_runs

    cfg = fields.typed(PlotConfig, args)
    splits = [split.strip() for split in cfg.split.split(",") if split.strip()]
    if not splits:
        raise UserError(f"--split {cfg.split!r}: empty; give a validation split, train_inner or train")
    # Training beside validations, of which a short run has only one.
    adds_training = cfg.split == PlotConfig.split
    return compare_runs(args.runs, cfg.figure, splits, cfg.over, cfg.reach, cfg.results_path, adds_training)


cli_main = command(main, get_plot_parser)

if __name__ == "__main__":
    cli_main()
