"""Helpers shared by commands: checkpoints, corpora, notes and progress bars."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fairseq import distributed
from fairseq.checkpoint.manager import find_checkpoint, is_model
from fairseq.config import fields
from fairseq.config.command_settings import ModelPathConfig, TextFormatConfig
from fairseq.config.settings import CommonConfig, DistributedConfig, StreamConfig
from fairseq.distributed import Job, World
from fairseq.errors import UserError
from fairseq.logging.progress import Progress, no_progress, progress_bar
from fairseq.system.files import prepare_folder, removing_empty_folders
from fairseq.system.terminal import log_to_stderr
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
        UserError: there is neither, a file is missing, a folder has no checkpoint, or DATA is a
            model without the split to read.
    """
    # A path with a colon that is there is one checkpoint, as with DATA.
    names = [cfg.path] if cfg.path and os.path.exists(cfg.path) else (cfg.path or "").split(":")
    if paths := [path for path in names if path]:
        return data, [existing_checkpoint(path) for path in paths]
    source = Path(data)
    if not os.path.exists(source):
        raise UserError(f"DATA: {source}: file or folder not found; give a model or a data folder")
    if not is_model(source):
        raise UserError(
            "--path: name a checkpoint, or several joined by colons, or give a model as DATA: "
            f"{source} has no checkpoint"
        )
    path = find_checkpoint(source)
    if not (getattr(cfg, "text", None) or hasattr(cfg, "input") or any(path.parent.glob("*.idx"))):
        if hasattr(cfg, "text"):
            raise UserError(f"--text: give a text to read; {source} is a model, which has no splits")
        raise UserError(f"DATA: {source} is a model, which has no splits; give the data folder, and --path {source}")
    return str(path.parent), [str(path)]


def stream_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return *args* as a dict with ``sample_break_mode`` ``none``, for commands that read the split
    as one stream.

    Raises:
        UserError: *args* have another break mode.
    """
    # *args* have what the command line gives; what it leaves open would be the checkpoint's.
    settings = {"sample_break_mode": "none", **vars(args)}
    if (mode := settings["sample_break_mode"]) != "none":
        raise UserError(f"--sample-break-mode {mode}: the split is read as one stream; use none")
    return settings


def run_on_processes(evaluate: Callable[[argparse.Namespace, World], object], args: argparse.Namespace) -> Any:
    """Call *evaluate*, a function of a module, in as many processes as *args* or torchrun ask for;
    by default in one.

    Returns what it returned in this process; None if that only started the others.
    """
    cfg = fields.typed(DistributedConfig, args)
    # Without a number training starts a process per GPU;
    # one is enough to evaluate, unless more are asked for.
    cfg = dataclasses.replace(cfg, distributed_world_size=cfg.distributed_world_size or 1)
    return distributed.run(Job(_evaluate, (evaluate, args), fields.typed(CommonConfig, args), cfg))


def _evaluate(what: tuple[Callable[[argparse.Namespace, World], object], argparse.Namespace], world: World) -> Any:
    evaluate, args = what
    if world.size > 1:
        # A process that was started has no log yet; what all processes log alike is shown once.
        distributed.end_at_signals()
        log_to_stderr()
        logging.getLogger().setLevel(logging.INFO if world.is_first else logging.ERROR)
    return evaluate(args, world)


def progress(common: CommonConfig, name: str, is_shown: bool = True) -> Progress:
    """Return a function that shows the progress of *name*
    on stderr: a bar on a terminal, lines elsewhere.

    Lines are printed every ``--log-interval`` items, with items a second and the remaining seconds.
    """
    if not is_shown:
        return no_progress
    otherwise = "tqdm" if sys.stderr.isatty() and not common.no_progress_bar else "simple"
    log_format, interval = common.log_format or otherwise, common.log_interval

    def show(items: Iterable[object], length: int) -> Iterable[Any]:
        start = time.perf_counter()

        def pace() -> dict[str, object]:
            rate = bar.done / (time.perf_counter() - start)
            if log_format != "json":
                return {"per_second": round(rate, 1)}
            position = {"work": name, "done": bar.done, "total": length}
            return {**position, "per_second": round(rate, 1), "seconds_left": round(seconds_left())}

        def seconds_left(line: Mapping[str, object] | None = None) -> float:
            return (length - bar.done) * (time.perf_counter() - start) / bar.done

        with progress_bar(
            items, log_format=log_format, log_interval=interval, prefix=name, total=length, stream=sys.stderr
        ) as bar:
            for item in bar:
                yield item
                if log_format != "tqdm":  # tqdm shows the rate already
                    bar.log(pace, eta=seconds_left)

    return show


def refuse_two_texts(text: str | None, split: str) -> None:
    """Raise UserError if both ``--text`` and another *split* than the default were asked for."""
    if text is not None and split != StreamConfig.gen_subset:
        raise UserError(f"--gen-subset {split}: has no effect with --text; give one of them")


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
        raise UserError(f"--text -: {world.size} processes cannot share stdin; save the text to a file")
    form_of_path = format_of(path, form.text_field, form.join_lines)
    return TextReader.of(data, dictionary).read(path, form_of_path, documents, lines_apart)


@contextlib.contextmanager
def results_folder(path: str | None) -> Iterator[None]:
    """Create the folder of ``--results-path``, if given;
    after an error a new folder that is empty is removed.

    Raises:
        UserError: it cannot be created or written.
    """
    with removing_empty_folders():
        if path is not None:
            prepare_folder("--results-path", path)
        yield
