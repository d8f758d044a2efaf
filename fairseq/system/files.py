"""Atomic writing of files and folders: complete under their names, or not there at all."""

from __future__ import annotations

import contextlib
import contextvars
import errno
import fcntl
import os
import platform
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from fairseq.errors import UserError
from fairseq.system.opening import is_special

ARCHIVE = b"PK\x03\x04"  # how files of torch.save and numpy.savez begin
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HOST = re.sub(r"[^A-Za-z0-9_-]", "-", platform.node())[:32] or "host"
_TEMPORARY = re.compile(r"\..*\.([A-Za-z0-9_-]+)\.\d+\.[0-9a-f]{8}\.tmp", re.DOTALL)
_NEW_FOLDERS = contextvars.ContextVar[list[str] | None]("_NEW_FOLDERS", default=None)


@contextlib.contextmanager
def removing_empty_folders() -> Iterator[None]:
    """After an exception remove empty folders that :func:`make_folder` made in the block."""
    folders: list[str] = []
    outer = _NEW_FOLDERS.set(folders)
    try:
        yield
    # Also after Ctrl-C: an empty folder would look like the results of a run.
    except BaseException:
        for folder in reversed(folders):
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(folder)
        raise
    finally:
        _NEW_FOLDERS.reset(outer)
        if (before := _NEW_FOLDERS.get()) is not None:
            before += folders


def make_folder(folder: str | Path) -> None:
    """Make *folder* and missing folders above it; see :func:`removing_empty_folders`."""
    path = Path(os.path.abspath(folder))
    missing = [str(path) for path in (path, *path.parents) if not os.path.lexists(path)]
    if (folders := _NEW_FOLDERS.get()) is not None:
        folders += reversed(missing)
    path.mkdir(parents=True, exist_ok=True)


class FileGroup:
    """Files that are written atomically; see :func:`atomic_files`."""

    def __init__(self, temporaries: contextlib.ExitStack) -> None:
        self._temporaries = temporaries
        self._written: list[tuple[str | Path, str, Path | BinaryIO]] = []

    @contextlib.contextmanager
    def file(self, path: str | Path, flag: str = "") -> Iterator[BinaryIO]:
        """A binary file for the content of *path*, which is on disk when the ``with`` block ends.

        Raises:
            UserError: a system error, such as a full disk; the message names *path* and *flag*.
        """
        with _system_errors(flag, path):
            # Written at the end: the writers of archives seek, which pipes cannot.
            if is_special(path):
                content = self._temporaries.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed there
                yield content
                self._written.append((path, flag, content))
                return
            temporary, file = self._temporaries.enter_context(_temporary_file(_destination(path)))
            yield file
            file.flush()
            # Before the rename: a crash could leave the new name with an empty file otherwise.
            os.fsync(file.fileno())
            self._written.append((path, flag, temporary))

    def move(self) -> None:
        """Give all files their names; after a UserError those moved before are as they were."""
        with contextlib.ExitStack() as undo:
            for path, flag, written in self._written:
                with _system_errors(flag, path):
                    if not isinstance(written, Path):
                        written.seek(0)
                        with open(path, "wb") as special:
                            shutil.copyfileobj(written, special, 1 << 20)
                        continue
                    target = _destination(path)
                    # A single rename is atomic and needs no backup.
                    if len(self._written) > 1:
                        undo.callback(_restore, target, self._backup(target))
                    os.replace(written, target)
                    sync_folder(target.parent)
            # All have their names: nothing is undone.
            undo.pop_all()

    def _backup(self, target: Path) -> Path | None:
        """Give the file or link *target* another name until the group ends; None without one."""
        if not os.path.lexists(target):
            return None
        backup = _temporary_path(target)
        self._temporaries.callback(_remove, backup)
        if target.is_symlink():
            os.symlink(os.readlink(target), backup)
        else:
            link_or_copy(target, backup)
        return backup


@contextlib.contextmanager
def atomic_files() -> Iterator[FileGroup]:
    """A group of files, written atomically when the ``with`` block ends without an exception.

    They are written under temporary names in their own folders, flushed to disk, and renamed one
    right after the other. After an exception, also of a rename, they are removed, and the former
    contents remain. A symbolic link is replaced; its target, which others may read, stays as it is.
    A device or a pipe is written to at the end, never replaced.
    """
    with contextlib.ExitStack() as temporaries:
        group = FileGroup(temporaries)
        yield group
        group.move()


