"""Show the notes of a checkpoint: neighbours, norms, ages, and a map."""

from __future__ import annotations

import argparse
import dataclasses
import os

from fairseq import checkpoint
from fairseq.analysis import plots
from fairseq.checkpoint.manager import find_checkpoint
from fairseq.config import fields
from fairseq.errors import UserError
from fairseq.evaluation.report import table
from fairseq.inference.loading import load_models
from fairseq.notes import note_map
from fairseq.notes.note_map import Neighbours
from fairseq.notes.study import Note, NoteStudy
from fairseq.notes.words import NoteWords
from fairseq.system import pages
from fairseq.system.files import atomic_folder
from fairseq.system.json_files import write_json
from fairseq.system.provenance import about_run
from fairseq_cli.notes import NotesConfig
from fairseq_cli.shared import results_folder

FILES = ("notes.json", "notes.html", "notes.png")


def main(args: argparse.Namespace) -> dict[str, object]:
    """Print a table of notes and their neighbours,
    and write all notes and their map to ``--results-path``.

    Returns:
        The facts of every note, and the neighbours of those shown, as in ``notes.json``.
    """
    cfg = fields.typed(NotesConfig, args)
    if cfg.results_path is not None:
        plots.require("--results-path")
    path = str(find_checkpoint(args.checkpoint))
    study = _study(path, args.data)
    numbers = study.numbers_of(cfg.words.split()) if cfg.words else study.most_taken(cfg.top)
    neighbours = {
        study.words.words[number]: (near, tokens)
        for number, near, tokens in zip(
            numbers, study.nearest_notes(numbers, cfg.nearest), study.nearest_tokens(numbers, cfg.nearest), strict=True
        )
    }
    with results_folder(cfg.results_path):
        notes = [study.facts(number) for number in range(len(study.words))]
        written = int((study.written > 0).sum())
        print(f"{len(study.words)} notes, {written} of them written, in {study.updates} updates\n")
        print(*table(note_map.table(notes, neighbours), left=len(note_map.HEAD)), sep="\n")
        report = _report(path, study, notes, neighbours)
        if cfg.results_path is not None:
            _write(cfg, study, notes, neighbours, report)
    return report


def _study(path: str, data: str | None) -> NoteStudy:
    """The notes of the checkpoint at *path*, with the words
    of *data* or of the folder that it was trained on."""
    state = checkpoint.load(path, only="model")
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


def _write(
    cfg: NotesConfig, study: NoteStudy, notes: list[Note], neighbours: Neighbours, report: dict[str, object]
) -> None:
    """Write :data:`FILES`; without written notes, only the first."""
    drawn = study.most_taken(cfg.map_words)
    files = FILES if drawn else FILES[:1]
    assert cfg.results_path is not None
    with atomic_folder(cfg.results_path, files, "--results-path") as folder:
        report = {**report, **about_run()}
        write_json(folder / "notes.json", report)
        if not drawn:
            return
        positions, chosen = study.plane(drawn), [notes[number] for number in drawn]
        facts = {"Checkpoint": report["checkpoint"], "Notes": len(notes), "On the map": len(drawn)}
        facts["Updates"] = study.updates
        facts |= pages.run_facts(report)
        pages.write(folder / "notes.html", note_map.as_page(chosen, positions, neighbours, facts))
        plots.draw_notes(folder / "notes.png", chosen, positions)
