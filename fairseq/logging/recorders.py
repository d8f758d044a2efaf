"""Recorders: the metrics of a run, kept for later beside what its progress bar shows."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fairseq.config.settings import CommonConfig
from fairseq.errors import UserError
from fairseq.logging.progress import json_line, short
from fairseq.system.files import atomic_file, make_folder, prepare_folder
from fairseq.system.terminal import FileFormatter

BEGIN = b'{"tag": "'  # of each line of a metrics file
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
        _tensorboard_class(common.tensorboard_logdir)
    if path := common.metrics_file:
        is_new = not os.path.lexists(path)
        _open_lines(path).close()
        if is_new:
            os.unlink(path)
    if common.wandb_project:
        _import_wandb()


@contextlib.contextmanager
def recording(
    common: CommonConfig | None,
    folder: str | Path = ".",
    after: int = 0,
    by_default: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Iterator[Record]:
    """A function that writes to the recorders which flags ask for, inside a ``with`` statement.

    Args:
        folder: the checkpoint folder, where :data:`METRICS_FILE` is written *by_default*, unless a
            flag names a file.
        after: the number of updates that a resumed run has behind it.
        config: the settings of the run, for Weights & Biases.
    """
    default = str(Path(folder) / METRICS_FILE) if common is not None and by_default else ""
    common, writes = common or CommonConfig(), list[Write]()
    # If one cannot be opened, those before it are closed.
    with contextlib.ExitStack() as opened:
        if common.tensorboard_logdir:
            writes.append(opened.enter_context(tensorboard(common.tensorboard_logdir, after)))
        if metrics_file := common.metrics_file or default:
            writes.append(opened.enter_context(json_lines(metrics_file)))
        if common.wandb_project:
            writes.append(opened.enter_context(wandb(common.wandb_project, Path(folder), after, config)))
        if common.log_file:
            writes.append(write_to_log_file)

        def record(values: Mapping[str, object] | None, tag: str, step: int) -> None:
            for write in writes if values is not None else ():
                write(values or {}, tag, step)

        yield record


@contextlib.contextmanager
def tensorboard(folder: str, after: int = 0) -> Iterator[Write]:
    """TensorBoard's logs in *folder*, which is made, one for each tag.

    What an interrupted run logged beyond the update *after* is taken back.

    Raises:
        UserError: tensorboard is not installed, or the folder cannot be made.
    """
    writer_class = _tensorboard_class(folder)
    writers: dict[str, Any] = {}

    def write(values: Mapping[str, object], tag: str, step: int) -> None:
        if tag not in writers:
            # TensorBoard hides what earlier files have from this step on.
            writers[tag] = writer_class(str(Path(folder) / tag), purge_step=after + 1)
        for name, value in values.items():
            if isinstance(value, int | float) and name != "num_updates":
                writers[tag].add_scalar(name, value, step)
        # Intervals are frequent: they are written when the queue of the writer is full, or after
        # two minutes.
        if tag != "train_inner":
            writers[tag].flush()

    try:
        yield write
    finally:
        for writer in writers.values():
            writer.close()


@contextlib.contextmanager
def json_lines(path: str) -> Iterator[Write]:
    """One JSON object a line in the file *path*: ``tag``, ``step``, then the metrics; null for what
    is not finite.

    Lines are only added. Those of a resumed run replace for readers what an interrupted one wrote
    of the same and later steps (:func:`read_entries`).

    Raises:
        UserError: the file cannot be written, or is not one of these.
    """
    file = _open_lines(path)

    def write(values: Mapping[str, object], tag: str, step: int) -> None:
        with _writing(f"`metrics_file` {path}", "file"):
            file.write(json_line({"tag": tag, "step": step, **values}).encode() + b"\n")
            file.flush()

    try:
        yield write
    finally:
        # A failed write has already been reported.
        with contextlib.suppress(OSError):
            file.close()


def read_entries(content: bytes) -> list[dict[str, Any]]:
    """Return the entries of a file of metrics: tag, step, and numbers, text or null by name.

    Those that a resumed run wrote again stand once. A last line that was cut off is ignored.

    Raises:
        ValueError: it is not a file of metrics.
    """
    entries: dict[tuple[int, str], dict[str, Any]] = {}
    # What follows the last line feed is empty, or a line that a run is writing.
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            entry = _parse_entry(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        while entries and next(reversed(entries))[0] > entry["step"]:
            entries.popitem()
        entries[entry["step"], entry["tag"]] = entry
    return list(entries.values())


@contextlib.contextmanager
def wandb(project: str, folder: Path, after: int = 0, config: Mapping[str, Any] | None = None) -> Iterator[Write]:
    """A run on Weights & Biases, with the name of its checkpoint *folder* and the settings
    *config*.

    A resumed run, which has updates before it (*after*), goes on there, too.

    Raises:
        UserError: the package is not installed.
    """
    package, name = _import_wandb(), os.environ.get("WANDB_NAME", folder.name)
    file = folder / "wandb_id.txt"
    # A run from the beginning in a former folder is a new one there, too.
    known = file.read_text().strip() if after and file.is_file() else None
    run = package.init(project=project, name=name, id=known, resume="allow", config=dict(config or {}))
    if folder.is_dir():
        with atomic_file(file) as new:
            new.write(f"{run.id}\n".encode())

    def write(values: Mapping[str, object], tag: str, step: int) -> None:
        numbers = {f"{tag}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        run.log(numbers, step=step)

    try:
        yield write
    finally:
        run.finish()


def write_to_log_file(values: Mapping[str, object], tag: str, step: int) -> None:
    """Write a line of metrics to ``--log-file``, between the messages of the log."""
    text = " | ".join(f"{name} {short(value)}" for name, value in values.items())
    logging.getLogger(METRICS).info("%s | %s", tag, text)


@contextlib.contextmanager
def log_file(path: str | None) -> Iterator[None]:
    """Copy the log and its metrics to the file *path*, if given, in a ``with`` statement; a file
    that is there is added to.

    Raises:
        UserError: the file cannot be written, or is binary.
    """
    if path is None:
        yield
        return
    with _writing(f"`log_file` {path}", "file"):
        make_folder(os.path.dirname(path))
        # A checkpoint or corpus with lines behind it is a damaged one.
        if os.path.isfile(path) and b"\0" in _beginning(path, 1 << 12):
            raise UserError(f"`log_file` {path}: binary file, refusing to append; choose another file")
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
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
        handler.close()


def _tensorboard_class(folder: str) -> type[Any]:
    """Make *folder*, and return the class of TensorBoard's writer."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "`tensorboard_logdir`: tensorboard is not installed; pip install tensorboard, or leave the flag out"
        ) from None
    with _writing(f"`tensorboard_logdir` {folder}", "folder"):
        make_folder(folder)
    prepare_folder("`tensorboard_logdir`", folder)
    return SummaryWriter


