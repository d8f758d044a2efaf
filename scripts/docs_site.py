"""Build the documentation as a website: the Markdown files of the repository, and a reference from
docstrings.

    python -m scripts.docs_site build/site

Files keep their relative places, so links between them work as they do in the repository. Broken
links are errors.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
ASSETS = Path(__file__).with_name("docs_assets")  # style, and what makes the search work in an opened file
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    "docs/**/*.md",
    "docs/img/*",
    "examples/**/*.md",
    "benchmarks/results/*.md",
)
REFERENCE = {
    "Models and tasks from Python": ("fairseq.hub", "fairseq.evaluation.classifier"),
    "Commands": (
        "fairseq.config.settings",
        "fairseq.config.command_settings",
        "fairseq_cli.train",
        "fairseq_cli.eval_lm",
        "fairseq_cli.validate",
        "fairseq_cli.generate",
        "fairseq_cli.interactive",
        "fairseq_cli.recl",
        "fairseq_cli.attention",
        "fairseq_cli.notes",
        "fairseq_cli.finetune",
        "fairseq_cli.classify",
        "fairseq_cli.harness",
        "fairseq_cli.plot",
        "fairseq_cli.preprocess",
        "fairseq_cli.tokenize",
    ),
    "Extension points": (
        "fairseq.tasks.fairseq_task",
        "fairseq.tasks.carried",
        "fairseq.models.base",
        "fairseq.criterions.fairseq_criterion",
        "fairseq.optim.fairseq_optimizer",
        "fairseq.optim.lr_scheduler.fairseq_lr_scheduler",
        "fairseq.data.dataset",
        "fairseq.logging.figures",
        "fairseq.text.tokenizers.base",
    ),
    "Modules": (
        "fairseq.modules.attention",
        "fairseq.notes.dictionary",
        "fairseq.modules.relative_attention",
        "fairseq.modules.transformer_layer",
        "fairseq.modules.adaptive_softmax",
    ),
    "Training": (
        "fairseq.training.state",
        "fairseq.training.update",
        "fairseq.training.hooks",
        "fairseq.checkpoint.store",
    ),
}
SECTIONS = {
    "Start": {
        "README.md": "Overview",
        "docs/installation.md": "Installation",
        "docs/getting-started.md": "Getting started",
        "docs/glossary.md": "Glossary",
    },
    "Guides": {
        "docs/data.md": "Data and tokenizers",
        "docs/models.md": "Choosing a model",
        "docs/training.md": "Training",
        "docs/checkpoints.md": "Checkpoints and resuming",
        "docs/evaluation.md": "Evaluation",
        "docs/generation.md": "Generation",
        "docs/fine-tuning.md": "Fine-tuning a classifier",
        "docs/continued-training.md": "Continued training",
        "docs/huggingface.md": "Hugging Face, evaluation harness",
        "docs/babylm.md": "The BabyLM challenge",
        "docs/distributed.md": "Distributed training",
        "docs/troubleshooting.md": "Troubleshooting",
    },
    "Methods": {
        "docs/shortformer.md": "Shortformer",
        "docs/transformer-xl.md": "Transformer-XL",
        "docs/notes.md": "Taking notes on the fly",
        "docs/fast-recipe.md": "The fast recipe",
        "docs/analysis.md": "Analysis",
        "docs/results.md": "Results",
    },
    "Migration and reference": {
        "docs/from-fairseq.md": "Coming from fairseq",
        "docs/from-transformer-xl.md": "Coming from Transformer-XL",
        "docs/compatibility.md": "Compatibility with fairseq",
        "docs/commands.md": "Commands and flags",
        "docs/log.md": "The log of training",
        "docs/plugins.md": "Writing a plug-in",
    },
    "Development": {
        "CONTRIBUTING.md": "Contributing",
        "docs/architecture.md": "Architecture",
        "docs/testing.md": "How it is tested",
        "CHANGELOG.md": "Changelog",
    },
}
TITLES = {path: title for section in SECTIONS.values() for path, title in section.items()}


def stage(folder: Path) -> None:
    """Copy the pages into *folder*, and add one page for each section of the reference."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    shutil.copytree(ASSETS, folder / "assets")
    reference = folder / "reference"
    reference.mkdir()
    for section, modules in REFERENCE.items():
        text = "".join(f"## {name}\n\n::: {name}\n\n" for name in modules)
        (reference / _file(section)).write_text(f"# {section}\n\n{text}", encoding="utf-8")


def settings(pages: Path, site: Path) -> dict[str, object]:
    """mkdocs' settings."""
    guides = [{name: [{title: path} for path, title in section.items()]} for name, section in SECTIONS.items()]
    unnamed = {str(path.relative_to(pages)) for path in pages.glob("docs/*.md")} - TITLES.keys()
    if unnamed:
        raise SystemExit(f"{', '.join(sorted(unnamed))}: no title in scripts/docs_site.py; add one")
    recipes = [str(path.relative_to(pages)) for path in sorted(pages.glob("examples/**/*.md"))]
    handlers = {"python": {"paths": [str(ROOT)], "options": OPTIONS}}
    return {
        "site_name": "fairseq-short",
        "docs_dir": str(pages),
        "site_dir": str(site),
        "use_directory_urls": False,
        "theme": {"name": "material", "font": False, "features": ["content.code.copy"]},
        "extra_css": ["assets/site.css"],
        "extra": {"generator": False, "polyfills": ["assets/iframe-worker.js"]},
        "markdown_extensions": ["admonition", "tables", "fenced_code", "pymdownx.superfences"],
        "plugins": ["search", "offline", {"mkdocstrings": {"handlers": handlers}}],
        "nav": [*guides, {"Recipes": recipes}, {"Reference": [{s: f"reference/{_file(s)}"} for s in REFERENCE]}],
        "validation": {"links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "warn"}},
    }


OPTIONS = {
    "docstring_style": "google",
    "show_root_heading": False,
    "show_source": False,
    "heading_level": 3,
    "members_order": "source",
    "filters": ["!^_"],
}


def main(arguments: Iterable[str] | None = None) -> int:
    """Build the site; returns mkdocs' exit status."""
    parser = argparse.ArgumentParser(description="Build the documentation as a website.")
    parser.add_argument("site", type=Path, metavar="DIR", help="output folder")
    site = parser.parse_args(None if arguments is None else list(arguments)).site.resolve()
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "pages"
        pages.mkdir()
        stage(pages)
        config = Path(folder) / "mkdocs.yml"
        config.write_text(yaml.safe_dump(settings(pages, site), sort_keys=False, allow_unicode=True), encoding="utf-8")
        print(f"Building {len(list(pages.rglob('*.md')))} pages …", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(config)]
        return subprocess.run(command, check=False).returncode


def _file(section: str) -> str:
    return f"{section.lower().replace(' ', '-')}.md"


if __name__ == "__main__":
    sys.exit(main())
