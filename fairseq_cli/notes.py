"""Show the notes of a checkpoint: neighbours, norms, ages, and a map."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from fairseq.config import fields
from fairseq.config.fields import Config, flag
from fairseq.config.parser import Parser
from fairseq_cli import command


@dataclass(frozen=True)
class NotesConfig(Config):
    """Notes: settings of ``fairseq-notes``."""

    words: str | None = flag(None, "space-separated words to show (default: those taken most often)", metavar="WORDS")
    top: int = flag(10, "number of words to show without `words`", low=1)
    nearest: int = flag(8, "nearest neighbours to list per word", low=1)
    map_words: int = flag(500, "number of words on the map", low=1)
    results_path: str | None = flag(
        None, "folder for notes.json, notes.html and notes.png", aliases=("--out",), metavar="DIR"
    )


def get_notes_parser() -> Parser:
    examples = [
        "fairseq-notes tnf/checkpoint_best.pt --words 'photosynthesis quasar'",
        "fairseq-notes tnf/checkpoint_best.pt data-bin --results-path notes",
    ]
    parser = Parser("Show the notes of rare words in a checkpoint.", [NotesConfig], examples=examples)
    parser.add_user_dir()
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of a model trained with notes")
    parser.add_argument("data", metavar="DATA", nargs="?", help="its data folder (default: the one it was trained on)")
    return parser


def main(args: argparse.Namespace) -> dict[str, object]:
    """Print a table of notes and their neighbours,
    and write all notes and their map to ``--results-path``.

    Returns:
        The facts of every note, and the neighbours of those shown, as in ``notes.json``.
    """
    from fairseq.analysis.notes import show_notes

    cfg = fields.typed(NotesConfig, args)
    words = cfg.words.split() if cfg.words else []
    return show_notes(args.checkpoint, args.data, words, cfg.top, cfg.nearest, cfg.map_words, cfg.results_path)


cli_main = command(main, get_notes_parser)

if __name__ == "__main__":
    cli_main()
