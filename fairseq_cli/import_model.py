"""Import a foreign model as a folder with ``checkpoint.pt`` and ``dict.txt``, which all commands
read."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq.config.parser import Parser
from fairseq.errors import UserError
from fairseq_cli import command

SOURCE_FORMATS = ("transformer-xl", "hf-transfo-xl", "hf")  # of fairseq-import


def get_import_parser() -> Parser:
    examples = [
        "fairseq-import openai-community/gpt2 --out imported",
        "fairseq-import model.pt --from transformer-xl --vocab cache.pt --out imported",
    ]
    description = "Import a model into a folder that all commands read."
    parser = Parser(description, examples=examples)
    parser.add_argument(
        "source", metavar="IN", help="a folder, ORG/NAME on the Hugging Face Hub, or the authors' model.pt"
    )
    parser.add_argument(
        "--from",
        dest="source_format",
        default="hf",
        type=_source_format,
        choices=SOURCE_FORMATS,
        help="transformer-xl: the authors' files; others: a Hugging Face folder (default: hf)",
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="output folder for checkpoint.pt and dict.txt")
    parser.add_argument("--revision", metavar="NAME", help="branch or tag of ORG/NAME, such as chck_1M")
    parser.add_argument(
        "--config",
        dest="config_file",
        metavar="FILE.json",
        help="the authors' model settings; required for a state dict",
    )
    parser.add_argument(
        "--vocab", metavar="FILE", help="the authors' cache.pt, or a word on each line (default: placeholders)"
    )
    parser.add_argument(
        "--no-tokenizer", action="store_true", help="leave the tokenizer out: text is split at white space"
    )
    return parser


def _source_format(name: str) -> str:
    if name not in SOURCE_FORMATS:
        raise UserError(f"--from {name}: choose from {', '.join(SOURCE_FORMATS)}")
    return name


def main(args: argparse.Namespace) -> None:
    """Write the model of ``args.source`` to the folder ``args.out``."""
    from fairseq.interop.importing import import_model

    files = args.config_file, args.vocab
    import_model(Path(args.source), Path(args.out), args.source_format, *files, args.no_tokenizer, args.revision)


cli_main = command(main, get_import_parser, logs=False)

if __name__ == "__main__":
    cli_main()
