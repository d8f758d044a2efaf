"""Every command of README, guides and recipes is understood by the program that it names."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import runs

from fairseq.config import fields, options
from fairseq.inference.writer import search_of
from fairseq_cli.generate import GenerateConfig
from fairseq_cli.interactive import InteractiveConfig
from scripts.reference_pages import COMMANDS

PAGES = [runs.ROOT / "README.md", *sorted((runs.ROOT / "docs").glob("*.md"))]
PAGES += sorted((runs.ROOT / "examples").glob("*/README.md"))
PROGRAMS = {**COMMANDS, "python train.py": COMMANDS["fairseq-train"]}
PROGRAMS["python preprocess.py"] = COMMANDS["fairseq-preprocess"]
GENERATION = {"fairseq-generate": GenerateConfig, "fairseq-interactive": InteractiveConfig}
COMMAND = re.compile(rf"^(?:.*\| )?({'|'.join(map(re.escape, sorted(PROGRAMS, reverse=True)))}) (.*)$", re.MULTILINE)


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """The program and the words of each command in the code blocks of *page*; ``…`` stands for more
    of them."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = "".join(blocks).replace("\\\n", " ")
    found = [(program, shlex.split(rest, comments=True)) for program, rest in COMMAND.findall(text)]
    return [(program, [word for word in words if word != "…"]) for program, words in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(runs.ROOT)))
def test_the_commands_of_a_page_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.ROOT)
    for program, words in commands(page):
        if "--user-dir" in words and not Path(words[words.index("--user-dir") + 1]).exists():
            continue  # a plug-in that the page shows
        if "--config" in words and not Path(words[words.index("--config") + 1]).exists():
            at = words.index("--config")
            del words[at : at + 2]  # of a run that the page is about
        if words[0] == "lm-eval":
            continue  # the harness's own command line
        if "--cuda" in words:
            continue  # of the authors of Transformer-XL, beside its translation
        module, function = PROGRAMS[program]
        args = options.parse_args_and_arch(getattr(import_module(f"fairseq_cli.{module}"), function)(), words)
        if program in GENERATION:
            # Flags of sampling without --sampling, which parse but end the command.
            search_of(fields.typed(GENERATION[program], args))


def test_the_quick_start_has_three_commands() -> None:
    section = (runs.ROOT / "README.md").read_text(encoding="utf-8").split("## Quick start")[1].split("```")[1]
    assert re.findall(r"^fairseq-\S+", section, flags=re.MULTILINE) == [
        "fairseq-preprocess", "fairseq-train", "fairseq-eval-lm",
    ]  # fmt: skip
    assert sum(len(commands(page)) for page in PAGES) > 40
