"""Source files of an export: an adapter to transformers, and before it the definitions of this
package that it reaches.

One file for models and one for tokenizers: transformers 4 finds no file that another one imports in
a local folder. Annotations reach nothing, since they are never evaluated, and what registers a part
is left out.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fairseq.system.version import __version__

ROOT = Path(__file__).parents[3]
REGISTRY = "fairseq.config.registry"
ADAPTERS = "fairseq.interop.hugging_face.exported."  # their files keep their names
WIDTH = 120
PARTS = "Parts that the exported model uses."

Parts = Mapping[str, Mapping[str, Sequence[type]]]
"""For modules of the folder ``exported``: the names in their table ``PARTS``, and one class or
several of each."""


@dataclass(frozen=True)
class Statement:
    """A statement of a module: the names that it defines and those that it uses, and its lines."""

    defines: frozenset[str]
    uses: frozenset[str]
    evaluated: frozenset[str]  # of *uses*, outside annotations
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Module:
    """A module of this package."""

    docstring: str
    imports: Mapping[str, tuple[str, str | None]]  # module and name of each; the name is None for ``import module``
    statements: tuple[Statement, ...]  # all but imports and the docstring

    def reached(self, names: Iterable[str]) -> list[Statement]:
        """Return the statements that define *names*, and those that they use, in the order of the
        file."""
        todo, names_reached = list(names), set()
        while todo:
            name = todo.pop()
            for number, statement in enumerate(self.statements):
                if name in statement.defines and number not in names_reached:
                    names_reached.add(number)
                    todo += statement.evaluated
        return [self.statements[number] for number in sorted(names_reached)]


def sources(adapters: Iterable[str], parts: Parts) -> dict[str, str]:
    """Return file names and texts of the modules *adapters* of the folder ``exported``, each with
    all that it uses.

    *parts* are modules of that folder whose table ``PARTS`` is to have these entries only, of one
    class or several.
    """
    tables = {f"{ADAPTERS}{name}": _table(entries) for name, entries in parts.items()}
    # transformers keeps one copy of the code by the name of the folder and the hash of its file:
    # since a file has its parts in it, models in folders of one name, such as revisions, do not
    # share the first one's.
    return {f"{name}.py": _merged(ADAPTERS + name, lambda name: _module(name, tables.get(name))) for name in adapters}


def _table(entries: Mapping[str, Sequence[type]]) -> str:
    """The text of a module that holds a table of parts."""
    kinds = sorted({(kind.__module__, kind.__name__) for entry in entries.values() for kind in entry})
    names = {name: ", ".join(kind.__name__ for kind in entry) for name, entry in entries.items()}
    rows = [f'    "{name}": {f"({text})" if ", " in text else text},' for name, text in names.items()]
    imports = [f"from {module} import {name}" for module, name in kinds]
    return "\n".join([f'"""{PARTS}"""', *imports, "", "PARTS = {", *rows, "}", ""])


Load = Callable[[str], Module]


def _merged(adapter: str, load: Load) -> str:
    """The text of the file *adapter* with the definitions of this package that it reaches, before
    their first use."""
    needed = _needed(adapter, load)
    plain: set[str] = set()
    imported: dict[str, dict[str, str]] = {}  # module → line of each name
    owners: dict[str, str] = {}
    body = []
    for name in _in_order(adapter, needed, load):
        module = load(name)
        statements = module.reached(needed[name])
        origins = {defined: f"{name}.{defined}" for statement in statements for defined in statement.defines}
        for origin, original, alias in _imports(module, statements):
            origins[alias] = f"{origin}.{original}"
            if original is None:
                plain.add(f"import {origin}" if origin.split(".")[0] == alias else f"import {origin} as {alias}")
            elif not _is_ours(origin):
                imported.setdefault(origin, {})[alias] = original if original == alias else f"{original} as {alias}"
        # Two definitions of one name would replace each other silently.
        clashes = [each for each in origins.keys() & owners.keys() if origins[each] != owners[each]]
        assert not clashes, f"{name}: {clashes} are names of another module, too"
        owners |= origins
        body.append(f"# {name}: {module.docstring.strip().splitlines()[0]}")
        body += [line for statement in statements for line in statement.lines]
    head = f"# From fairseq-short {__version__}. MIT License, Copyright (c) the fairseq-short authors."
    imports = [*sorted(plain), *(_import(origin, names.values()) for origin, names in sorted(imported.items()))]
    text = [head, f'"""{load(adapter).docstring}"""', "", "from __future__ import annotations", "", *imports, "", *body]
    return "\n".join(text).rstrip() + "\n"


def _needed(adapter: str, load: Load) -> dict[str, set[str]]:
    """The modules that *adapter* reaches, and the names of each."""
    needed: dict[str, set[str]] = {}
    todo = [(adapter, {defined for statement in load(adapter).statements for defined in statement.defines})]
    while todo:
        name, names = todo.pop()
        # A module can be reached several times with other names; it is read again only for new
        # ones.
        if names <= needed.setdefault(name, set()):
            continue
        needed[name] |= names
        todo += [(origin, {original}) for origin, original in _origins(load(name), needed[name])]
    return needed


def _in_order(name: str, needed: Mapping[str, set[str]], load: Load, done: dict[str, None] | None = None) -> list[str]:
    """The modules that *name* reaches, each after those that it imports."""
    done = {} if done is None else done
    for origin, _ in sorted(_origins(load(name), needed[name])):
        if origin not in done:
            _in_order(origin, needed, load, done)
    done[name] = None
    return list(done)


def _origins(module: Module, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Modules of this package, and a name of each, that the definitions of *names* use."""
    for used in {used for statement in module.reached(names) for used in statement.evaluated}:
        origin, original = module.imports.get(used, ("", None))
        if _is_ours(origin):
            # In one file, what is imported has the name that it has where it is defined.
            assert original == used, f"{origin}: import names by their own names, {used!r} is another"
            yield origin, original


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "fairseq"


