"""What an evaluation or a generation reads: checkpoints, and a split or a text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq.checkpoint.manager import find_checkpoint, is_model
from fairseq.config.command_settings import ModelPathConfig, TextFormatConfig
from fairseq.config.settings import StreamConfig
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.text.dictionary import Dictionary
from fairseq.text.raw_text import STDIN, format_of
from fairseq.text.text_corpus import TextCorpus, TextReader


def existing_checkpoint(path: str) -> str:
    """Return the path of the checkpoint at *path*, or of the best one in that folder.

    Raises:
        UserError: there is none, which is seen here before other models are measured.
    """
    checkpoint = find_checkpoint(path)
    if not os.path.exists(checkpoint):
        raise UserError(f"{checkpoint}: file not found; check the path")
    return str(checkpoint)


def data_and_models(cfg: ModelPathConfig, data: str) -> tuple[str, list[str]]:
    """Return the data and the checkpoints that ``--path`` and DATA name; a folder is the best
    checkpoint in it.

    Without ``--path`` DATA is a model, a checkpoint or its folder, and its dictionary and tokenizer
    are the data.

    Raises:
        UserError: there is neither, a file is missing, a folder has no checkpoint, DATA is a model
            without the split to read, or another file although a split is to be read.
    """
    reads_split = not (getattr(cfg, "text", None) or hasattr(cfg, "input"))
    if reads_split and os.path.isfile(data) and not is_model(Path(data)):
        advice = f", or the model as DATA and `text` {data}" if hasattr(cfg, "text") else ""
        raise UserError(f"DATA: {data}: is a file; give the folder that fairseq-preprocess wrote{advice}")
    # A path with a colon that is there is one checkpoint, as with DATA.
    names = [cfg.path] if cfg.path and os.path.exists(cfg.path) else (cfg.path or "").split(":")
    if paths := [path for path in names if path]:
        return data, [existing_checkpoint(path) for path in paths]
    source = Path(data)
    if not os.path.exists(source):
        raise UserError(f"DATA: {source}: file or folder not found; give a model or a data folder")
    if not is_model(source):
        raise UserError(
            "`path`: name a checkpoint, or several joined by colons, or give a model as DATA: "
            f"{source} has no checkpoint"
        )
    path = find_checkpoint(source)
    if reads_split and not any(path.parent.glob("*.idx")):
        if hasattr(cfg, "text"):
            raise UserError(f"`text`: give a text to read; {source} is a model, which has no splits")
        raise UserError(f"DATA: {source} is a model, which has no splits; give the data folder, and `path` {source}")
    return str(path.parent), [str(path)]


def stream_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings *flat* with ``sample_break_mode`` ``none``, for what reads a split as one
    stream.

    Raises:
        UserError: *flat* has another break mode.
    """
    # *flat* has what the command line gives; what it leaves open would be the checkpoint's.
    settings = {"sample_break_mode": "none", **flat}
    if (mode := settings["sample_break_mode"]) != "none":
        raise UserError(f"`sample_break_mode` {mode}: the split is read as one stream; use none")
    return settings


def refuse_two_texts(text: str | None, split: str) -> None:
    """Raise UserError if both ``--text`` and another *split* than the default were asked for."""
    if text is not None and split != StreamConfig.gen_subset:
        raise UserError(f"`gen_subset` {split}: has no effect with `text`; give one of them")


def read_text(
    path: str,
    form: TextFormatConfig,
    data: str,
    dictionary: Dictionary,
    world: World,
    documents: bool = False,
    lines_apart: bool = False,
) -> TextCorpus:
    """Return the tokens of a file of text, encoded as *data* was;
    without a tokenizer the file holds tokens.

    With *documents* sizes are of documents, rows of JSON lines or else lines; see
    :meth:`TextReader.read`.

    Raises:
        UserError: the file or the tokenizer cannot be used, or several processes would share stdin.
    """
    if path == STDIN and world.size > 1:
        raise UserError(f"`text` -: {world.size} processes cannot share stdin; save the text to a file")
    form_of_path = format_of(path, form.text_field, form.join_lines)
    return TextReader.of(data, dictionary).read(path, form_of_path, documents, lines_apart)