def _open_lines(path: str) -> BinaryIO:
    """Open a file of metrics to add lines to it, without a last one that was cut off."""
    with _writing(f"`metrics_file` {path}", "file"):
        make_folder(os.path.dirname(path))
        begin = _beginning(path, len(BEGIN)) if os.path.isfile(path) else b""
        if begin != BEGIN[: len(begin)]:
            raise UserError(f"`metrics_file` {path}: not a file of metrics; choose another file")
        file = open(path, "a+b")  # noqa: SIM115
        start = file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
        file.truncate(start + file.read().rfind(b"\n") + 1)
    return file


def _beginning(path: str, size: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(size)


def _parse_entry(line: bytes) -> dict[str, Any]:
    entry = json.loads(line)
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    # By the type: True is an instance of int.
    if not isinstance(entry.get("tag"), str) or type(entry.get("step")) is not int or entry["step"] < 0:
        raise ValueError("has no tag and step")
    for name, value in entry.items():
        if isinstance(value, bool | dict | list):
            raise ValueError(f"{name[:40]} is not a number or text")
    return entry


def _import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise UserError("`wandb_project`: wandb is not installed; pip install wandb, or leave the flag out") from None


@contextlib.contextmanager
def _writing(path: str, kind: str) -> Iterator[None]:
    """Raise UserError where *path*, behind the name of its setting, cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another {kind}") from None
