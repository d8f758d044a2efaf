"""Recorders: the figures of a run, kept for later beside what its progress bar shows."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fairseq.errors import UserError
from fairseq.logging.progress import short
from fairseq.settings import CommonConfig
from fairseq.terminal import LOG_DATES, LOG_FORMAT

FIGURES = "fairseq.figures"  # the logger of what progress bars show


class Recorder(Protocol):
    """A keeper of figures by step."""

    def write(self, values: Mapping[str, Any], tag: str, step: int) -> None:
        """Add the figures of *step*; *tag* says what they are of: ``train_inner``, ``train`` or a split."""

    def close(self) -> None:
        """Write what is left and let go of the files."""


Record = Callable[[Mapping[str, Any] | None, str, int], None]
"""Writes figures, tag and step; None, a line that was not due, is ignored."""


class TensorBoard:
    """TensorBoard's logs in *folder*, one for each tag.

    Args:
        folder: where they are; it is made.
        after: updates that a resumed run has behind it; what an interrupted one logged beyond them is taken back.

    Raises:
        UserError: tensorboard is not installed, or the folder cannot be made.
    """

    def __init__(self, folder: str, after: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "--tensorboard-logdir: tensorboard is not installed; install the [tensorboard] extra or drop the flag"
            ) from None
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--tensorboard-logdir {folder}: cannot be made ({error.strerror}); choose another folder"
            ) from None
        self.folder = Path(folder)
        self.after = after
        self._new = SummaryWriter
        self._writers: dict[str, Any] = {}

    def write(self, values: Mapping[str, Any], tag: str, step: int) -> None:
        """Add the numbers among *values* at *step*."""
        if tag not in self._writers:
            self._writers[tag] = self._new(str(self.folder / tag), purge_step=self.after + 1)
        for name, value in values.items():
            if isinstance(value, int | float) and name != "num_updates":
                self._writers[tag].add_scalar(name, value, step)
        if tag != "train_inner":
            self._writers[tag].flush()

    def close(self) -> None:
        """Write what is left and close the files."""
        for writer in self._writers.values():
            writer.close()


class JsonLines:
    """One JSON object a line in the file *path*: ``tag``, ``step``, then the figures; null for what is not finite.

    Args:
        path: the file. Lines of updates beyond *after* are removed, the rest is kept and added to.
        after: updates that a resumed run has behind it.

    Raises:
        UserError: the file cannot be read or written, or is not one of these.
    """

    def __init__(self, path: str, after: int = 0) -> None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b")  # noqa: SIM115 - open as long as the run
            if self._file.seekable():
                self._file.seek(0)
                self._file.truncate(_end_of_step(path, self._file, after))
        except OSError as error:
            raise UserError(
                f"--metrics-file {path}: cannot be written ({error.strerror}); choose another file"
            ) from None

    def write(self, values: Mapping[str, Any], tag: str, step: int) -> None:
        """Add a line, at once."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        line = json.dumps({"tag": tag, "step": step, **finite}, allow_nan=False, ensure_ascii=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WeightsAndBiases:
    """A run on Weights & Biases, with the name of its checkpoint folder; a resumed run goes on there, too.

    Args:
        project: that it belongs to.
        folder: the checkpoint folder, which the run's id is written to.
        after: updates that a resumed run has behind it.

    Raises:
        UserError: wandb is not installed.
    """

    def __init__(self, project: str, folder: Path, after: int = 0) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "--wandb-project: wandb is not installed; install the [wandb] extra or drop the flag"
            ) from None
        file = folder / "wandb_id.txt"
        known = file.read_text().strip() if after and file.is_file() else None
        name = os.environ.get("WANDB_NAME", folder.name)
        self._run = wandb.init(project=project, name=name, id=known, resume="allow")
        if folder.is_dir():
            file.write_text(f"{self._run.id}\n")

    def write(self, values: Mapping[str, Any], tag: str, step: int) -> None:
        """Add the numbers among *values* at *step*, each named by *tag*."""
        numbers = {f"{tag}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        self._run.log(numbers, step=step)

    def close(self) -> None:
        """End the upload."""
        self._run.finish()


class LogFile:
    """Lines of figures in ``--log-file``, between the messages of the log."""

    def write(self, values: Mapping[str, Any], tag: str, step: int) -> None:
        """Add a line."""
        shown = " | ".join(f"{name} {short(value)}" for name, value in values.items())
        logging.getLogger(FIGURES).info("%s | %s", tag, shown)

    def close(self) -> None:
        """Leave the file to the process's log."""


@contextmanager
def log_file(path: str | None) -> Iterator[None]:
    """Copy the log and its figures to the file at *path*, if given, inside a ``with`` statement.

    Raises:
        UserError: it cannot be written.
    """
    if path is None:
        yield
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--log-file {path}: cannot be written ({error.strerror})") from None
    handler.setFormatter(logging.Formatter(LOG_FORMAT, LOG_DATES))
    figures, root = logging.getLogger(FIGURES), logging.getLogger()
    figures.propagate = False  # the progress bar shows them already
    figures.setLevel(logging.INFO)
    for logger in (root, figures):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in (root, figures):
            logger.removeHandler(handler)
        handler.close()


@contextmanager
def recording(common: CommonConfig | None, folder: str | Path = ".", after: int = 0) -> Iterator[Record]:
    """A function that writes to the recorders which flags ask for, inside a ``with`` statement.

    Args:
        common: the flags; None: no recorders.
        folder: the checkpoint folder.
        after: updates that a resumed run has behind it.
    """
    recorders: list[Recorder] = []
    try:
        if common is not None and common.tensorboard_logdir:
            recorders.append(TensorBoard(common.tensorboard_logdir, after))
        if common is not None and common.metrics_file:
            recorders.append(JsonLines(common.metrics_file, after))
        if common is not None and common.wandb_project:
            recorders.append(WeightsAndBiases(common.wandb_project, Path(folder), after))
        if common is not None and common.log_file:
            recorders.append(LogFile())

        def record(values: Mapping[str, Any] | None, tag: str, step: int) -> None:
            for recorder in recorders if values is not None else ():
                recorder.write(values or {}, tag, step)

        yield record
    finally:
        for recorder in recorders:
            recorder.close()


def _end_of_step(path: str, lines: Any, step: int) -> int:
    """Bytes of the leading *lines* that are whole and of steps up to *step*."""
    end = 0
    for line in lines:
        try:
            entry = json.loads(line)
            within = entry["step"] <= step
        except (ValueError, TypeError, KeyError):
            if line.endswith(b"\n"):
                raise UserError(f"--metrics-file {path}: not a file of figures; name another") from None
            return end  # cut off as its run was killed
        if not within:
            return end
        end += len(line)
    return end
