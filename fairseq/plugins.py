"""Import of plug-ins from the package given with ``--user-dir``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from fairseq.errors import UserError


def import_user_module(folder: str) -> None:
    """Import the package in *folder*, so that it registers its parts; repeated calls have no effect.

    Raises:
        UserError: the folder is missing, or its name is not a valid package name.
    """
    path = Path(folder).absolute()
    if path.is_dir():
        name = path.name
    elif path.with_suffix(".py").is_file():
        name = path.stem
    else:
        raise UserError(f"--user-dir {folder}: folder not found; give the folder of a Python package")
    if "." in name:
        raise UserError(f"--user-dir {folder}: a package name cannot contain dots; rename the folder")
    known = sys.modules.get(name)
    if known is not None and not _comes_from(known, path):
        raise UserError(f"--user-dir {folder}: a different package named {name} is already imported; rename the folder")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    importlib.import_module(name)


def _comes_from(module: ModuleType, path: Path) -> bool:
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    own = {path.resolve(), path.with_suffix(".py").resolve()}
    return any(Path(place).resolve() in own for place in places if place)
