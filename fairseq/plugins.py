"""A user's own parts: the package that ``--user-dir`` names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from fairseq.errors import UserError


def import_user_module(folder: str) -> None:
    """Import the package in *folder*, so that it registers its parts.

    Raises:
        UserError: there is no such folder.
    """
    path = Path(folder).absolute()
    if not (path.is_dir() or path.with_suffix(".py").is_file()):
        raise UserError(f"--user-dir {folder}: no such folder")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    importlib.import_module(path.stem)
