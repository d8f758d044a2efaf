"""``fairseq-eval-lm`` in the tests' process, and small data for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import runs

from fairseq.config import options
from fairseq.data.indexed_dataset import IndexedWriter, token_dtype
from fairseq.text.dictionary import Dictionary
from fairseq_cli import eval_lm
from fairseq_cli.eval_lm import get_eval_lm_parser


def evaluate(*flags: Any, data: str | Path = runs.DATA) -> dict[str, Any]:
    """Run the command; returns its figures. A list holds words that are not to be split."""
    words = [word for flag in flags for word in (flag if isinstance(flag, list) else str(flag).split())]
    return eval_lm.main(options.parse_args_and_arch(get_eval_lm_parser(), [str(data), *words]))


def make_data(folder: Path, symbols: Sequence[str], lines: Sequence[str]) -> Path:
    """A data-bin folder with a test split of the given lines of words."""
    folder.mkdir()
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    dictionary.save(folder / "dict.txt")
    ids = [dictionary.encode(line) for line in lines]
    with IndexedWriter(folder / "test", token_dtype(len(dictionary))) as writer:
        writer.add(np.concatenate(ids), np.array([len(line) for line in ids]))
    return folder
