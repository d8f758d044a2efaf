"""What several commands share: their checkpoints, how they read a corpus, their notes and their progress bars."""

from __future__ import annotations

import argparse
import io
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

from fairseq import config
from fairseq.errors import UserError
from fairseq.logging import progress_bar
from fairseq.settings import CommonConfig, ModelPathConfig


def checkpoint_paths(cfg: ModelPathConfig) -> list[str]:
    """The checkpoints that ``--path`` names.

    Raises:
        UserError: none.
    """
    paths = [path for path in (cfg.path or "").split(":") if path]
    if not paths:
        raise UserError("--path: name a checkpoint, or several joined by colons")
    return paths


def stream_settings(args: argparse.Namespace) -> argparse.Namespace:
    """*args* for :func:`~fairseq.evaluation.load_models`, where the corpus is one stream whatever its lines.

    Raises:
        UserError: *args* ask for another way of cutting it.
    """
    settings = argparse.Namespace(**{"sample_break_mode": "none", **vars(args)})
    if settings.sample_break_mode != "none":
        raise UserError(f"--sample-break-mode {settings.sample_break_mode}: the split is read as one stream; use none")
    return settings


def log_to_stderr() -> None:
    """Let warnings and notes be seen."""
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        level=logging.INFO,
        stream=sys.stderr,
    )


def escape_what_stdout_lacks() -> None:
    """Let a terminal that has not every character show the rest of a text."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def progress(args: argparse.Namespace, name: str) -> Callable[[Iterable[Any], int], Iterable[Any]]:
    """A bar called *name* for work of known length, on a terminal or where ``--log-format`` asks for one."""
    common = config.extract(CommonConfig, args)
    shown = "none" if common.no_progress_bar else common.log_format or ("tqdm" if sys.stderr.isatty() else "none")

    def show(items: Iterable[Any], length: int) -> Iterable[Any]:
        with progress_bar(items, log_format=shown, prefix=name, total=length) as bar:
            yield from bar

    return show
