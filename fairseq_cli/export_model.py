"""Export a model as a Hugging Face transformers folder, or a language model as a checkpoint of
fairseq."""

from __future__ import annotations

from fairseq.config.parser import Parser
from fairseq_cli import command, program


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
    parser.add_argument("--results", metavar="FILE", help="results.json of an evaluation, for the model card")
    return parser


main = program("export_model")
cli_main = command(main, get_export_parser, logs=False)

if __name__ == "__main__":
    cli_main()
