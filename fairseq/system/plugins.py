"""Import of plug-ins from the package given with ``--user-dir``."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from fairseq.errors import UserError
from fairseq.system import deferred


def import_user_module(folder: str) -> None:
    """Import the package in *folder*, so that it
    registers its parts; repeated calls have no effect.

    Only the package itself becomes importable, not what lies beside it. The modules of its folders
    ``tasks`` and ``models`` are imported, too, as fairseq does; without code in ``__init__.py`` the
    modules of :data:`PARTS`.

    Raises:
        UserError: the folder is missing or no package, its name is not a valid package name, or its
            import fails; the message names the line of the plug-in that failed.
    """
    path = Path(folder).absolute()
    if os.path.isdir(path):
        name = path.name
    elif os.path.isfile(path.with_suffix(".py")):
        name = path.stem
    else:
        raise UserError(f"`user_dir` {folder}: folder not found; give the folder of a Python package")
    if "." in name:
        raise UserError(f"`user_dir` {folder}: a package name cannot contain dots; rename the folder")
    known = sys.modules.get(name)
    if known is not None and not _comes_from(known, path):
        raise UserError(f"`user_dir` {folder}: a different package named {name} is already imported; rename the folder")
    if os.path.isdir(path) and not os.path.isfile(path / "__init__.py") and not list(_part_modules(path, PARTS)):
        raise UserError(
            f"`user_dir` {folder}: no __init__.py in the folder, and no modules in {', '.join(PARTS)}; "
            "give the folder of a Python package"
        )
    if known is None:
        _import(name, path, folder)


def import_copies() -> None:
    """Import the modules that were copied among this package's own and register parts; repeated
    calls have no effect.

    Raises:
        UserError: an import fails.
    """
    for name, file in _copies():
        if name not in sys.modules:
            deferred.plugins().before_import()
            try:
                importlib.import_module(name)
            except Exception as error:
                raise UserError(f"{name}: {_location(error, file)}; correct the plug-in") from None


@functools.cache
def _copies() -> list[tuple[str, Path]]:
    """Names and files of such modules. None of this package's own
    has the decorator: built-in parts are declared."""
    package, copies = __name__.partition(".")[0], []
    for part in PARTS[:-1]:
        room = importlib.import_module(f"{package}.{part.replace('/', '.')}")
        for path in (path for folder in room.__path__ for path in sorted(Path(folder).glob("*"))):
            file = path / "__init__.py" if os.path.isdir(path) else path
            if file.suffix == ".py" and os.path.isfile(file) and MARK in file.read_bytes():
                copies.append((f"{room.__name__}.{path.stem}", file))
    return copies


def imported_folders() -> list[str]:
    """The plug-ins of this process in the order of their import,
    for processes that are to import them too."""
    return list(_imported)


PARTS = ("models", "tasks", "criterions", "optim", "optim/lr_scheduler", "lr_scheduler")
"""Folders of a plug-in whose modules are imported."""
MARK = b"\n@register_"
_imported: list[str] = []


def _import(name: str, path: Path, folder: str) -> None:
    # The folder may have been written since the last import.
    importlib.invalidate_caches()
    other = importlib.util.find_spec(name)
    files = (path / "__init__.py").resolve(), path.with_suffix(".py").resolve()
    if other is not None and other.origin is not None and Path(other.origin).resolve() not in files:
        raise UserError(f"`user_dir` {folder}: another module named {name} is found first; rename the folder")
    # Not through sys.path: the plug-in's neighbours would
    # take the names of packages that other code imports.
    spec = PathFinder.find_spec(name, [str(path.parent)])
    if spec is None:
        raise UserError(f"`user_dir` {folder}: not a Python package; give a folder with an __init__.py")
    deferred.plugins().before_import()
    module = importlib.util.module_from_spec(spec)
    # Before it runs, since its own modules import it.
    sys.modules[name] = module
    try:
        if spec.loader is None:  # a folder without __init__.py
            module.__path__ = [str(path)]  # its own path would follow sys.path
        else:
            spec.loader.exec_module(module)
        for part in _part_modules(path, PARTS if _has_no_code(path) else ("models", "tasks")):
            importlib.import_module(f"{name}.{part}")
    except BaseException as error:
        # A module that failed half-way must not count as imported.
        sys.modules.pop(name, None)
        if isinstance(error, UserError | KeyboardInterrupt):
            raise
        raise UserError(f"`user_dir` {folder}: {_location(error, path)}; correct the plug-in") from None
    _imported.append(str(path))


def _part_modules(path: Path, folders: Sequence[str]) -> Iterator[str]:
    """The modules in *folders* of the plug-in at *path*, by their names within it."""
    for folder in folders:
        for file in sorted((path / folder).glob("*")):
            module = file.suffix == ".py" or os.path.isfile(file / "__init__.py")
            if module and file.name[0] not in "._" and file.stem.isidentifier():
                yield f"{folder}.{file.stem}".replace("/", ".")


def _has_no_code(path: Path) -> bool:
    """Whether the plug-in at *path* is a folder
    whose ``__init__.py`` is missing or has no statements."""
    file = path / "__init__.py"
    if not os.path.isdir(path) or not os.path.isfile(file):
        return os.path.isdir(path)
    return all(isinstance(node, ast.Expr) for node in ast.parse(file.read_bytes()).body)


def _location(error: BaseException, path: Path) -> str:
    """The last line of the plug-in at *path* that *error* passed through, and the error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    reason = f"{type(error).__name__}: {error}".removesuffix(": ")
    root = (path if os.path.isdir(path) else path.with_suffix(".py")).resolve()
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if Path(file := frame.f_code.co_filename).resolve().is_relative_to(root):
            return f"{file}, line {line}: {reason}"
    return reason


def _comes_from(module: ModuleType, path: Path) -> bool:
    files = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    paths = {path.resolve(), path.with_suffix(".py").resolve()}
    return any(Path(file).resolve() in paths for file in files if file)