def _imports(module: Module, statements: Iterable[Statement]) -> Iterator[tuple[str, str | None, str]]:
    """Module, name and name here of the imports that *statements* need, for annotations of other
    packages only."""
    statements = list(statements)
    used = {name for statement in statements for name in statement.uses}
    evaluated = {name for statement in statements for name in statement.evaluated}
    for name, (origin, original) in module.imports.items():
        # A name of this package that only annotations use is not copied and need not be there,
        # since they are never evaluated; other packages are installed anyway.
        if name in (evaluated if _is_ours(origin) else used):
            yield origin, original, name


def _import(origin: str, names: Iterable[str]) -> str:
    one = f"from {origin} import {', '.join(sorted(names))}"
    return (
        one if len(one) <= WIDTH else f"from {origin} import (\n" + "".join(f"    {n},\n" for n in sorted(names)) + ")"
    )


@functools.cache
def _module(name: str, text: str | None = None) -> Module:
    """The module called *name*; *text*: to be read instead of its file."""
    if text is None:
        path = ROOT / name.replace(".", "/")
        text = (path / "__init__.py" if os.path.isdir(path) else path.with_suffix(".py")).read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    imports: dict[str, tuple[str, str | None]] = {}
    statements: list[Statement] = []
    last = 0
    for number, node in enumerate(tree.body):
        before, last = last, node.end_lineno or 0
        if isinstance(node, ast.Import):
            imports |= {alias.asname or alias.name.split(".")[0]: (alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            # The description, a string, of what the statement before it defines.
            if number and statements:
                statements[-1] = replace(statements[-1], lines=(*statements[-1].lines, *lines[before:last]))
        else:
            statements.append(_statement(node, lines[before:last], before, imports))
    return Module(ast.get_docstring(tree, clean=False) or "", imports, tuple(statements))


def _statement(
    node: ast.stmt, lines: list[str], before: int, imports: Mapping[str, tuple[str, str | None]]
) -> Statement:
    """The statement *node*, whose *lines* follow line *before* of the file."""
    dropped: set[int] = set()
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        defines = {node.name}
        for decorator in [*node.decorator_list]:
            # A registry does not exist in the exported folder; one registered class would bring in
            # the whole machinery.
            if any(imports.get(name, ("",))[0] == REGISTRY for name in _names(decorator)):
                dropped |= set(range(decorator.lineno, (decorator.end_lineno or 0) + 1))
                node.decorator_list.remove(decorator)
    else:
        defines = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    # Before the annotations are taken out of the tree below, so that it has their names, too.
    uses = _names(node)
    for inner in ast.walk(node):
        for annotation in ("annotation", "returns"):
            if getattr(inner, annotation, None) is not None:
                setattr(inner, annotation, None if annotation == "returns" else ast.Constant(None))
    remaining = [line for number, line in enumerate(lines, before + 1) if number not in dropped]
    return Statement(frozenset(defines), frozenset(uses), frozenset(_names(node)), tuple(remaining))


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
