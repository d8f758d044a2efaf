"""Compilation of kernels in C for this machine, once, and loading."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import logging
import os
import platform
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

FLAGS = (
    *("-O2", "-ftree-vectorize", "-fPIC", "-Wno-psabi"),
    # Allow reordered sums, so that loops are vectorised; keep infinities and NaN.
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
TIMEOUT = 300  # seconds
DIGEST = 32  # bytes of SHA-256 at the end of a library
_LOADED = itertools.count()


@functools.cache
def library(
    work: str, source: Path, declare: Callable[[ctypes.CDLL], None] = lambda compiled: None
) -> ctypes.CDLL | None:
    """The compiled kernels of *source*; None, with a warning, if they cannot be compiled or loaded.

    The environment's ``CC`` and ``CFLAGS`` are the compiler and additional flags.

    Args:
        work: what the kernels are for, in the warning.
        source: a file in C, with its headers in the same folder.
        declare: sets the types of the functions' arguments
            and results, before any thread calls one.
    """
    # Masks are drawn as words of 64 bits and read as bytes, in the order of little-endian machines.
    if sys.byteorder != "little" or os.name != "posix":
        return None
    try:
        with _compiled(source) as path:
            compiled = ctypes.CDLL(path)
        declare(compiled)
        _survive_forks()
        return compiled
    # `shlex` raises ValueError for quotes in CC that are not closed.
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("%s kernels: not compiled (%s); %s uses torch and is slower", work, _reason(error), work)
        return None


@functools.cache
def _survive_forks() -> None:
    """Let a process that is forked from this one compute
    by one thread: OpenMP would wait for its parent's."""
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))


@contextlib.contextmanager
def _compiled(source: Path) -> Iterator[str]:
    """A path of the shared library for *source*, compiler and processor, compiled on first use."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=TIMEOUT).stdout
    # Machines may share a home directory: a library belongs to one source, compiler and processor.
    key = hashlib.sha256()
    headers = sorted(source.parent.glob("*.h"))
    texts = [path.read_bytes() for path in (source, *headers)]
    for part in (*texts, version, _processor(), repr((compiler, FLAGS, _more_flags())).encode()):
        key.update(hashlib.sha256(part).digest())
    name = f"{source.stem}-{key.hexdigest()}.so"
    with contextlib.ExitStack() as stack:
        folder = _folder()
        descriptor = _library_in(folder, name, compiler, source) if folder is not None else None
        # Without a cache nothing is left behind: a loaded library needs no file.
        if descriptor is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairseq-short-")))
            descriptor = _library_in(folder, name, compiler, source)
        if folder is None or descriptor is None:
            raise OSError(f"{folder}: others than this user may write it")
        stack.callback(os.close, descriptor)
        # Load the file that was checked, whatever its path names by then.
        # By a path of its own: the loader takes an equal path
        # for a library that it has loaded already.
        opened = f"/proc/self/fd/{'./' * next(_LOADED)}{descriptor}"
        yield opened if os.path.exists(opened) else str(folder / name)


def _library_in(folder: Path, name: str, compiler: list[str], source: Path) -> int | None:
    """A descriptor of the library *name* in *folder*,
    compiled if needed; None if that cannot be trusted."""
    descriptor = _open_library(folder, name)
    if descriptor is None:
        _build(compiler, source, folder, name)
        descriptor = _open_library(folder, name)
    return descriptor


def _open_library(folder: Path, name: str) -> int | None:
    """A descriptor of the file *name* in *folder*; None if there is none,
    it is damaged, or others than this user may have written it:
    folder or file is a link, of another user, or writable by others."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        opened.callback(os.close, parent)
        # Not blocking: opening a pipe of that name would hang.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        private = _is_private(os.fstat(parent)) and _is_private(os.fstat(file))
        if private and stat.S_ISREG(os.fstat(file).st_mode) and _is_intact(file):
            return file
        os.close(file)
    return None


def _is_private(state: os.stat_result) -> bool:
    """Whether only this user can write what has this *state*."""
    return state.st_uid == os.getuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_intact(file: int) -> bool:
    """Whether the library ends with its digest,
    as :func:`_build` writes it: loading a damaged one may crash."""
    content = os.pread(file, os.fstat(file).st_size, 0)
    return content[-DIGEST:] == hashlib.sha256(content[:-DIGEST]).digest()


def _build(compiler: list[str], source: Path, folder: Path, name: str) -> None:
    """Compile the library *name* in *folder*; leave a *folder* as it is that does not let us."""
    # In the folder itself: a file is replaced atomically within one file system only.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "kernels.so"
        _compile(compiler, source, built)
        with built.open("r+b") as file:  # loaders ignore what follows a library
            file.write(hashlib.sha256(file.read()).digest())
        # Whatever the umask: a library that others can write is a program that they can change.
        built.chmod(0o700)
        # A file of another user in a sticky folder, or a folder of that name: the library works
        # without a cache.
        with contextlib.suppress(OSError):
            # Atomic, because another process may have compiled the same file meanwhile.
            os.replace(built, folder / name)


def _compile(compiler: list[str], source: Path, target: Path) -> None:
    unit, output = target.with_suffix(".o"), ["-shared", "-o", str(target)]
    common = [*compiler, *FLAGS, "-c", str(source), "-o", str(unit)]
    # ARM's compilers take -mcpu for -march; the last two
    # are for compilers that know neither, or lack OpenMP.
    for more in (["-march=native", "-fopenmp"], ["-mcpu=native", "-fopenmp"], ["-fopenmp"], []):
        result = subprocess.run([*common, *more, *_more_flags()], capture_output=True, timeout=TIMEOUT)
        if result.returncode == 0:
            break
    result.check_returncode()
    # Not linked with -fopenmp, so that symbols resolve to the OpenMP runtime that torch has loaded
    # and there is one thread pool. If that runtime is a different one, link the compiler's own.
    for link in ([], ["-fopenmp"]):
        subprocess.run(
            [*compiler, str(unit), *output, *link, *_more_flags(), "-lm"],
            capture_output=True,
            check=True,
            timeout=TIMEOUT,
        )
        try:
            ctypes.CDLL(str(target), mode=os.RTLD_NOW)
            return
        except OSError:
            if link:
                raise


def _more_flags() -> list[str]:
    return shlex.split(os.environ.get("CFLAGS", ""))


def _folder() -> Path | None:
    """The cache folder; None if it cannot be made, or others than this user can write to it."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # Path.home() raises it for a user without a home, as in containers.
    except RuntimeError:
        return None
    folder = root / "fairseq-short"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = os.lstat(folder)
        if stat.S_ISDIR(state.st_mode) and _is_private(state) and os.access(folder, os.W_OK):
            return folder
    return None


def _processor() -> bytes:
    """Identification of the processor that -march=native compiles for."""
    # torch's version, because the library uses the OpenMP runtime that torch brings.
    about = f"{platform.machine()} {torch.__version__}"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        about += "".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))
    except OSError:
        # Asked only here: on Linux it starts a program,
        # which may fail, and the library would have another name.
        about += platform.processor()
    return about.encode()


def _reason(error: Exception) -> str:
    stderr = getattr(error, "stderr", None) or b""
    lines = stderr.decode(errors="replace").splitlines()
    return next((line for line in lines if "error" in line), str(error))
