"""Draw the curves of training runs and compare them."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import Config, flag
from fairseq.config.parser import Parser
from fairseq_cli import command, program


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
    parser = Parser(
        "Draw the curves of training runs and compare them.", [PlotConfig], examples=examples, settings_file=False
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="checkpoint folder or its metrics.jsonl, or NAME=RUN,RUN,… with one per seed",
    )
    return parser


main = program("plot")
cli_main = command(main, get_plot_parser)

if __name__ == "__main__":
    cli_main()
