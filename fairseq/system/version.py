"""The version of this package, and other installed packages
with its import name, such as Meta's ``fairseq``."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

__version__ = "2.0.0"

NAME = "fairseq-short"  # of this package on an index
INSTALLED = (".dist-info", ".egg-info")


def warn_of_neighbour() -> None:
    """Log one line if another installed package has files
    in ``fairseq/``, in the first process only."""
    other = next(_neighbours(), None)
    if other is None:
        return
    import multiprocessing  # slow to import, and seldom needed

    # A worker: the process that started it has warned.
    if multiprocessing.parent_process() is not None:
        return
    name, folder = other
    logging.getLogger("fairseq").warning(
        "the package %s in %s is imported as fairseq, too, and `pip uninstall` of either removes files of both; "
        "to separate them, run `pip uninstall %s %s` and install one of them again, the other in an environment of "
        "its own",
        name, folder, name, NAME,
    )  # fmt: skip


def _neighbours() -> Iterator[tuple[str, str]]:
    """Name and folder of each such package; of folders named otherwise than ``fairseq…`` nothing is
    read, for speed."""
    for folder in sys.path:
        with contextlib.suppress(OSError):  # no such folder, or a zip file
            for entry in os.listdir(folder or "."):
                name = entry.removesuffix(".egg-info").split("-")[0].replace("_", "-").lower()
                is_other = name.startswith("fairseq") and name != NAME and entry.endswith(INSTALLED)
                if is_other and _holds_fairseq(os.path.join(folder, entry)):
                    yield name, folder or "."


def _holds_fairseq(installed: str) -> bool:
    """Whether the package described by the folder *installed* has a module ``fairseq``."""
    for file, sign in (("top_level.txt", b"\nfairseq\n"), ("RECORD", b"\nfairseq/__init__.py,")):
        with contextlib.suppress(OSError), open(os.path.join(installed, file), "rb") as content:
            if sign in b"\n" + content.read().replace(b"\r", b"") + b"\n":
                return True
    return False
