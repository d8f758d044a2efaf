"""A small corpus of English from installed packages, in WikiText's format.

The text is prose of Python's help topics and of docstrings. A topic or a module is an article, a
docstring with some prose is a section of it, a paragraph is a line. Sources are parsed, never
imported. The output is deterministic for one installation.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from fairseq.errors import UserError
from fairseq.system.files import atomic_folder, prepare_folder
from fairseq.text.tokenizers.moses import Moses

MIN_COUNT = 3  # as in WikiText: rarer words of the training text become <unk>
MIN_SECTION_WORDS = 30
MIN_ARTICLE_WORDS = 40
SPLIT_EVERY = 30  # of this many articles one goes to valid and one to test (of fewer in small corpora)
PACKAGES = ("numpy", "torch")
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "testing", "_bundled", "lib2to3", "turtledemo"}
_FUNCTION_WORDS = (
    "a an and are as at be by can for from if in into is it its not of on or that the this to used was when which will "
    "with"
)
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())


class Section(NamedTuple):
    """A heading and the paragraphs below it."""

    title: str
    paragraphs: list[str]


@dataclass
class Article:
    """An article, which begins with ``= title =``: its own paragraphs and its sections."""

    title: str
    sections: list[Section]

    def words(self) -> int:
        return sum(len(paragraph.split()) for section in self.sections for paragraph in section.paragraphs)


# ---- from markup to paragraphs -----------------------------------------------------------------


def paragraphs(text: str) -> list[str]:
    """The paragraphs of *text*, reStructuredText or a docstring, that are prose, one line each."""
    # `cleandoc` before the blocks: their depth is relative to the docstring's indentation.
    blocks = map("\n".join, _blocks(inspect.cleandoc(text).expandtabs().splitlines()))
    # A hyphen at the end of a line joins the word.
    lines = (plain(re.sub(r"(?<=\w)-\n(?=\w)", "-", block)) for block in blocks)
    return [line for line in lines if is_prose(line)]


def _blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Blocks of equally indented lines, without code: blocks indented below ``::``, a doctest or a
    directive."""
    block: list[str] = []
    indent = 0
    code_above: int | None = None
    for line in chain(lines, [""]):
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        if len(block) == 1 and text and depth > indent and _HANGING.match(block[0]) and not _ITEM.match(text):
            indent = depth
        if block and (not text or depth != indent or _HANGING.match(text)):
            if not any(line.startswith(_CODE) for line in block):
                yield block
            if _opens_code(block):
                code_above = indent
            block = []
        if text and (code_above is None or depth <= code_above):
            code_above, indent = None, depth
            block.append(text)


_ITEM = re.compile(r"^(?:[-*+•]|\d+[.)]|\[\d+\]_?|\.\. \[\w+\]) +(?=\S)")  # - item, 1. item, .. [1] note
_LEAD = re.compile(r"^[`*]{0,2}\w+[`*]{0,2} ?(?:\([^()]*\))?(?::| --?) +(?=\S)")  # input (Tensor): text
_HANGING = re.compile(f"{_ITEM.pattern}|{_LEAD.pattern}")
_CODE = (">>>", "... ", "$ ", "% ", ".. ", "|", "+--", "===", "---", "@")  # beginnings of lines of code and tables


def _opens_code(block: list[str]) -> bool:
    last = block[-1]
    return last.endswith("::") or block[0].startswith((">>>", ".. ")) or last.rstrip(":") in {"Example", "Examples"}


_MARKUP = [
    (_ITEM, ""),
    (re.compile(r":\w+(?::\w+)*:`~?[\w.]*?(\w+)(?: ?<[^>]*>)?`"), r"\1"),  # :func:`~torch.abs` → abs
    (re.compile(r":\w+(?::\w+)*:`([^`<]*?) ?(?:<[^>]*>)?`"), r"\1"),  # :ref:`the notes <notes>` → the notes
    (re.compile(r"`([^`<]+?) ?<[^>]*>`__?"), r"\1"),  # `text <url>`_ → text
    (re.compile(r"``([^`]*)``|`([^`]*)`_{0,2}"), r"\1\2"),
    (re.compile(r"(?<![\w*])\*{1,2}([^*\s](?:[^*]*[^*\s])?)\*{1,2}(?![\w*])"), r"\1"),  # *emphasis*, **strong**
    (re.compile(r"\s*\[[\w, #]+\]_"), ""),  # citations and footnotes
    (_LEAD, ""),
    (re.compile(r"^:(?:param|type|return|returns|raises)\b[^:]*: *"), ""),
    (re.compile(r"\\([*_`\\])"), r"\1"),
    (re.compile(r"\s+"), " "),
    (re.compile(r"(?<=[.!?]) [^.!?]*:$"), ""),  # a final sentence that introduces omitted text
]


