"""Atomic writing of files and folders: complete under their names, or not there at all."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from fairseq.errors import UserError

ARCHIVE = b"PK\x03\x04"  # how files of torch.save and numpy.savez begin
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HOST = re.sub(r"[^A-Za-z0-9_-]", "-", platform.node())[:32] or "host"
_TEMPORARY = re.compile(r"\..*\.([A-Za-z0-9_-]+)\.(\d+)\.[0-9a-f]{8}\.tmp", re.DOTALL)
_in_use: set[str] = set()  # temporary files and folders of this process
_new_folders: list[str] = []


# ---- files -------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_file(path: str | Path, flag: str = "") -> Iterator[BinaryIO]:
    """A binary file that replaces *path* if the ``with`` block raises nothing.

    It is written under a temporary name in the same folder, flushed to disk, and renamed. A
    symbolic link is replaced; its target, which others may read, stays as it is.

    Raises:
        UserError: a system error, such as a full disk; the message names *flag* and *path*.
    """
    path = Path(path)
    with _system_errors(flag, path), _temporary(path) as temporary:
        _check_regular(path)
        with open(temporary, "x+b") as file:
            yield file
            file.flush()
            # Before the rename: a crash could leave the new name with an empty file otherwise.
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)


def point_to(path: str | Path, name: str) -> None:
    """Make *path* a symbolic link to *name* in the same folder, atomically, or raise UserError."""
    with _system_errors("", path):
        _replace(Path(path), lambda temporary: os.symlink(name, temporary))


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make *target* a hard link of *source*, atomically; a copy on filesystems without them.

    Raises:
        UserError: a system error; the message names *target*.
    """
    try:
        _replace(Path(target), lambda temporary: os.link(source, temporary))
    except OSError:
        with open(source, "rb") as content, atomic_file(target) as file:
            shutil.copyfileobj(content, file, 1 << 20)


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    """Replace *path* by the link that *make* creates under a temporary name."""
    with _temporary(path) as temporary:
        make(temporary)
        os.replace(temporary, path)
        sync_folder(path.parent)


# ---- folders -----------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_folder(
    folder: str | Path, names: Sequence[str] = (), flag: str = "", last: str | None = None
) -> Iterator[Path]:
    """A temporary folder that becomes *folder*, or whose files move into it, if the ``with`` block
    raises nothing.

    A new *folder* appears by one rename. Into one that is there, files move one by one.

    Args:
        names: every file that a run may write: those not written this time are removed from
            *folder*.
        flag: the command-line flag that named *folder*, for error messages.
        last: by default the last of *names*. It is removed first and moves last, so that its
            presence implies that the others are of the same run.

    Raises:
        UserError: a system error.
    """
    folder = Path(folder)
    last = last or (names[-1] if names else None)
    with removing_empty_folders(), _system_errors(flag, folder):
        is_new = not folder.exists()
        parent = folder.parent if is_new else folder
        make_folder(parent)
        remove_leftovers(parent)
        # `.` and `..` are no names.
        with _temporary(parent / Path(os.path.abspath(folder)).name) as temporary:
            temporary.mkdir()
            try:
                yield temporary
            except UserError as error:
                # The user knows the folder by the name that it will have.
                raise type(error)(error.args[0].replace(str(temporary), str(folder))) from None
            # What is in it first: after a crash the folder is complete, or not there.
            for path in (*temporary.rglob("*"), temporary):
                sync_folder(path) if path.is_dir() else _sync(path)
            if is_new:
                os.rename(temporary, folder)
            else:
                _move_files(temporary, folder, names, last, flag)
            sync_folder(parent)


