"""``fairseq-analyze``: what a trained model does with its context, its heads and its notes, and the
curves of training runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from fairseq.config.command_settings import AttentionConfig, ReclConfig
from fairseq.config.fields import Config, flag, typed
from fairseq.config.parser import Parser
from fairseq.config.settings import CommonConfig, StreamConfig
from fairseq.errors import UserError
from fairseq_cli import command, group
from fairseq_cli.common import evaluation_parser

# ---- recl --------------------------------------------------------------------------------------


def get_recl_parser() -> Parser:
    examples = [
        "fairseq-analyze recl data-bin --path xl:base --out recl",
        "fairseq-analyze recl data-bin --path xl --max-context 300 --positions 200",
    ]
    description = "Measure the relative effective context length (RECL) of models."
    return evaluation_parser(description, examples, [ReclConfig], [StreamConfig])


def recl(args: argparse.Namespace) -> dict[str, object]:
    """Measure the checkpoints of ``--path`` on ``--gen-subset``;
    the table goes to stdout, progress to stderr.

    Returns:
        The metrics, as in ``results.json``.
    """
    from fairseq.analysis.recl_report import report_recl

    cfg, stream, common = typed(ReclConfig, args), typed(StreamConfig, args), typed(CommonConfig, args)
    return report_recl(args.data, cfg, stream, common, vars(args))


# ---- attention ---------------------------------------------------------------------------------


def get_attention_parser() -> Parser:
    examples = [
        "fairseq-analyze attention data-bin --path own --out attention",
        "fairseq-analyze attention data-bin --path xl --out a --heads 0:3,15:0",
    ]
    description = "Plot the distances over which a model's heads attend."
    return evaluation_parser(description, examples, [AttentionConfig], [StreamConfig], without=("compile",))


def attention(args: argparse.Namespace) -> dict[str, object]:
    """Plot the attention of the checkpoint of ``--path``
    on ``--gen-subset``; a table goes to stdout.

    Returns:
        The metrics, as in ``results.json``.
    """
    from fairseq.analysis.attention_report import report_attention

    cfg, stream, common = typed(AttentionConfig, args), typed(StreamConfig, args), typed(CommonConfig, args)
    return report_attention(args.data, cfg, stream, common, vars(args))


# ---- notes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NotesConfig(Config):
    """Notes: settings of ``fairseq-analyze notes``."""

    words: str | None = flag(None, "space-separated words to show (default: those taken most often)", metavar="WORDS")
    top: int = flag(10, "number of words to show without `words`", low=1)
    nearest: int = flag(8, "nearest neighbours to list per word", low=1)
    results_path: str | None = flag(None, "folder for notes.json", aliases=("--out",), metavar="DIR")


def get_notes_parser() -> Parser:
    examples = [
        "fairseq-analyze notes tnf --words 'photosynthesis quasar'",
        "fairseq-analyze notes tnf/checkpoint_best.pt data-bin --results-path notes",
    ]
    parser = Parser("Show the notes of rare words in a checkpoint.", [NotesConfig], examples=examples)
    parser.add_user_dir()
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of a model trained with notes")
    parser.add_argument("data", metavar="DATA", nargs="?", help="its data folder (default: the one it was trained on)")
    return parser


def notes(args: argparse.Namespace) -> dict[str, object]:
    """Print a table of notes and their neighbours, and write all notes to ``--results-path``.

    Returns:
        The facts of every note, and the neighbours of those shown, as in ``notes.json``.
    """
    from fairseq.analysis.notes import show_notes

    cfg = typed(NotesConfig, args)
    words = cfg.words.split() if cfg.words else []
    return show_notes(args.checkpoint, args.data, words, cfg.top, cfg.nearest, cfg.results_path)


# ---- curves ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CurvesConfig(Config):
    """Curves: settings of ``fairseq-analyze curves``."""

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


def get_curves_parser() -> Parser:
    examples = [
        "fairseq-analyze curves own",
        "fairseq-analyze curves BERT=bert1,bert2 notes=tnf1,tnf2 --reach 7.5",
    ]
    parser = Parser("Draw the curves of training runs and compare them.", [CurvesConfig], examples=examples)
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="checkpoint folder or its metrics.jsonl, or NAME=RUN,RUN,… with one per seed",
    )
    return parser


def curves(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a table of the runs, and draw their curves into ``--results-path``.

    Returns:
        For each run the last and lowest value of the metric,
        and the position at which it reaches ``--reach``.
    """
    from fairseq.analysis.runs import compare_runs

    cfg = typed(CurvesConfig, args)
    splits = [split.strip() for split in cfg.split.split(",") if split.strip()]
    if not splits:
        raise UserError(f"--split {cfg.split!r}: empty; give a validation split, train_inner or train")
    # Training beside validations, of which a short run has only one.
    adds_training = cfg.split == CurvesConfig.split
    return compare_runs(args.runs, cfg.figure, splits, cfg.over, cfg.reach, cfg.results_path, adds_training)


cli_main = group(
    "Analyze trained models and training runs.",
    recl=command(recl, get_recl_parser),
    attention=command(attention, get_attention_parser),
    notes=command(notes, get_notes_parser),
    curves=command(curves, get_curves_parser),
)

if __name__ == "__main__":
    cli_main()
