"""Recorders: the figures of a run, kept for later beside what its progress bar shows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fairseq.errors import UserError


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
            self._writers[tag] = self._new(str(self.folder / tag), purge_step=self.after + 1 if self.after else None)
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


@contextmanager
def recording(tensorboard_logdir: str = "", metrics_file: str = "", after: int = 0) -> Iterator[Record]:
    """A function that writes to the recorders which flags ask for, inside a ``with`` statement.

    Args:
        tensorboard_logdir: folder of TensorBoard's logs; "" for none.
        metrics_file: file of JSON lines; "" for none.
        after: updates that a resumed run has behind it.
    """
    recorders: list[Recorder] = []
    try:
        if tensorboard_logdir:
            recorders.append(TensorBoard(tensorboard_logdir, after))
        if metrics_file:
            recorders.append(JsonLines(metrics_file, after))

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
