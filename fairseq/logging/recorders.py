"""Recorders: the metrics of a run, kept for later beside what its progress bar shows."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from fairseq.config.settings import CommonConfig
from fairseq.errors import UserError
from fairseq.logging.progress import json_line, short
from fairseq.system.files import atomic_file, make_folder, prepare_folder
from fairseq.system.opening import is_special, open_special
from fairseq.system.terminal import FileFormatter

LONGEST_ENTRY = 1 << 20  # bytes
BEGIN = b'{"tag": "'
METRICS_FILE = "metrics.jsonl"  # in the checkpoint folder, unless `metrics_file` names another
METRICS = "fairseq.metrics"  # the logger of what progress bars show


Write = Callable[[Mapping[str, Any], str, int], None]
"""Writes metrics, what they are of (``train_inner``, ``train`` or a split), and step."""
Record = Callable[[Mapping[str, Any] | None, str, int], None]
"""The same; None, a line that was not due, is ignored."""


def check_recorders(common: CommonConfig) -> None:
    """Raise UserError if a recorder that flags ask
    for cannot be opened: before the run writes anything."""
    if common.tensorboard_logdir:
        _check_tensorboard(common.tensorboard_logdir)
    # A device or pipe is left alone: the reader of a pipe
    # would take its closing for the end of the run.
    if common.metrics_file and not is_special(common.metrics_file):
        is_new = not os.path.lexists(common.metrics_file)
        # Opened, not only looked at: the system has more reasons than can be listed here.
        _open_lines(common.metrics_file).close()
        if is_new:
            os.unlink(common.metrics_file)
    if common.wandb_project:
        _import_wandb()


@contextlib.contextmanager
def tensorboard(folder: str, after: int = 0) -> Iterator[Write]:
    """TensorBoard's logs in *folder*, which is made, one for each tag.

    What an interrupted run logged beyond the update *after* is taken back.

    Raises:
        UserError: tensorboard is not installed, or the folder cannot be made.
    """
    writer_class = _check_tensorboard(folder)
    writers: dict[str, Any] = {}
    setting = f"`tensorboard_logdir` {folder}"

    def write(values: Mapping[str, object], tag: str, step: int) -> None:
        with _writing(setting, "folder"):
            if tag not in writers:
                # TensorBoard hides what earlier files have from this step on.
                writers[tag] = writer_class(str(Path(folder) / tag), purge_step=after + 1)
            for name, value in values.items():
                if isinstance(value, int | float) and name != "num_updates":
                    writers[tag].add_scalar(name, value, step)
            # Intervals are frequent: they are written when the queue of the writer is full, or
            # after two minutes.
            if tag != "train_inner":
                writers[tag].flush()

    with _quiet_threads("tensorboard."):
        try:
            yield write
        finally:
            with _writing(setting, "folder"), contextlib.ExitStack() as closing:
                # All of them: a file that cannot be written
                # must not keep the thread of another one.
                for writer in writers.values():
                    closing.callback(writer.close)


@contextlib.contextmanager
def json_lines(path: str, after: int = 0) -> Iterator[Write]:
    """One JSON object a line in the file *path*: ``tag``, ``step``, then the metrics; null for what
    is not finite.

    Lines of updates beyond *after* are removed, the rest is kept and added to. A file that is new
    and stays without a line, as on a full disk, is removed.

    Raises:
        UserError: the file cannot be read or written, or is not one of these.
    """
    setting = f"`metrics_file` {path}"
    is_new, is_written = not os.path.lexists(path), False
    file = _open_lines(path)
    with _writing(setting, "file"):
        # A device has no lines to keep.
        if not is_special(path):
            file.seek(0)
            file.truncate(_end_of_step(path, file, after))

    def write(values: Mapping[str, object], tag: str, step: int) -> None:
        nonlocal is_written
        line = json_line({"tag": tag, "step": step, **values})
        with _writing(setting, "file"):
            file.write(line.encode() + b"\n")
            file.flush()
        is_written = True

    try:
        yield write
    finally:
        # What could not be written was an error before.
        with contextlib.suppress(OSError):
            file.close()
        if is_new and not is_written:
            with contextlib.suppress(OSError):
                os.unlink(path)


@contextlib.contextmanager
def weights_and_biases(
    project: str, folder: Path, after: int = 0, settings: Mapping[str, object] | None = None
) -> Iterator[Write]:
    """A run on Weights & Biases, with the name
    of its checkpoint *folder*, which its id is written to.

    A resumed run, which has updates before it (*after*), goes on there, too. The *settings* of the
    run are its ``config``, by which runs can be compared there.

    Raises:
        UserError: wandb is not installed.
    """
    wandb = _import_wandb()
    file = folder / "wandb_id.txt"
    # A run from the beginning in a former folder is a new one there, too.
    known = file.read_text().strip() if after and os.path.isfile(file) else None
    name = os.environ.get("WANDB_NAME", folder.name)
    config = dict(settings or {})
    run = wandb.init(project=project, name=name, id=known, resume="allow", config=config)
    if os.path.isdir(folder):
        with atomic_file(file) as new:
            new.write(f"{run.id}\n".encode())

    def write(values: Mapping[str, object], tag: str, step: int) -> None:
        numbers = {f"{tag}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        run.log(numbers, step=step)

    try:
        yield write
    finally:
        run.finish()


def _check_tensorboard(folder: str) -> type[Any]:
    """Make *folder*, and return the class of TensorBoard's writer."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "`tensorboard_logdir`: tensorboard is not installed; pip install tensorboard, or leave the flag out"
        ) from None
    try:
        folder.encode()  # which its writer does, too
        make_folder(folder)
    except UnicodeEncodeError:
        raise UserError(f"`tensorboard_logdir` {folder}: is not UTF-8; choose another folder") from None
    except OSError as error:
        raise UserError(
            f"`tensorboard_logdir` {folder}: cannot be made ({error.strerror}); choose another folder"
        ) from None
    prepare_folder("`tensorboard_logdir`", folder)
    return SummaryWriter


