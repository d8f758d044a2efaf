"""The layout of the package: rooms, and imports without circles; see
docs/architecture.md."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import runs

import fairseq
from fairseq.config import registry

ROOT = Path(fairseq.__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("fairseq", "fairseq_cli")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@functools.cache
def tree_of(module: str) -> ast.Module:
    """The syntax tree of *module*."""
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


@functools.cache
def imports(module: str) -> frozenset[str]:
    """The modules of the project that *module* names in an import, anywhere in its file."""
    found: set[str] = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return frozenset(found & FILES.keys()) - {module}


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The groups of nodes that reach one another."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        todo, seen = [start], set()
        while todo:
            for node in graph.get(todo.pop(), ()):
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
        reached[start] = seen
    return sorted({tuple(sorted(b for b in reached[a] if a in reached.get(b, ()))) for a in graph if a in reached[a]})


def test_circles_are_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a"]}) == [("b", "c")]


def test_no_file_imports_one_that_imports_it() -> None:
    graph = {module: imports(module) for module in FILES}
    assert sum(map(len, graph.values())) > 1000
    assert circles(graph) == []


def test_the_registry_knows_which_modules_are_no_copies_of_plugins() -> None:
    names = {name.split(".")[1] for name in FILES if name.count(".") and name.startswith("fairseq.")}
    assert set(registry.OWN_MODULES) == names - {"__main__"}


def test_a_command_loads_nothing_for_plugins_but_the_names_that_they_import() -> None:
    code = "import sys, fairseq_cli.train as t; t.cli_main(['--help']) if False else 0\n"
    code = (
        "import contextlib, io, sys; from fairseq_cli.train import cli_main\n"
        "sys.argv = ['fairseq-train', '--help']\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): cli_main()\n"
        "print(*(name for name in sys.modules if name.startswith('fairseq.interop.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=runs.environment())
    assert set(done.stdout.split()) == {"fairseq.interop.fairseq", "fairseq.interop.fairseq.connection"}


def test_files_and_tests_that_the_documentation_names_exist() -> None:
    missing = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        named = re.findall(
            r"`((?:tests|fairseq|fairseq_cli|benchmarks|scripts)/[\w/.-]+\.\w+)`(?: \(([\w, ]+)\))?", text
        )
        for name, tests in named:
            source = (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).is_file() else None
            if source is None or any(test not in source for test in tests.split(", ") if name.startswith("tests/")):
                missing.append((page.name, name, tests))
    assert not missing


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a Markdown page, as GitHub names them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_between_pages_resolve() -> None:
    pages = list(ROOT.glob("*.md"))
    pages += [path for folder in ("docs", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.md")]
    broken = []
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            place = (page.parent / name).resolve() if name else page
            if "://" in target or target.startswith("mailto:"):
                continue
            if not place.exists() or (anchor and anchor not in anchors(place)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert len(pages) > 30 and not broken


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"]({page.name})" not in index] == ["README.md"]
