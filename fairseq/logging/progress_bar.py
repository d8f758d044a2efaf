"""Progress bars of scripts."""

from __future__ import annotations

from typing import Any

from fairseq.logging import progress


def progress_bar(
    iterator: Any,
    log_format: str | None = None,
    log_interval: int = 100,
    log_file: str | None = None,
    epoch: int | None = None,
    prefix: str | None = None,
    tensorboard_logdir: str | None = None,
    default_log_format: str = "tqdm",
    **recorders: object,
) -> progress.ProgressBar[Any]:
    """*iterator* as a progress bar of a script's own loop, which writes no files."""
    options: dict[str, Any] = {"log_interval": log_interval, "epoch": epoch, "prefix": prefix}
    return progress.progress_bar(iterator, log_format=log_format, default=default_log_format, **options)


def build_progress_bar(
    args: object,
    iterator: object,
    epoch: int | None = None,
    prefix: str | None = None,
    default: str = "tqdm",
    no_progress_bar: str = "none",
) -> progress.ProgressBar[Any]:
    """:func:`progress_bar` with the settings *args*."""
    settings = {"log_format": None, "log_interval": 100, **vars(args)}
    default = no_progress_bar if settings.get("no_progress_bar") else default
    return progress_bar(
        iterator, settings["log_format"], settings["log_interval"], None, epoch, prefix, default_log_format=default
    )