def plain(text: str) -> str:
    """*text* without its markup."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    text = text.strip()
    return text[:1].upper() + text[1:]


def is_prose(text: str) -> bool:
    """Return whether *text* looks like English prose:
    it ends like a sentence and consists mostly of words."""
    words = text.split()
    # Headings, signatures and lists of names have no full stop;
    # sentences begin with a capital or a digit.
    if len(words) < 6 or not re.search(r"[.!?][\"')]*$", text) or not re.match(r"[\"'(]?[A-Z\d]", text):
        return False
    if re.search(r"[{}\\$`]|://|->|==|>>>|[=(]\s*$|\w\(\w*=|0x[0-9a-f]{4}|\|", text):
        return False
    # Formulas and tables have few plain words, lists of names few function words.
    letters = sum(bool(re.fullmatch(r"[\"'(]*[A-Za-z][A-Za-z'’-]*[\"').,:;!?]*", word)) for word in words)
    function_words = sum(word.lower() in FUNCTION_WORDS for word in words)
    return letters >= 0.8 * len(words) and function_words >= 0.15 * len(words)


# ---- from sources to articles ------------------------------------------------------------------


def topics() -> list[Article]:
    """Python's own help topics."""
    source = importlib.util.find_spec("pydoc_data.topics")
    if source is None or source.origin is None:
        return []
    for node in ast.walk(ast.parse(Path(source.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Dict):
            texts = ast.literal_eval(node)
            return [topic(name, texts[name]) for name in sorted(texts)]
    return []


def topic(name: str, text: str) -> Article:
    """A topic as an article, with a section for each underlined heading."""
    lines = text.splitlines()
    underlined = [
        i for i in range(len(lines) - 1) if lines[i].strip() and re.fullmatch(r"([*=~^\"-])\1{2,}", lines[i + 1])
    ]
    starts = [-2, *underlined]
    sections = []
    for start, end in zip(starts, [*underlined, len(lines)], strict=True):
        title = plain(lines[start]).strip('"').replace('"', "") if start >= 0 else ""
        sections.append(Section(title, paragraphs("\n".join(lines[start + 2 : end]))))
    # A topic that begins with a heading takes its title from it.
    if len(sections) > 1 and not sections[0].paragraphs:
        name = sections[1].title
        sections[:2] = [Section("", sections[1].paragraphs)]
    return Article(name, sections)


def sources(packages: Iterable[str] = PACKAGES) -> list[tuple[str, Path]]:
    """(dotted name, file) of each module of the standard library and of *packages* that are
    installed, in order."""
    roots = [("", Path(sysconfig.get_path("stdlib")))]
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            roots.append((package, Path(spec.origin).parent))
    articles = []
    for package, root in roots:
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            if not SKIPPED_FOLDERS.intersection(parts) and not parts[0].startswith(("config-", "test")):
                dotted = ".".join(part for part in (package, *parts) if part and part != "__init__")
                articles.append((dotted, path))
    # rglob gives files in the order of the filesystem, which differs between machines.
    return sorted(articles)


def module(source: tuple[str, Path]) -> Article:
    """A module as an article, with a section for each docstring,
    including those added to compiled functions."""
    name, path = source
    with warnings.catch_warnings():
        # Sources with invalid escapes, as in old docstrings, warn while they are parsed.
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            return Article(name, [])
    return Article(name, [Section(title, paragraphs(text)) for title, text in docstrings(tree)])


def docstrings(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(name, docstring) of a module, in the order
    of the source; the module's own has an empty name."""
    for node in chain([tree], _in_order(tree)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            # Cleaned with all other texts, in `paragraphs`.
            text = ast.get_docstring(node, clean=False)
            if text:
                yield getattr(node, "name", ""), text
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called.startswith(("add_docstr", "_add_docstr", "add_newdoc")):
                yield from _added(node)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    # ast.walk goes level by level, and would part the methods of a class from it.
    for child in ast.iter_child_nodes(node):
        yield child
        yield from _in_order(child)


def _added(call: ast.Call) -> Iterator[tuple[str, str]]:
    """The docstring in ``add_docstr(torch.abs, "…")`` or ``add_newdoc("numpy", "abs", "…")``."""
    strings = [
        node.value
        for argument in call.args
        for node in ast.walk(argument)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    if strings:
        name = ast.unparse(call.args[0]) if len(strings) == 1 else strings[-2]
        if re.fullmatch(r"[\w.]+", name):
            yield name.rpartition(".")[2], strings[-1]


def unique(articles: Iterable[Article]) -> Iterator[Article]:
    """*articles* without repeated paragraphs,
    and without the sections and articles that become too short."""
    seen: set[str] = set()
    for article in articles:
        sections: list[Section] = []
        for section in article.sections:
            new = [p for p in dict.fromkeys(section.paragraphs) if p not in seen]
            seen.update(new)
            if sum(len(p.split()) for p in new) >= MIN_SECTION_WORDS:
                sections.append(Section(section.title, new))
        article_left = Article(article.title, sections)
        if article_left.words() >= MIN_ARTICLE_WORDS:
            yield article_left


# ---- from articles to files --------------------------------------------------------------------


def tokenize(text: str, moses: Moses) -> list[str]:
    """The words of *text*, with ``@-@`` for hyphens inside words,
    as in WikiText; identifiers are not split."""
    pieces = re.split(r"(?<![\w.])([\w.]*_[\w.]*\w|__\w+__)", text)
    tokens: list[str] = []
    for number, piece in enumerate(pieces):
        tokens += [piece] if number % 2 else moses.split(piece)
    return tokens


def heading(name: str) -> str:
    """A name as words: ``torch.nn.modules`` → torch nn modules, ``_WeightNorm`` → Weight Norm."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", re.sub(r"[._]+", " ", name)).strip()


def layout(article: Article, moses: Moses) -> list[list[str]]:
    """The article's lines in WikiText's format,
    each a list of tokens; headings are between empty lines."""
    lines: list[list[str]] = [[], ["=", *tokenize(heading(article.title), moses), "="], []]
    for section in article.sections:
        if section.title:
            lines += [*([[]] if lines[-1] else []), ["=", "=", *tokenize(heading(section.title), moses), "=", "="], []]
        lines += [tokenize(paragraph, moses) for paragraph in section.paragraphs]
    return lines


def split(articles: list[Article]) -> dict[str, list[Article]]:
    """Split articles: of every thirty the last is for test, the one before for validation, the
    others for training."""
    every = min(SPLIT_EVERY, len(articles) // 2)
    if every < 3:
        raise UserError("`max_words`: too few articles to split; raise it")
    parts: dict[str, list[Article]] = {"train": [], "valid": [], "test": []}
    for number, article in enumerate(articles):
        parts[{every - 2: "valid", every - 1: "test"}.get(number % every, "train")].append(article)
    return parts


def collect(max_words: int | None = None, packages: Iterable[str] = PACKAGES) -> list[Article]:
    """All articles of this installation, topics first;
    stop after the one that reaches *max_words* words."""
    files = sources(packages)
    with ProcessPoolExecutor() as pool:
        # A pool would read all sources before the first ones reach the limit.
        modules = map(module, files) if max_words else pool.map(module, files, chunksize=16)
        articles = []
        for article in unique(chain(topics(), modules)):
            articles.append(article)
            if max_words and sum(article.words() for article in articles) >= max_words:
                break
    return articles


def write(parts: dict[str, list[Article]], destdir: Path, rare_words: bool = False) -> None:
    """Write the splits, with ``<unk>`` for rare words unless *rare_words* stay as they are, and
    print their sizes.

    The folder *destdir* gets all three files or none.

    Raises:
        UserError: another text there has one of the names.
    """
    moses = Moses()
    lines = {
        name: [line for article in articles for line in layout(article, moses)] for name, articles in parts.items()
    }
    if rare_words:
        known = set(chain.from_iterable(chain.from_iterable(lines.values())))
    else:
        # The training text alone, as in WikiText:
        # the other splits must not decide on the vocabulary.
        counts = Counter(chain.from_iterable(lines["train"]))
        known = {word for word, count in counts.items() if count >= MIN_COUNT}
    report = []
    with atomic_folder(destdir, flag="DIR") as folder:
        for name, articles in parts.items():
            path = destdir / f"{name}.txt"
            texts = (" ".join(word if word in known else "<unk>" for word in line) for line in lines[name])
            # WikiText's lines begin and end with a blank, empty ones are a blank.
            content = "".join(f" {text} \n" if text else " \n" for text in texts).encode()
            if path.exists() and path.read_bytes() != content:
                raise UserError(f"DIR {destdir}: has another {path.name}; give a new folder")
            (folder / path.name).write_bytes(content)
            tokens = sum(map(len, lines[name])) + len(lines[name])
            unknown = sum(word not in known for line in lines[name] for word in line)
            report.append(f"{path}: {len(articles):,} articles, {tokens:,} tokens, {unknown / tokens:.1%} <unk>")
    print(*report, sep="\n")
    which = "words" if rare_words else f"words that occur {MIN_COUNT} times or more in the training text"
    print(f"vocabulary: {len(known):,} {which}")


def make_corpus(destdir: Path, max_words: int | None, packages: Sequence[str], rare_words: bool) -> None:
    """Write the corpus to *destdir*; see the flags of ``fairseq-corpus pydoc``."""
    for name in packages:
        if not name.isidentifier() or importlib.util.find_spec(name) is None:
            raise UserError(f"`packages` {name}: is not installed; install it, or leave it out")
    prepare_folder("DIR", destdir)
    write(split(collect(max_words, packages)), destdir, rare_words)
