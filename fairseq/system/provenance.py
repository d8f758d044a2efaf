"""Origin of a result: command, commit, machine and versions."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from fairseq.system.version import __version__

SECONDS = 10  # most time to wait for git, which may read a slow network filesystem


def about_run() -> dict[str, object]:
    """Return ``command``, ``commit`` (None outside a git checkout),
    ``machine`` and ``versions`` of this process."""
    # Results are published: no path of an installation. A name may have two words.
    command = f"{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".rstrip()
    return {"command": command, "commit": commit(), "machine": machine(), "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and this package."""
    return {"python": platform.python_version(), "torch": torch.__version__, "fairseq": __version__}


def machine() -> dict[str, object]:
    """Return the names of the processor and, if this process
    used one, of the GPU, and the number of threads."""
    gpu = _gpu()
    return {"processor": processor(), "threads": torch.get_num_threads(), **({} if gpu is None else {"gpu": gpu})}


def _gpu() -> str | None:
    """The name of the current accelerator; None if this process has not used one."""
    kind = torch.accelerator.current_accelerator()
    module = None if kind is None else torch.get_device_module(kind)
    # To ask for the name of a GPU that was not used would take memory on it.
    is_used = module is not None and getattr(module, "is_initialized", lambda: False)()
    return str(module.get_device_name()) if module is not None and is_used else None


def processor() -> str:
    """Return the processor's name, as exact as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit(folder: Path = Path(__file__).parents[2]) -> str | None:
    """Return the commit of the checkout *folder*, by default this package's, with ``-dirty`` if
    files were changed.

    None if *folder* is not itself the root of a checkout:
    an installed package may lie inside another project's.
    """
    root = _git(folder, "rev-parse", "--show-toplevel")
    if root is None or Path(root).resolve() != folder.resolve():
        return None
    # Without tags, the same form for every commit.
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*")


def _git(folder: Path, *command: str) -> str | None:
    """Return what git prints in *folder*; None if it is not installed,
    fails or takes longer than :data:`SECONDS`."""
    try:
        output = subprocess.run(
            ["git", "-C", str(folder), *command], capture_output=True, text=True, check=True, timeout=SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return output.stdout.strip() or None