def _move_files(source: Path, folder: Path, names: Sequence[str], last: str | None, flag: str) -> None:
    """Make the files *names* in *folder* what they are in *source*, the *last* one last."""
    written = set(os.listdir(source))
    # Before the first file moves: what cannot be replaced leaves the folder as it was.
    for name in sorted(written | set(names)):
        if not (source / name).is_dir():
            with _system_errors(flag, folder / name):
                _check_regular(folder / name)
    if last is not None:
        # A kill between the moves leaves a folder without its last file: it is incomplete.
        (folder / last).unlink(missing_ok=True)
    for name in sorted(written | set(names), key=lambda name: (name == last, name)):
        if name in written:
            os.replace(source / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def make_folder(folder: str | Path) -> None:
    """Make *folder* and missing folders above it; see :func:`removing_empty_folders`."""
    path = Path(os.path.abspath(folder))
    missing = [str(path) for path in (path, *path.parents) if not os.path.lexists(path)]
    _new_folders.extend(reversed(missing))
    path.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def removing_empty_folders() -> Iterator[None]:
    """After an exception remove empty folders that :func:`make_folder` made in the block."""
    before = len(_new_folders)
    try:
        yield
    # Also after Ctrl-C: an empty folder would look like the results of a run.
    except BaseException:
        while len(_new_folders) > before:
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(_new_folders.pop())
        raise


# ---- checks before the work --------------------------------------------------------------------


def prepare_folder(flag: str, folder: str | Path) -> None:
    """Make *folder* if needed, and check before any work is done that files can be written in it.

    What a killed process left there is removed; see :func:`remove_leftovers`.

    Raises:
        UserError: it cannot be made or written; the message names *flag*.
    """
    with removing_empty_folders(), _system_errors(flag, folder):
        make_folder(folder)
        remove_leftovers(folder)
        # Trying is the only test that knows quotas and network filesystems.
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextlib.contextmanager
def results_folder(path: str | None) -> Iterator[None]:
    """Create the folder of ``results_path``, if given;
    after an error a new folder that is empty is removed.

    Raises:
        UserError: it cannot be created or written.
    """
    with removing_empty_folders():
        if path is not None:
            prepare_folder("`results_path`", path)
        yield


def prepare_file(
    flag: str, path: str | Path, inputs: Mapping[str, str | Path | None] | None = None, begins: bytes = b""
) -> None:
    """Check before any work that :func:`atomic_file` can write *path*; make its folder.

    Args:
        inputs: other files that the command reads or writes, by flag: none of them is replaced.
        begins: the first bytes of the kind of file: a file of another kind is not replaced.

    Raises:
        UserError: it cannot be written, or is one of *inputs* or of another kind.
    """
    with _system_errors(flag, path):
        _check_regular(Path(path))
    for name, source in (inputs or {}).items():
        if source is not None and os.path.realpath(path) == os.path.realpath(source):
            raise UserError(f"{flag} {path}: is the same file as {name}; choose another file")
    if begins and os.path.isfile(path) and os.path.getsize(path):
        with _system_errors(flag, path), open(path, "rb") as file:
            if file.read(len(begins)) != begins:
                raise UserError(f"{flag} {path}: is a file of another kind, which is not replaced; choose another file")
    prepare_folder(flag, Path(path).parent)


def _check_regular(path: Path) -> None:
    """Raise OSError for what a rename must not replace: folders, devices, and the system's links to
    them."""
    if path.is_dir() and not path.is_symlink():  # as checkpoint_last.pt of sharded training is
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    parent = os.path.realpath(path.parent)
    if (path.exists() and not path.is_file() and not path.is_dir()) or parent == "/dev" or parent.startswith("/proc/"):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


@contextlib.contextmanager
def _system_errors(flag: str, path: str | Path) -> Iterator[None]:
    """Turn system errors of writing *path* into a UserError; others pass unchanged."""
    try:
        yield
    except BrokenPipeError:  # of what is printed meanwhile
        raise
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            # torch's writer hides the system's error behind a RuntimeError of its own.
            cause = cause.__cause__ or cause.__context__
        if cause is None or not _is_about(cause, path):
            raise
        location = f"{flag} {path}" if flag else str(path)
        reason = cause.strerror or str(cause)
        advice = "free some space or choose another place" if cause.errno in FULL else "choose another place"
        raise UserError(f"{location}: cannot be written ({reason}); {advice}") from None


def _is_about(error: OSError, path: str | Path) -> bool:
    """Return whether *error* concerns *path*, a folder of it, or a temporary file; errors of
    ``write`` name no file."""
    if error.filename is None:
        return True
    source, target = Path(os.path.realpath(error.filename)), Path(os.path.realpath(path))
    is_temporary = any(_TEMPORARY.fullmatch(part) for part in source.parts)
    return is_temporary or source.is_relative_to(target) or target.is_relative_to(source)


# ---- temporary names ---------------------------------------------------------------------------


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A new name beside *target*, since a file is renamed within one filesystem only; what is left
    under it at the end is removed."""
    short = target.name.encode(errors="ignore")[:64].decode(errors="ignore")  # names have at most 255 bytes
    temporary = target.with_name(f".{short}.{_HOST}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    _in_use.add(temporary.name)
    try:
        yield temporary
    finally:
        _remove(temporary)
        _in_use.discard(temporary.name)


def remove_leftovers(folder: str | Path) -> None:
    """Remove temporary files and folders that killed processes of this host left in *folder*."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            match = _TEMPORARY.fullmatch(name)
            # Processes of other hosts, which may share the folder, are not known here.
            if match is not None and match[1] == _HOST and not _is_written(name, int(match[2])):
                _remove(Path(folder, name))


def _is_written(name: str, process: int) -> bool:
    """Whether *process*, which made the temporary file *name*, still writes it."""
    if process == os.getpid():
        return name in _in_use
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    return True


def _remove(path: Path) -> None:
    """Remove a file or folder as far as the system allows it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def sync_folder(folder: str | Path) -> None:
    """Flush renames in *folder* to disk, where the filesystem supports it."""
    with contextlib.suppress(OSError):
        _sync(folder)


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
