"""Export a model as a Hugging Face transformers folder, or a language model as a checkpoint of
fairseq."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq.config.parser import Parser
from fairseq.errors import UserError
from fairseq_cli import command


def get_export_parser() -> Parser:
    examples = [
        "fairseq-export own/checkpoint_best.pt --to hf --out exported",
        "fairseq-export electra --to hf --out generator --half generator --revisions",
    ]
    description = "Export a model to a folder for Hugging Face transformers, or a language model to fairseq."
    parser = Parser(description, examples=examples)
    parser.add_user_dir()
    parser.add_argument("source", metavar="CHECKPOINT", help="checkpoint of a language model or an encoder")
    parser.add_argument("--to", dest="target_format", required=True, choices=("hf", "fairseq"), help="format to write")
    parser.add_argument("--out", metavar="DIR", required=True, help="new output folder; with --to fairseq the file")
    parser.add_argument("--data", metavar="DATA", help="data folder or dict.txt (default: next to the checkpoint)")
    parser.add_argument(
        "--half", choices=("discriminator", "generator"), default="discriminator", help="ELECTRA network to write"
    )
    parser.add_argument(
        "--revisions", action="store_true", help="also export checkpoints by words, as subfolders chck_1M, …"
    )
    parser.add_argument(
        "--push", metavar="ORG/NAME", help="also upload to the Hugging Face Hub; a new repository is private"
    )
    parser.add_argument("--results", metavar="FILE", help="results.json of an evaluation, for the model card")
    return parser


def main(args: argparse.Namespace) -> None:
    """Write the model of ``args.source`` to ``args.out``."""
    from fairseq.interop.exporting import export_model, export_to_fairseq

    if args.target_format == "fairseq":
        given = {"--results": args.results, "--revisions": args.revisions, "--push": args.push}
        for flag, is_set in given.items():
            if is_set:
                raise UserError(f"{flag}: is for --to hf; leave it out")
        export_to_fairseq(args.source, Path(args.out), args.data)
    else:
        export_model(args.source, Path(args.out), args.data, args.half, args.revisions, args.results, args.push)


cli_main = command(main, get_export_parser, logs=False)

if __name__ == "__main__":
    cli_main()
