"""Recorders: the metrics of a run, kept for later beside what its progress bar shows."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fairseq.config.settings import CommonConfig
from fairseq.errors import UserError
from fairseq.logging.progress import json_line, short
from fairseq.system.files import prepare_folder
from fairseq.system.json_files import parse_json
from fairseq.system.opening import is_special, open_special
from fairseq.system.terminal import FileFormatter

LONGEST_ENTRY = 1 << 20  # bytes
BEGIN = b'{"tag": "'
METRICS = "fairseq.metrics"  # the logger of what progress bars show


Write = Callable[[Mapping[str, Any], str, int], None]
"""Writes metrics, what they are of (``train_inner``, ``train`` or a split), and step."""
Record = Callable[[Mapping[str, Any] | None, str, int], None]
"""The same; None, a line that was not due, is ignored."""


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
                "`tensorboard_logdir`: tensorboard is not installed; install the [tensorboard] extra or drop the flag"
            ) from None
        try:
            folder.encode()  # which its writer does, too
            Path(folder).mkdir(parents=True, exist_ok=True)
        except UnicodeEncodeError:
            raise UserError(f"`tensorboard_logdir` {folder}: is not UTF-8; choose another folder") from None
        except OSError as error:
            raise UserError(
                f"`tensorboard_logdir` {folder}: cannot be made ({error.strerror}); choose another folder"
            ) from None
        prepare_folder("`tensorboard_logdir`", folder)
        self.folder = Path(folder)
        self.after = after
        self._new = SummaryWriter
        self._writers: dict[str, Any] = {}

    def write(self, values: Mapping[str, Any], tag: str, step: int) -> None:
        with _writing(f"`tensorboard_logdir` {self.folder}", "folder"):
            if tag not in self._writers:
                # TensorBoard hides what earlier files have from this step on.
                self._writers[tag] = self._new(str(self.folder / tag), purge_step=self.after + 1)
            for name, value in values.items():
                if isinstance(value, int | float) and name != "num_updates":
                    self._writers[tag].add_scalar(name, value, step)
            # Intervals are frequent: they are written when the queue of the writer is full, or after two minutes.
            if tag != "train_inner":
                self._writers[tag].flush()

    def close(self) -> None:
        with _writing(f"`tensorboard_logdir` {self.folder}", "folder"):
            for writer in self._writers.values():
                writer.close()


class JsonLines:
    """One JSON object a line in the file *path*: ``tag``, ``step``, then the metrics; null for what is not finite.

    Args:
        path: the file. Lines of updates beyond *after* are removed, the rest is kept and added to.
        after: updates that a resumed run has behind it.

    Raises:
        UserError: the file cannot be read or written, or is not one of these.
    """

    def __init__(self, path: str, after: int = 0) -> None:
        self._path = path
        with _writing(f"`metrics_file` {self._path}", "file"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # A device has no lines to keep.
            if is_special(path):
                self._file: BinaryIO = open_special(path)
                return
            self._file = open(path, "a+b")  # noqa: SIM115 - open as long as the run
            self._file.seek(0)
            self._file.truncate(_end_of_step(path, self._file, after))

    def write(self, values: Mapping[str, Any], tag: str, step: int) -> None:
        line = json_line({"tag": tag, "step": step, **values})
        with _writing(f"`metrics_file` {self._path}", "file"):
            self._file.write(line.encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        # What could not be written was an error before.
        with contextlib.suppress(OSError):
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
                "`wandb_project`: wandb is not installed; install the [wandb] extra or drop the flag"
            ) from None
        file = folder / "wandb_id.txt"
        # A run from the beginning in a former folder is a new one there, too.
        known = file.read_text().strip() if after and file.is_file() else None
        name = os.environ.get("WANDB_NAME", folder.name)
        self._run = wandb.init(project=project, name=name, id=known, resume="allow")
        if folder.is_dir():
            file.write_text(f"{self._run.id}\n")

    def write(self, values: Mapping[str, Any], tag: str, step: int) -> None:
        numbers = {f"{tag}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


@contextlib.contextmanager
def _writing(path: str, kind: str) -> Iterator[None]:
    """Raise UserError where *path*, behind the name of its setting, cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another {kind}") from None


