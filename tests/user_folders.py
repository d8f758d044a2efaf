"""Folders of plug-ins for ``--user-dir``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def user_folder(home: Path, name: str, source: str) -> Iterator[list[Any]]:
    """The flags that import the package *name*, made of *source* in *home*, which is forgotten at
    the end."""
    folder = home / name
    folder.mkdir()
    (folder / "__init__.py").write_text(source)
    yield ["--user-dir", folder]
    del sys.modules[name]
