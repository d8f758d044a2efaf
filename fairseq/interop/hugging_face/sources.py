"""Source files of an export: the definitions of this package that its code reaches, in one folder of flat files.

transformers copies the files that a module imports with ``from .name import …`` and finds them beside it. A module
``fairseq.modules.attention`` becomes ``modules_attention.py``, without the definitions that the export does not reach.
Annotations reach nothing, since they are never evaluated, and what registers a part is left out.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fairseq.system.lookup import is_folder
from fairseq.system.version import __version__

ROOT = Path(__file__).parents[3]
REGISTRY = "fairseq.config.registry"
ADAPTERS = "fairseq.interop.hugging_face.exported."  # their files keep their names
WIDTH = 120
PARTS = "Parts that the exported model uses."

Parts = Mapping[str, Mapping[str, Sequence[type]]]
"""For modules of the folder ``exported``: the names in their table ``PARTS``, and one class or several of each."""


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
        """Return the statements that define *names*, and those that they use, in the order of the file."""
        todo, names_reached = list(names), set()
        while todo:
            name = todo.pop()
            for number, statement in enumerate(self.statements):
                if name in statement.defines and number not in names_reached:
                    names_reached.add(number)
                    todo += statement.evaluated
        return [self.statements[number] for number in sorted(names_reached)]


def sources(adapters: Iterable[str], parts: Parts) -> dict[str, str]:
    """Return file names and texts of the modules *adapters* of the folder ``exported``, and of all that they use.

    *parts* are modules of that folder whose table ``PARTS`` is to have these entries only, of one class or several.
    """
    texts = {f"{ADAPTERS}{name}": _table(entries) for name, entries in parts.items()}
    adapters = list(adapters)
    files = dict(_sources(adapters, lambda name: _module(name, texts.get(name))))
    # transformers keeps one copy of the code by the name of the folder and the hash of the adapter alone: two models
    # in folders of one name, such as revisions, would share the first one's parts.
    digest = hashlib.sha256("".join(files.values()).encode()).hexdigest()[:16]
    return {name: text + f"# {digest}\n" * (Path(name).stem in adapters) for name, text in files.items()}


def _table(entries: Mapping[str, Sequence[type]]) -> str:
    """The text of a module that holds a table of parts."""
    kinds = sorted({(kind.__module__, kind.__name__) for entry in entries.values() for kind in entry})
    names = {name: ", ".join(kind.__name__ for kind in entry) for name, entry in entries.items()}
    rows = [f'    "{name}": {f"({text})" if ", " in text else text},' for name, text in names.items()]
    imports = [f"from {module} import {name}" for module, name in kinds]
    return "\n".join([f'"""{PARTS}"""', *imports, "", "PARTS = {", *rows, "}", ""])


def _sources(adapters: Iterable[str], load: Callable[[str], Module]) -> Iterator[tuple[str, str]]:
    needed: dict[str, set[str]] = {}
    todo = [
        (name, {d for s in _module(name).statements for d in s.defines}) for name in map(ADAPTERS.__add__, adapters)
    ]
    while todo:
        name, needs = todo.pop()
        # A module can be reached several times with other names; it is read again only for new ones, which also ends
        # cycles.
        if needs <= needed.setdefault(name, set()):
            continue
        needed[name] |= needs
        module = load(name)
        for used in {used for statement in module.reached(needed[name]) for used in statement.evaluated}:
            origin, original = module.imports.get(used, ("", None))
            if _is_ours(origin) and original is not None:
                todo.append((origin, {original}))
    for name, needs in sorted(needed.items()):
        yield f"{_flat(name)}.py", _text(name, load(name), needs)


def _flat(module: str) -> str:
    return module.removeprefix(ADAPTERS).removeprefix("fairseq.").replace(".", "_")


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "fairseq"


def _text(name: str, module: Module, needs: Iterable[str]) -> str:
    statements = module.reached(needs)
    origin = f"# From {name} of fairseq-short {__version__}. MIT License, Copyright (c) the fairseq-short authors."
    head = [origin, f'"""{module.docstring}"""', ""]
    imports = "\n".join(_imports(module, statements))
    body = "\n".join(line for statement in statements for line in statement.lines)
    return "\n".join([*head, "from __future__ import annotations", "", imports, body.rstrip()]).rstrip() + "\n"


def _imports(module: Module, statements: Iterable[Statement]) -> Iterator[str]:
    """The imports that *statements* need; for annotations, imports of other packages only."""
    statements = list(statements)
    used = {name for statement in statements for name in statement.uses}
    evaluated = {name for statement in statements for name in statement.evaluated}
    plain: list[str] = []
    imports: dict[str, list[str]] = {}
    for name, (origin, original) in module.imports.items():
        # A name of this package that only annotations use is not copied and cannot be imported there, nor need it be,
        # since they are never evaluated; other packages are installed anyway.
        if name not in (evaluated if _is_ours(origin) else used):
            continue
        if original is None:
            plain.append(f"import {origin}" if origin.split(".")[0] == name else f"import {origin} as {name}")
        else:
            imports.setdefault(origin, []).append(original if original == name else f"{original} as {name}")
    yield from sorted(plain)
    for origin in sorted(imports, key=lambda origin: (_is_ours(origin), origin)):
        names = sorted(imports[origin])
        line = f"from {'.' + _flat(origin) if _is_ours(origin) else origin} import "
        one = line + ", ".join(names)
        yield one if len(one) <= WIDTH else line + "(\n" + "".join(f"    {each},\n" for each in names) + ")"


@functools.cache
def _module(name: str, text: str | None = None) -> Module:
    """The module called *name*; *text*: to be read instead of its file."""
    if text is None:
        path = ROOT / name.replace(".", "/")
        text = (path / "__init__.py" if is_folder(path) else path.with_suffix(".py")).read_text(encoding="utf-8")
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
            # A registry does not exist in the exported folder; one registered class would bring in the whole machinery.
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