Create = Callable[[str | Path, str], contextlib.AbstractContextManager[BinaryIO]]
"""Begins a file, given its path and flag: :func:`atomic_file` or :meth:`FileGroup.file`."""


@contextlib.contextmanager
def atomic_file(path: str | Path, flag: str = "") -> Iterator[BinaryIO]:
    """A group of one: see :func:`atomic_files` and :meth:`FileGroup.file`."""
    with atomic_files() as group, group.file(path, flag) as file:
        yield file


@contextlib.contextmanager
def atomic_folder(folder: str | Path, names: Sequence[str] | None = None, flag: str = "") -> Iterator[Path]:
    """A temporary folder whose files move to *folder* if the ``with`` block raises nothing.

    *folder* is made if needed. If it is new and stays empty, it is removed again.

    Args:
        names: every file that a run may write, in the order in which they move; those not written
            this time are removed from *folder*. The last one is removed first and moves last, so
            that its presence implies that the others are of the same run. By default whatever was
            written moves: as a whole, by one rename, where *folder* is empty.
        flag: the command-line flag that named *folder*, for error messages.

    Raises:
        UserError: a system error, or one of *names* is a folder.
    """
    folder = Path(folder)
    is_new = not os.path.exists(folder)
    with removing_empty_folders(), _system_errors(flag, folder):
        make_folder(folder)
        remove_leftovers(folder)
        replaces = names is None and _can_be_replaced(folder)
        if replaces:
            remove_leftovers(folder.parent)
        with _temporary_folder(folder.parent if replaces else folder) as temporary:
            try:
                yield temporary
            except UserError as error:
                # The user knows the folder by the name that it will have.
                raise type(error)(error.args[0].replace(str(temporary), str(folder))) from None
            if replaces:
                temporary.chmod(stat.S_IMODE(folder.stat().st_mode))
                sync_folder(temporary)
                os.rename(temporary, folder)
            else:
                _move_files(temporary, folder, names, flag)
        sync_folder(folder.parent if replaces else folder)
    if is_new:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder that becomes *path*, a new one, if the ``with`` block raises nothing.

    Raises:
        UserError: a system error; the message names *path*.
    """
    path = Path(path)
    with _system_errors("", path):
        with _temporary_folder(path.parent) as temporary:
            yield temporary
            # It was made for this user alone; the finished folder has the rights of its parent.
            temporary.chmod(stat.S_IMODE(path.parent.stat().st_mode))
            # What is in it first: after a crash the folder is complete, or not there.
            sync_folder(temporary)
            os.rename(temporary, path)
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
    temporary = _temporary_path(path)
    try:
        make(temporary)
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        # `os.replace` leaves both of two names of one file.
        _remove(temporary)


def remove_leftovers(folder: str | Path) -> None:
    """Remove temporary files and folders that killed processes of this host left in *folder*.

    A live writer holds a lock on its temporary file, which the kernel releases with the process;
    other hosts are told apart by name, since locks need not reach across a network filesystem.
    """
    with contextlib.suppress(OSError):
        # A list: entries are removed meanwhile.
        for entry in list(os.scandir(folder)):
            match = _TEMPORARY.fullmatch(entry.name)
            if match is None or match[1] != _HOST:
                continue
            with contextlib.suppress(OSError):
                # A link of such a name, which another user may have made, is not followed.
                descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(Path(entry.path))
                finally:
                    os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a file or folder as far as the system allows it."""
    if os.path.isdir(path) and not path.is_symlink():  # no error here: this ends other work
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            # Without descriptors `rmtree` cannot list a folder; an empty one goes all the same.
            path.rmdir()
        return
    with contextlib.suppress(OSError):
        path.unlink()


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
    if os.path.isdir(path):
        raise UserError(f"{flag} {path}: cannot be written (Is a directory); choose another file")
    if os.path.islink(os.path.realpath(path)):
        raise UserError(f"{flag} {path}: cannot be written (a symbolic link to itself); choose another file")
    for name, source in (inputs or {}).items():
        with contextlib.suppress(OSError, ValueError):
            # A file that is not there yet has a path alone.
            is_same = source is not None and os.path.realpath(path) == os.path.realpath(source)
            if source is not None and (is_same or os.path.samefile(path, source)):
                raise UserError(f"{flag} {path}: is the same file as {name}; choose another file")
    if begins and os.path.isfile(path) and os.path.getsize(path):
        with _system_errors(flag, path), open(path, "rb") as file:
            if file.read(len(begins)) != begins:
                raise UserError(f"{flag} {path}: is a file of another kind, which is not replaced; choose another file")
    if is_special(path):
        if not os.access(path, os.W_OK):
            raise UserError(f"{flag} {path}: cannot be written (Permission denied); choose another file")
    else:
        prepare_folder(flag, _destination(path).parent)


