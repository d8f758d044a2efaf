"""Import of plug-ins from the package given with ``--user-dir``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from fairseq.errors import UserError


def import_user_module(folder: str) -> None:
    """Import the package in *folder*, so that it registers its parts; repeated calls have no effect.

    Only the package itself becomes importable, not what lies beside it.

    Raises:
        UserError: the folder is missing or no package, its name is not a valid package name, or its import fails;
            the message names the line of the plug-in that failed.
    """
    path = Path(folder).absolute()
    if path.is_dir():
        name = path.name
    elif path.with_suffix(".py").is_file():
        name = path.stem
    else:
        raise UserError(f"`user_dir` {folder}: folder not found; give the folder of a Python package")
    if "." in name:
        raise UserError(f"`user_dir` {folder}: a package name cannot contain dots; rename the folder")
    known = sys.modules.get(name)
    if known is not None and not _comes_from(known, path):
        raise UserError(f"`user_dir` {folder}: a different package named {name} is already imported; rename the folder")
    if path.is_dir() and not (path / "__init__.py").is_file():
        raise UserError(f"`user_dir` {folder}: no __init__.py in the folder; give the folder of a Python package")
    if known is None:
        _import(name, path, folder)


def imported_folders() -> list[str]:
    """The plug-ins of this process in the order of their import, for processes that are to import them too."""
    return list(_imported)


_NAMES = "fairseq.interop.fairseq.names"  # what plug-ins find under the names of other software
_imported: list[str] = []


def _import(name: str, path: Path, folder: str) -> None:
    importlib.invalidate_caches()
    other = importlib.util.find_spec(name)
    if other is not None and other.origin is not None and Path(other.origin).resolve() not in _files(path):
        raise UserError(f"`user_dir` {folder}: another module named {name} is found first; rename the folder")
    # Not through sys.path: the plug-in's neighbours would take the names of packages that other code imports.
    spec = PathFinder.find_spec(name, [str(path.parent)])
    if spec is None or spec.loader is None:
        raise UserError(f"`user_dir` {folder}: not a Python package; give a folder with an __init__.py")
    importlib.import_module(_NAMES).stand_in_for_omegaconf()
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, UserError) or not isinstance(error, Exception | SystemExit):
            raise
        raise UserError(f"`user_dir` {folder}: {_place(error, path)}; correct the plug-in") from None
    _imported.append(str(path))


def _place(error: BaseException, path: Path) -> str:
    """The last line of the plug-in at *path* that *error* passed through, and the error."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    own = path if path.is_dir() else path.with_suffix(".py")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).resolve().is_relative_to(own.resolve()):
            return f"{frame.filename}, line {frame.lineno}: {reason}"
    return reason


def _files(path: Path) -> set[Path]:
    """The files that a plug-in at *path* can begin in."""
    return {(path / "__init__.py").resolve(), path.with_suffix(".py").resolve()}


def _comes_from(module: ModuleType, path: Path) -> bool:
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    own = {path.resolve(), path.with_suffix(".py").resolve()}
    return any(Path(place).resolve() in own for place in places if place)
