"""Passages of a corpus with generated continuations
beside the original text, as text, JSON and HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fairseq.errors import UserError
from fairseq.inference.text import Detokenizer
from fairseq.system import pages
from fairseq.system.files import atomic_folder
from fairseq.system.json_files import write_json
from fairseq.system.provenance import about_run
from fairseq.system.terminal import page_text

PARTS = ("context", "continuation", "reference")


@dataclass(frozen=True)
class Part:
    """A token sequence: ids, symbols separated by spaces
    (``</s>`` ends a line), and running text."""

    tokens: list[int]
    symbols: str
    text: str


@dataclass(frozen=True)
class Passage:
    """A context, one generated continuation and the original one (paper, appendix E)."""

    number: int  # of the passage, from 1
    start: int  # number of the context's first token in the corpus, from 0
    sample: int  # number of the continuation of this context, from 1
    context: Part
    continuation: Part
    reference: Part


def draw_starts(tokens: int, context: int, reference: int, count: int, seed: int) -> list[int]:
    """Start positions of contexts in a corpus of *tokens* tokens, uniformly drawn; number i depends
    on seed and i only.

    Args:
        context: tokens of a context.
        reference: tokens that should follow a context; fewer follow if the corpus is too short.

    Raises:
        UserError: the context is as long as the corpus or longer.
    """
    if context >= tokens:
        raise UserError(
            f"`context_tokens` {context}: the split has {tokens} tokens; give {tokens - 1} or less"
            if tokens > 1
            else "`gen_subset`: the split has a single token; choose another"
        )
    candidates = max(1, tokens - context - reference + 1)
    # A generator a passage: more passages, or another number
    # of processes, leave the first ones as they are.
    return [int(np.random.default_rng([seed, number]).integers(candidates)) for number in range(count)]


def parts_of(detokenizer: Detokenizer, context: Sequence[int], *following: Sequence[int]) -> list[Part]:
    """The parts for *context* and for each of *following*, decoded as its continuation."""
    parts = []
    for tokens in (None, *following):
        stream = detokenizer.stream()
        text = stream.add(context) + stream.pause()
        if tokens is not None:
            text = stream.add(tokens) + stream.end()
        ids = [int(token) for token in (context if tokens is None else tokens)]
        parts.append(Part(ids, " ".join(detokenizer.dictionary[token] for token in ids), text))
    return parts


def as_text(passage: Passage, count: int, split: str) -> str:
    """One of *count* passages as plain text."""
    lines = [f"==== {title(passage, count, split)} ===="]
    for name in PARTS:
        lines += ["", f"---- {name} ----", getattr(passage, name).text.strip()]
    return "\n".join([*lines, ""])


def title(passage: Passage, count: int, split: str) -> str:
    """One-line description of a passage."""
    last = passage.start + len(passage.context.tokens) - 1
    return f"{passage.number} of {count}: tokens {passage.start}–{last} of {split}, continuation {passage.sample}"


def write_results(folder: Path, passages: Sequence[Passage], about: Mapping[str, object], part: str = "") -> None:
    """Write ``generate.json`` and ``generate.html`` to *folder* atomically.

    Args:
        part: suffix of the file names, before the extension, if these are passages of a part.
        about: settings of the run: ``checkpoints``, ``data``, ``split``, ``settings`` and more.

    Raises:
        UserError: a file cannot be written.
    """
    about = {**about, **about_run()}
    page, data = f"generate{part}.html", f"generate{part}.json"
    with atomic_folder(folder, (page, data), "`results_path`") as temporary:
        pages.write(temporary / page, as_page(passages, about))
        write_json(temporary / data, {**about, "samples": [asdict(passage) for passage in passages]})


def as_page(passages: Sequence[Passage], about: Mapping[str, Any]) -> str:
    """One self-contained HTML page; wide screens show the three parts side by side."""
    facts = {
        "Checkpoint": ", ".join(about["checkpoints"]),
        "Data": f"{about['data']}, {about['split']}",
        "Settings": ", ".join(f"{name} {value}" for name, value in about["settings"].items()),
        **pages.run_facts(about),
    }
    sections = "\n".join(_section(passage, len(passages), str(about["split"])) for passage in passages)
    return pages.page("Generated text", facts, sections, _STYLE)


def _section(passage: Passage, count: int, split: str) -> str:
    columns = "\n".join(
        f'<article class="{name}"><h3>{name.capitalize()} <small>{len(part.tokens)} tokens</small></h3>'
        f"<p>{page_text(part.text.strip())}</p></article>"
        for name in PARTS
        for part in [getattr(passage, name)]
    )
    return pages.section(title(passage, count, split), "<div class=parts>", columns, "</div>")


_STYLE = """
h3 { font-size: .8rem; margin: 0 0 .5rem; letter-spacing: .06em; text-transform: uppercase; color: var(--faint); }
h3 small { text-transform: none; letter-spacing: 0; font-weight: normal; }
.parts { display: grid; gap: 1rem; }
article { min-width: 0; padding: 1rem; background: var(--card); border: 1px solid var(--line); border-radius: .4rem; }
article p { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.continuation { border-top: .2rem solid var(--mark); } .continuation h3 { color: var(--mark); }
@media (min-width: 62rem) { .parts { grid-template-columns: repeat(3, 1fr); align-items: start; } }
"""