@contextlib.contextmanager
def _quiet_threads(library: str) -> Iterator[None]:
    """Print no traceback where a thread of *library* ends with a system error, which who waits for
    it raises again."""
    former = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        if not (isinstance(failure.exc_value, OSError) and type(failure.thread).__module__.startswith(library)):
            former(failure)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = former


def _open_lines(path: str) -> BinaryIO:
    with _writing(f"`metrics_file` {path}", "file"):
        make_folder(os.path.dirname(path))
        return open_special(path) if is_special(path) else open(path, "a+b")


def _import_wandb() -> ModuleType:
    try:
        import wandb
    except ImportError:
        raise UserError("`wandb_project`: wandb is not installed; pip install wandb, or leave the flag out") from None
    return wandb


@contextlib.contextmanager
def _writing(path: str, kind: str) -> Iterator[None]:
    """Raise UserError where *path*, behind the name of its setting, cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another {kind}") from None


def write_to_log_file(values: Mapping[str, object], tag: str, step: int) -> None:
    """Write a line of metrics to ``--log-file``, between the messages of the log."""
    text = " | ".join(f"{name} {short(value)}" for name, value in values.items())
    logging.getLogger(METRICS).info("%s | %s", tag, text)


class _FileHandler(logging.FileHandler):
    """A handler whose failure, such as a full disk, ends the run: logging's own prints a traceback
    for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        reason = error.strerror if isinstance(error, OSError) else str(error)
        with contextlib.suppress(OSError):  # of what is left in the buffer
            if self.stream is not None:
                self.stream.close()
        raise UserError(f"`log_file` {self.baseFilename}: cannot be written ({reason}); choose another file") from None


@contextlib.contextmanager
def log_file(path: str | None) -> Iterator[None]:
    """Copy the log and its metrics to the file *path*, if given, in a ``with`` statement.

    A file that is there is added to; one that is new and stays empty is removed.

    Raises:
        UserError: the file cannot be written, or is not a text.
    """
    if path is None:
        yield
        return
    is_new = not os.path.lexists(path)
    with _writing(f"`log_file` {path}", "file"):
        make_folder(os.path.dirname(path))
        # A checkpoint or corpus with lines behind it is a damaged one.
        if os.path.isfile(path) and b"\0" in _beginning(path):
            raise UserError(f"`log_file` {path}: is not a text, and is not added to; choose another file")
        handler = _FileHandler(path, encoding="utf-8", errors="backslashreplace")  # names need not be UTF-8
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
        with contextlib.suppress(OSError):
            if is_new and not os.path.getsize(path):
                os.unlink(path)


def _beginning(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(1 << 12)


@contextlib.contextmanager
def recording(
    common: CommonConfig | None,
    folder: str | Path = ".",
    after: int = 0,
    by_default: bool = False,
    settings: Mapping[str, object] | None = None,
) -> Iterator[Record]:
    """A function that writes to the recorders which flags ask for, inside a ``with`` statement.

    *folder* is the checkpoint folder, *after* the number of updates that a resumed run has behind
    it. With *by_default* metrics are written to :data:`METRICS_FILE` in that folder, where no flag
    names a file. *settings* are those of the run, for recorders that show them.
    """
    default = str(Path(folder) / METRICS_FILE) if common is not None and by_default else ""
    common, writes = common or CommonConfig(), list[Write]()
    # If one cannot be opened, those before it are closed.
    with contextlib.ExitStack() as opened:
        if common.tensorboard_logdir:
            writes.append(opened.enter_context(tensorboard(common.tensorboard_logdir, after)))
        if metrics_file := common.metrics_file or default:
            writes.append(opened.enter_context(json_lines(metrics_file, after)))
        if common.wandb_project:
            run = weights_and_biases(common.wandb_project, Path(folder), after, settings)
            writes.append(opened.enter_context(run))
        if common.log_file:
            writes.append(write_to_log_file)

        def record(values: Mapping[str, object] | None, tag: str, step: int) -> None:
            for write in writes if values is not None else ():
                write(values or {}, tag, step)

        yield record


def parse_entry(line: bytes) -> dict[str, Any]:
    """Return an entry of a file of metrics: tag, step, and numbers, text or null by name;
    ValueError if it is none."""
    entry = json.loads(line)
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
            # A first line that is cut off must at least begin
            # like one of ours: any other file is not truncated.
            begins = end or line[: len(BEGIN)] == BEGIN[: len(line)]
            if begins and not line.endswith(b"\n") and len(line) < LONGEST_ENTRY:
                # The last line was cut off as its run was killed.
                return end
            raise UserError(f"`metrics_file` {path}: not a file of figures; name another") from None
        if not within:
            return end
        end += len(line)
    return end