def sync_folder(folder: str | Path) -> None:
    """Flush renames in *folder* to disk, where the filesystem supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _system_errors(flag: str, path: str | Path) -> Iterator[None]:
    """Turn system errors of writing *path* into a UserError; others pass unchanged."""
    try:
        yield
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
    return (
        source.is_relative_to(target)
        or target.is_relative_to(source)
        or any(_TEMPORARY.fullmatch(part) for part in source.parts)
    )


def _destination(path: str | Path) -> Path:
    """The name that is replaced where *path* is written:
    a link and not its target, which may be shared."""
    folder = os.path.realpath(os.path.dirname(path))
    # `/dev/stdout` is no link of a user: it stands for the file that a shell opened.
    is_stream = folder == "/dev" or folder.startswith("/proc/")
    return Path(os.path.realpath(path) if is_stream else os.path.join(folder, os.path.basename(path)))


def _temporary_path(target: Path) -> Path:
    # Beside the target, since a file is renamed within one filesystem only.
    short = target.name.encode(errors="ignore")[:64].decode(errors="ignore")  # names have at most 255 bytes
    return target.with_name(f".{short}.{_HOST}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


@contextlib.contextmanager
def _temporary_file(target: Path) -> Iterator[tuple[Path, BinaryIO]]:
    while True:
        temporary = _temporary_path(target)
        file = open(temporary, "x+b")  # noqa: SIM115 - closed below
        with contextlib.suppress(OSError):  # a filesystem without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            break
        # Another process removed it as a leftover before it was locked.
        file.close()
    try:
        yield temporary, file
    finally:
        # Closing writes the rest, which fails again: the first error counts.
        with contextlib.suppress(OSError):
            file.close()
        _remove(temporary)


@contextlib.contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    with contextlib.ExitStack() as ends:
        while True:
            temporary = _temporary_path(parent / "folder")
            temporary.mkdir(mode=0o700)
            ends.callback(_remove, temporary)
            # As with a file, another process may remove it as a leftover until it is locked.
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(temporary, os.O_RDONLY)
                ends.callback(os.close, descriptor)
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.path.lexists(temporary):
                    break
        yield temporary


def _restore(target: Path, backup: Path | None) -> None:
    """Make *target* what it was when *backup* was made."""
    with contextlib.suppress(OSError):
        if backup is None:
            target.unlink()
        else:
            os.replace(backup, target)


def _can_be_replaced(folder: Path) -> bool:
    """Whether a folder beside *folder*, which is empty, can take its name."""
    return (
        not os.listdir(folder)
        and not folder.is_symlink()
        and not os.path.ismount(folder)
        and not os.path.samefile(folder, os.curdir)
        and os.access(folder.parent, os.W_OK | os.X_OK)
    )


def _move_files(source: Path, folder: Path, names: Sequence[str] | None, flag: str) -> None:
    """Make the files *names* in *folder* what they are in *source*, the last one last."""
    moving = sorted(os.listdir(source)) if names is None else names
    for name in moving:
        if os.path.isdir(folder / name):
            raise UserError(f"{flag} {folder / name}: cannot be written (Is a directory); remove it".lstrip())
    if names:
        # A kill between the moves leaves a folder without its last file: it is incomplete.
        (folder / names[-1]).unlink(missing_ok=True)
    for name in moving:
        if os.path.exists(source / name):
            os.replace(source / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
