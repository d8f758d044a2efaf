"""Write the bytes or letters of a text as symbols, in three splits with their dictionary."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq.text.symbols import convert, split_sizes


def main(args: argparse.Namespace) -> None:
    """Write ``train.txt``, ``valid.txt``, ``test.txt`` and ``dict.txt``, and print their sizes.

    Raises:
        UserError: the text cannot be read or split, or the files cannot be written.
    """
    source, folder = Path(args.source), Path(args.destdir)
    tokens = convert(source, folder, args.kind)
    for name, size in split_sizes(source.stat().st_size).items():
        added = "" if tokens[name] == size else ", plus one </s>: it ends in the middle of a line"
        print(f"{folder / name}.txt: {size:,} characters{added}")


def cli_main() -> None:
    """``fairseq-symbols``."""
    from fairseq.config import options

    options.run_command(main, options.get_symbols_parser)


if __name__ == "__main__":
    cli_main()
