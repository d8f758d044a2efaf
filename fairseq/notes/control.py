"""What notes are worth to a model: losses by distance to a note, with notes, with other words'
notes, and without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from fairseq.data.dataset import Sample
from fairseq.models.base import BaseFairseqModel
from fairseq.notes.blocks import DISTANCES
from fairseq.notes.dictionary import NoteDictionary
from fairseq.notes.settings import NAME
from fairseq.notes.state import dictionary_of
from fairseq.system.tables import table
from fairseq.tasks.fairseq_task import FairseqTask

CONTROLS = {"permuted": "notes of other words", "dropped": "without notes", "hidden": "without rare words"}
"""How a model is validated besides as it is: the prefixes of figures, and the rows of
:func:`distance_table`."""


def columns(figures: Mapping[str, float]) -> tuple[str, ...]:
    """Names of the *figures* that controls are compared by: over all predicted tokens, and by
    distance to a note."""
    total = next(name for name in ("discriminator_loss", "nll_loss", "loss") if name in figures)
    return (total, *(f"{name}_loss" for name in DISTANCES))


def mark_distances(task: FairseqTask) -> None:
    """Let the validations of *task* compute losses by distance to a word that reads its note."""
    task.extensions[NAME].distances = True  # type: ignore[attr-defined]
    task.subsets = (*task.subsets, *DISTANCES)


@contextlib.contextmanager
def controlled(notes: NoteDictionary, control: str) -> Iterator[None]:
    """Within it, words with written notes read one another's
    (``permuted``), or no word reads (any other *control*).

    A model whose notes gain only what all notes share is as good with permuted ones.
    """
    table, until = notes.table.clone(), notes.until
    try:
        if control == "permuted":
            written = (notes.taken > 0).nonzero()[:, 0]
            # The same order in every validation, so that their losses compare.
            order = written[torch.randperm(len(written), generator=torch.Generator().manual_seed(1)).to(written.device)]
            # One cycle: no word reads a note of its own.
            notes.table[order] = table[order.roll(1)]
        else:
            # From update 0 on no note is read: the same computation without notes.
            notes.until = 0
        yield
    finally:
        notes.table.copy_(table)
        notes.until = until


def without_rare_words(samples: Iterable[Sample | None]) -> Iterator[Sample | None]:
    """*samples* with the mask, or the unknown symbol, in place of the words that
    :func:`mark_distances` measures to."""
    for sample in samples:
        # Not every task has such samples.
        if sample is not None and "hidden" in sample:
            sample = {**sample, "net_input": {**sample["net_input"], "src_tokens": sample["hidden"]}}
        yield sample


def control_figures(
    model: BaseFairseqModel,
    figures: Mapping[str, float],
    measure: Callable[[str], Mapping[str, float]],
    controls: Iterable[str],
) -> dict[str, float]:
    """The *figures* of a validation that *measure*,
    given its name, returns in each of *controls*, by prefix."""
    notes = dictionary_of(model)
    result: dict[str, float] = {}
    for control in controls:
        with contextlib.nullcontext() if notes is None else controlled(notes, control):
            measured = measure(control)
        result |= {f"{control}_{name}": measured[name] for name in columns(figures)}
    return result


def distance_table(figures: Mapping[str, float]) -> list[str]:
    """Lines of a table of *figures*, controls' under their prefixes: bits a predicted token."""
    rows = [["bits, by words to a note", "all", "1", "2-3", "4-8", "farther"]]
    names = columns(figures)
    first = "with notes" if f"dropped_{names[0]}" in figures else "as it is"
    for prefix, title in {"": first, **{f"{name}_": title for name, title in CONTROLS.items()}}.items():
        if prefix + names[0] in figures:
            rows.append([title, *(f"{figures[prefix + name]:.3f}" for name in names)])
    return table(rows, left=1, terminal=True)
