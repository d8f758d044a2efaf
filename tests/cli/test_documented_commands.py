"""Every command of README, guides and recipes is understood by the program that it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import runs

from fairseq.config import fields, options
from fairseq.inference.writer import search_of
from fairseq_cli.attention import get_attention_parser
from fairseq_cli.average_checkpoints import get_average_parser
from fairseq_cli.classify import get_classify_parser
from fairseq_cli.common import get_training_parser
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.export_model import get_export_parser
from fairseq_cli.finetune import get_finetune_parser
from fairseq_cli.generate import GenerateConfig, get_generation_parser
from fairseq_cli.harness import get_harness_parser
from fairseq_cli.import_model import get_import_parser
from fairseq_cli.interactive import InteractiveConfig, get_interactive_generation_parser
from fairseq_cli.merge_checkpoint import get_merge_parser
from fairseq_cli.notes import get_notes_parser
from fairseq_cli.plot import get_plot_parser
from fairseq_cli.preprocess import get_preprocessing_parser
from fairseq_cli.recl import get_recl_parser
from fairseq_cli.symbols import get_symbols_parser
from fairseq_cli.tokenize import get_tokenize_parser
from fairseq_cli.validate import get_validation_parser

PAGES = [runs.ROOT / "README.md", *sorted((runs.ROOT / "docs").glob("*.md"))]
PAGES += sorted((runs.ROOT / "examples").glob("*/README.md"))
PARSERS = {
    "fairseq-preprocess": get_preprocessing_parser,
    "fairseq-train": get_training_parser,
    "fairseq-eval-lm": get_eval_lm_parser,
    "fairseq-validate": get_validation_parser,
    "fairseq-generate": get_generation_parser,
    "fairseq-interactive": get_interactive_generation_parser,
    "fairseq-recl": get_recl_parser,
    "fairseq-attention": get_attention_parser,
    "fairseq-harness": get_harness_parser,
    "fairseq-import": get_import_parser,
    "fairseq-export": get_export_parser,
    "fairseq-merge-checkpoint": get_merge_parser,
    "fairseq-average-checkpoints": get_average_parser,
    "fairseq-plot": get_plot_parser,
    "fairseq-finetune": get_finetune_parser,
    "fairseq-classify": get_classify_parser,
    "fairseq-notes": get_notes_parser,
    "fairseq-symbols": get_symbols_parser,
    "fairseq-tokenize": get_tokenize_parser,
    "python train.py": get_training_parser,
    "python preprocess.py": get_preprocessing_parser,
}
GENERATION = {"fairseq-generate": GenerateConfig, "fairseq-interactive": InteractiveConfig}
COMMAND = re.compile(rf"^(?:.*\| )?({'|'.join(map(re.escape, PARSERS))}) (.*)$", re.MULTILINE)


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
        if "--cuda" in words:
            continue  # of the authors of Transformer-XL, beside its translation
        args = options.parse_args_and_arch(PARSERS[program](), words)
        if program in GENERATION:
            # Flags of sampling without --sampling, which parse but end the command.
            search_of(fields.typed(GENERATION[program], args))


def test_the_quick_start_has_three_commands() -> None:
    section = (runs.ROOT / "README.md").read_text(encoding="utf-8").split("## Quick start")[1].split("```")[1]
    assert re.findall(r"^fairseq-\S+", section, flags=re.MULTILINE) == [
        "fairseq-preprocess", "fairseq-train", "fairseq-eval-lm",
    ]  # fmt: skip
    assert sum(len(commands(page)) for page in PAGES) > 40