def write_to_log_file(values: Mapping[str, Any], tag: str, step: int) -> None:
    """Write a line of metrics to ``--log-file``, between the messages of the log."""
    text = " | ".join(f"{name} {short(value)}" for name, value in values.items())
    logging.getLogger(METRICS).info("%s | %s", tag, text)


class _FileHandler(logging.FileHandler):
    """A handler whose failure, such as a full disk, ends the run: logging's own prints a traceback for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        reason = error.strerror if isinstance(error, OSError) else str(error)
        with contextlib.suppress(OSError):  # of what is left in the buffer
            if self.stream is not None:
                self.stream.close()
        raise UserError(f"`log_file` {self.baseFilename}: cannot be written ({reason}); choose another file") from None


@contextlib.contextmanager
def log_file(path: str | None) -> Iterator[None]:
    """Copy the log and its metrics to the file at *path*, if given, inside a ``with`` statement.

    Raises:
        UserError: it cannot be written.
    """
    if path is None:
        yield
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        handler = _FileHandler(path, encoding="utf-8", errors="backslashreplace")  # names need not be UTF-8
    except OSError as error:
        raise UserError(f"`log_file` {path}: cannot be written ({error.strerror}); choose another file") from None
    handler.setFormatter(FileFormatter())
    metrics, root = logging.getLogger(METRICS), logging.getLogger()
    metrics.propagate = False  # the progress bar shows them already
    metrics.setLevel(logging.INFO)
    for logger in (root, metrics):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in (root, metrics):
            logger.removeHandler(handler)
        # After a failure its stream is closed, and flushing that is an error.
        with contextlib.suppress(ValueError):
            handler.close()


@contextlib.contextmanager
def recording(common: CommonConfig | None, folder: str | Path = ".", after: int = 0) -> Iterator[Record]:
    """A function that writes to the recorders which flags ask for, inside a ``with`` statement.

    Args:
        common: the flags; None: no recorders.
        folder: the checkpoint folder.
        after: updates that a resumed run has behind it.
    """
    common, writes = common or CommonConfig(), list[Write]()
    # If one cannot be opened, those before it are closed.
    with contextlib.ExitStack() as opened:
        if common.tensorboard_logdir:
            board = TensorBoard(common.tensorboard_logdir, after)
            writes.append(opened.enter_context(contextlib.closing(board)).write)
        if common.metrics_file:
            lines = JsonLines(common.metrics_file, after)
            writes.append(opened.enter_context(contextlib.closing(lines)).write)
        if common.wandb_project:
            run = WeightsAndBiases(common.wandb_project, Path(folder), after)
            writes.append(opened.enter_context(contextlib.closing(run)).write)
        if common.log_file:
            writes.append(write_to_log_file)

        def record(values: Mapping[str, Any] | None, tag: str, step: int) -> None:
            for write in writes if values is not None else ():
                write(values or {}, tag, step)

        yield record


def parse_entry(line: bytes) -> dict[str, Any]:
    """Return an entry of a file of metrics: ``tag``, ``step``, and numbers, text or null by name.

    Raises:
        ValueError: the line is no such entry.
    """
    entry = parse_json(line)
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    # By the type: True is an instance of int.
    if not isinstance(entry.get("tag"), str) or type(entry.get("step")) is not int or entry["step"] < 0:
        raise ValueError("has no tag and step")
    for name, value in entry.items():
        if isinstance(value, bool | dict | list) or isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{name[:40]} is not a number or text")
    return entry


def _end_of_step(path: str, lines: BinaryIO, step: int) -> int:
    """Bytes of the leading *lines* that are whole and of steps up to *step*."""
    end = 0
    while line := lines.readline(LONGEST_ENTRY):
        try:
            within = parse_entry(line)["step"] <= step
        except ValueError:
            # A first line that is cut off must at least begin like one of ours: any other file is not truncated.
            begins = end or line[: len(BEGIN)] == BEGIN[: len(line)]
            if begins and not line.endswith(b"\n") and len(line) < LONGEST_ENTRY:
                # The last line was cut off as its run was killed.
                return end
            raise UserError(f"`metrics_file` {path}: not a file of figures; name another") from None
        if not within:
            return end
        end += len(line)
    return end
