"""Checkpoints by text read: at which words or tokens a run saves, and how many it has read.

An epoch reads all text of its data folder, and a position in an epoch its share of that. So the
amount follows from the position in the data alone: it is the sum over processes, and the same in a
resumed run and in the next stage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairseq.config.settings import CheckpointConfig
from fairseq.data.folders import check_split, corpus_prefixes, data_folders
from fairseq.data.indexed_dataset import token_count
from fairseq.data.iterator import EpochIterator
from fairseq.errors import UserError
from fairseq.text.tokenization import load_counts

SYNTAX = "EVERY[:TIMES][,EVERY…] with growing ends, as in 1M:10,10M:10,100M or 500K"
_RANGE = re.compile(r"([1-9]\d{0,11})([KMB]?)(?::([1-9]\d{0,8}))?")
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


class Milestones:
    """The amounts of text at which a run saves a checkpoint of its own name.

    Raises:
        UserError: a setting is malformed, or the data do not know their words.
    """

    def __init__(self, saving: CheckpointConfig, data_path: str, split: str) -> None:
        texts = {unit: getattr(saving, f"save_interval_{unit}") for unit in ("words", "tokens")}
        requested = {unit: text for unit, text in texts.items() if text}
        if len(requested) == 2:
            raise UserError("`save_interval_words`: cannot be combined with `save_interval_tokens`; give one of them")
        self._unit, text = next(iter(requested.items()), ("", ""))
        self._ranges = _ranges(f"`save_interval_{self._unit}` {text}", text) if text else []
        folders = data_folders(data_path) if text else []
        self._epochs = [sum(_amounts(folder, split, self._unit)) for folder in folders]

    def amount(self, batches: EpochIterator) -> int:
        """Words or tokens before the position of *batches*; 0 where no checkpoint is saved by
        them."""
        # At the start of an epoch its data need not be open.
        return self._amount(batches.epoch, batches.read, batches.sampler.layout.units if batches.read else 1)

    def amount_at(self, position: Mapping[str, Any]) -> int:
        """Words or tokens before a *position* in the data as a checkpoint holds it."""
        read = position.get("iterations_in_epoch") and position.get("read") or {"count": 0, "units": 1}
        return self._amount(position["epoch"] or 1, read["count"], read["units"])

    def passed(self, before: int, amount: int) -> str:
        """The name of the checkpoint for the last milestone between two amounts; empty: there is
        none."""
        milestone = previous = 0
        for every, end in self._ranges:
            last = int(min(amount, end)) // every * every
            # Several may have been passed in one update: the file is named after the last.
            milestone = last if last > max(before, previous) else milestone
            previous = int(min(amount, end))
        return f"checkpoint_{self._unit}_{milestone}.pt" if milestone else ""

    def _amount(self, epoch: int, read: int, units: int) -> int:
        if not self._epochs:
            return 0
        # Folders of data are read one an epoch, in turns.
        turns, number = divmod(epoch - 1, len(self._epochs))
        before = turns * sum(self._epochs) + sum(self._epochs[:number])
        return before + self._epochs[number] * read // units


def _ranges(setting: str, text: str) -> list[tuple[int, float]]:
    """The intervals of a setting, each with the amount up
    to which it holds; UserError if *text* is malformed."""
    ranges: list[tuple[int, float]] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        every = int(match[1]) * _FACTORS[match[2]] if match else 0
        end = every * int(match[3]) if match and match[3] else math.inf
        if match is None or (ranges and end <= ranges[-1][1]):
            raise UserError(f"{setting}: {part!r} is not the next part of {SYNTAX}")
        ranges.append((every, end))
    return ranges


def _amounts(folder: Path, split: str, unit: str) -> Iterator[int]:
    """The words or tokens of each file of a split."""
    check_split(folder, split)
    for prefix in corpus_prefixes(folder, split, combine=True):
        if unit == "tokens":
            yield token_count(prefix)
        elif (counts := load_counts(prefix)) is not None:
            yield counts.words
        else:
            raise UserError(
                f"{prefix}.raw.json: file not found; fairseq-preprocess counts the words of raw text, with `tokenizer` "
                "or `bpe`; use `save_interval_tokens`"
            )
