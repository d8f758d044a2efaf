"""A user's own parts: the package that ``--user-dir`` names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from fairseq.errors import UserError


def import_user_module(folder: str) -> None:
    """Import the package in *folder*, so that it registers its parts; a second time nothing happens.

    Raises:
        UserError: there is no such folder, or its name cannot be that of a package.
    """
    path = Path(folder).absolute()
    if path.is_dir():
        name = path.name
    elif path.with_suffix(".py").is_file():
        name = path.stem
    else:
        raise UserError(f"--user-dir {folder}: no such folder")
    if "." in name:
        raise UserError(f"--user-dir {folder}: a package's name has no dots; rename the folder")
    known = sys.modules.get(name)
    if known is not None and not _comes_from(known, path):
        raise UserError(f"--user-dir {folder}: there is another package of that name, {name}; rename the folder")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    importlib.import_module(name)


def _comes_from(module: ModuleType, path: Path) -> bool:
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    own = {path.resolve(), path.with_suffix(".py").resolve()}
    return any(Path(place).resolve() in own for place in places if place)
