"""Show the notes of a checkpoint: neighbours, norms and ages."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fairseq.checkpoint import load
from fairseq.checkpoint.manager import find_checkpoint
from fairseq.errors import UserError
from fairseq.inference.loading import load_models
from fairseq.notes.study import Neighbour, Note, NoteStudy
from fairseq.notes.words import NoteWords
from fairseq.system.files import results_folder
from fairseq.system.json_files import write_json
from fairseq.system.provenance import about_run
from fairseq.system.tables import table

HEAD = ("word", "occurrences", "taken", "age", "norm", "nearest notes", "nearest tokens")

Neighbours = Mapping[str, tuple[Sequence[Neighbour], Sequence[Neighbour]]]
"""Nearest notes and nearest tokens, by word."""


def show_notes(
    checkpoint: str,
    data: str | None = None,
    words: Sequence[str] = (),
    top: int = 10,
    nearest: int = 8,
    results_path: str | None = None,
) -> dict[str, object]:
    """Print a table of the notes of *words*, else of the *top* taken most often, with their
    *nearest* neighbours; write all notes to ``notes.json`` in *results_path*.

    Args:
        checkpoint: of a model trained with notes, or its folder.
        data: its data folder; None: the one that it was trained on.

    Returns:
        The facts of every note, and the neighbours of those shown, as in ``notes.json``.
    """
    path = str(find_checkpoint(checkpoint))
    study = _study(path, data)
    numbers = study.numbers_of(words) if words else study.most_taken(top)
    neighbours = {
        study.words.words[number]: (near, tokens)
        for number, near, tokens in zip(
            numbers, study.nearest_notes(numbers, nearest), study.nearest_tokens(numbers, nearest), strict=True
        )
    }
    with results_folder(results_path):
        notes = [study.facts(number) for number in range(len(study.words))]
        written = int((study.written > 0).sum())
        print(f"{len(study.words)} notes, {written} of them written, in {study.updates} updates\n")
        print(*table(_rows([study.facts(number) for number in numbers], neighbours), left=len(HEAD)), sep="\n")
        report = _report(path, study, notes, neighbours)
        if results_path is not None:
            write_json(Path(results_path) / "notes.json", {**report, **about_run()}, "`results_path`")
    return report


def _study(path: str, data: str | None) -> NoteStudy:
    """The notes of the checkpoint at *path*, with the words
    of *data* or of the folder that it was trained on."""
    state = load(path, only="model")
    # The first folder of several has the dictionary and the notes.
    folder = data or str(state["args"].get("data", "")).split(":")[0]
    if not folder or not os.path.isdir(folder):
        raise UserError(f"DATA {folder}: folder not found; give the data folder that {path} was trained with")
    models, task, _ = load_models([path], folder, settings={"keep_notes": True}, states=[state])
    return NoteStudy(models[0], NoteWords.load(folder), task.source_dictionary, path)


def _report(path: str, study: NoteStudy, notes: list[Note], neighbours: Neighbours) -> dict[str, object]:
    return {
        "checkpoint": path,
        "updates": study.updates,
        "notes": [dataclasses.asdict(note) for note in notes],
        "neighbours": {
            word: {
                "notes": [dataclasses.asdict(one) for one in near],
                "tokens": [dataclasses.asdict(one) for one in tokens],
            }
            for word, (near, tokens) in neighbours.items()
        },
    }


def _rows(notes: Sequence[Note], neighbours: Neighbours) -> list[list[str]]:
    """Rows of cells: the numbers of each word of *neighbours*, and its nearest ones."""
    rows = [list(HEAD)]
    for note in notes:
        if note.word in neighbours:
            age = "never written" if note.age is None else note.age
            nearest = (", ".join(f"{one.word} {one.cosine:.2f}" for one in some) for some in neighbours[note.word])
            rows.append([note.word, str(note.count), str(note.taken), str(age), f"{note.norm:.3g}", *nearest])
    return rows
