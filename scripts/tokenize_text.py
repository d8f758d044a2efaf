"""Tokenise text, one paragraph per line, with sacremoses, for ``fairseq-preprocess``.

    python scripts/tokenize_text.py novels.txt novels.tokens --workers 2

Hyphens inside words become ``@-@`` as in WikiText. Headings (``= Title =``) and blank lines are unchanged. Files
that end in .xz or .gz are decompressed. The result does not depend on the number of workers.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tqdm import tqdm

from fairseq.errors import UserError
from fairseq.files import atomic_file

LINES_A_TASK = 500


def open_text(path: Path) -> IO[str]:
    """Open a text file, decompressed by its suffix."""
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return open(path, encoding="utf-8")


def tokenize(lines: list[str]) -> list[str]:
    """*lines* with words and punctuation separated by spaces."""
    from sacremoses import MosesTokenizer

    tokenizer = MosesTokenizer(lang="en")
    return [
        line.strip()
        if line.lstrip().startswith("= ")
        else tokenizer.tokenize(line, aggressive_dash_splits=True, escape=False, return_str=True)
        for line in lines
    ]


def tasks(file: IO[str]) -> Iterator[list[str]]:
    """Chunks of lines."""
    lines: list[str] = []
    for line in file:
        lines.append(line)
        if len(lines) == LINES_A_TASK:
            yield lines
            lines = []
    if lines:
        yield lines


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="text, one paragraph per line (.txt, .xz, .gz)")
    parser.add_argument("target", type=Path, help="file for the tokenised text")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    args = parser.parse_args(argv)
    if not args.source.is_file():
        print(f"{args.source}: file not found; check the path", file=sys.stderr)
        sys.exit(2)
    try:
        with (
            open_text(args.source) as file,
            atomic_file(args.target) as out,
            multiprocessing.Pool(max(1, args.workers)) as pool,
        ):
            done = pool.imap(tokenize, tasks(file))
            for lines in tqdm(done, unit=f" × {LINES_A_TASK} lines", disable=not sys.stderr.isatty()):
                out.writelines(f"{line}\n".encode() for line in lines)
    except (OSError, UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        print(f"{args.source}: cannot be read as text ({error})", file=sys.stderr)
        sys.exit(2)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
