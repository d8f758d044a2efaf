"""HTML pages of reports: self-contained, in one style; text from outside is escaped."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairseq.system.terminal import page_text


def page(title: str, facts: Mapping[str, object], body: str, style: str = "") -> str:
    """Return one self-contained page of *body*, HTML, and additional CSS; *facts*, texts by name,
    stand at its head."""
    listed = "\n".join(f"<dt>{page_text(name)}</dt><dd>{page_text(str(value))}</dd>" for name, value in facts.items())
    return _PAGE.format(title=page_text(title), style=_STYLE + style, facts=listed, body=body)


def run_facts(about: Mapping[str, Any]) -> dict[str, str]:
    """Return facts for the head of a page from
    what :func:`~fairseq.system.provenance.about_run` returned."""
    facts = {"Command": about["command"], "Commit": about["commit"] or "not known"}
    for name in ("machine", "versions"):
        facts[name.capitalize()] = ", ".join(f"{part} {value}" for part, value in about[name].items())
    return facts


def section(heading: str, *parts: str) -> str:
    """Return a section of *parts*, which are HTML, under a heading, which is text."""
    return "\n".join([f"<section><h2>{page_text(heading)}</h2>", *parts, "</section>"])


def paragraphs(lines: Sequence[str]) -> str:
    """Return one paragraph for each line of text."""
    return "\n".join(f"<p>{page_text(line)}</p>" for line in lines)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text; the first row is its head, and every column but the first is aligned
    to the right."""
    lines = [
        "".join(f"<{kind}>{page_text(cell)}</{kind}>" for cell in row)
        for kind, row in zip(["th", *["td"] * len(rows)], rows, strict=False)
    ]
    return "\n".join(["<div class=table><table>", *(f"<tr>{line}</tr>" for line in lines), "</table></div>"])


def picture(path: Path, caption: str) -> str:
    """Return the PNG file *path*, embedded, with a caption, which is text."""
    content = base64.b64encode(path.read_bytes()).decode()
    image = f'<img src="data:image/png;base64,{content}" alt="{page_text(path.stem)}">'
    return f"<figure>{image}<figcaption>{page_text(caption)}</figcaption></figure>"


def write(path: Path, content: str) -> None:
    """Write a page to *path*; surrogates, which UTF-8 cannot represent, are escaped."""
    path.write_bytes(content.encode("utf-8", "backslashreplace"))


_STYLE = """
:root { --ink: #1c1e21; --paper: #fbfaf7; --card: #ffffff; --line: #d9d6cd; --faint: #5f6368; --mark: #0b6e4f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e4df; --paper: #16181b; --card: #1e2125; --line: #383c42; --faint: #a3a7ad; --mark: #6fcfa8; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 96rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.55 Georgia, "Times New Roman", serif; }
h1, h2, h3, dl, table, figcaption { font-family: system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .85rem; color: var(--faint); }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
.table { overflow-x: auto; }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .7rem; text-align: right; }
th { white-space: nowrap; } td:first-child, th:first-child { text-align: start; }
p { unicode-bidi: plaintext; text-align: start; }
figure { margin: 0 0 1.5rem; } img { max-width: 100%; background: #fff; border: 1px solid var(--line); }
figcaption { font-size: .85rem; color: var(--faint); max-width: 60rem; }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<dl>
{facts}
</dl>
{body}
</body>
</html>
"""
