"""The package installs what it says, starts quickly and states its version in one place."""

from __future__ import annotations

import importlib
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import runs
import warm

import fairseq

ROOT = Path(__file__).parents[2]
ROOT_SCRIPTS = ("preprocess", "train", "eval_lm", "validate", "generate", "interactive")  # fairseq's
SHARED = ("__init__", "common")
COMMANDS = sorted(path.stem for path in (ROOT / "fairseq_cli").glob("*.py") if path.stem not in SHARED)
HEAVY = (
    "torch",
    "matplotlib",
    "tensorboard",
    "wandb",
    "sacremoses",
    "subword_nmt",
    "transformers",
    "safetensors",
    "scipy",
    "sklearn",
)


def project_table(name: str) -> str:
    """The lines of one table of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf"^\[{re.escape(name)}\]\n(.*?)(?=^\[|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


def test_commands_import_nothing_heavy_before_a_command_line_is_parsed() -> None:
    modules = ["fairseq", *(f"fairseq_cli.{command}" for command in COMMANDS)]
    code = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    print(*(f"{{module}} imports {{name}}" for name in {HEAVY} if name in sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_a_run_is_trained_saved_and_resumed_without_torchs_compiler(tmp_path: Path) -> None:
    code = """
import sys
from fairseq_cli import train
_, folder, *flags = sys.argv
for optimizer in ("nag", "sgd", "adam", "adafactor", "lamb", "muon"):
    for updates in ("1", "2")[: 2 if optimizer in ("nag", "adam") else 1]:
        more = ["--optimizer", optimizer, "--max-update", updates, "--save-dir", f"{folder}/{optimizer}"]
        sys.argv = ["train.py", *flags, *more]
        train.cli_main()
print("torch._dynamo" in sys.modules)
"""
    words = runs.words(
        tmp_path, runs.DATA, runs.BASELINE, "--log-format none --disable-validation --no-epoch-checkpoints"
    )
    result = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("--max-update 2 is reached after 2 updates") == 2, result.stderr
    assert result.stdout == "False\n"


@pytest.mark.parametrize("command", ROOT_SCRIPTS)
def test_the_script_at_the_root_shows_its_help(command: str) -> None:
    result = warm.command(f"{command}.py", "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage:")


def test_the_console_scripts_are_the_commands() -> None:
    scripts = dict(re.findall(r'^([\w-]+) = "(.+)"$', project_table("project.scripts"), flags=re.MULTILINE))
    names = {f"fairseq-{name.removesuffix('_model').replace('_', '-')}" for name in COMMANDS}
    assert {name for name, target in scripts.items() if target != "fairseq_cli:former"} == names
    listed = subprocess.run([sys.executable, "-m", "fairseq"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split()[0] for line in listed.stdout.splitlines()[2:]} == names
    assert all(len(line) <= 80 for line in listed.stdout.splitlines())
    for target in scripts.values():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_urls_are_those_of_the_papers_in_readme_and_citation() -> None:
    urls = re.findall(r'^".+" = "(.+)"$', project_table("project.urls"), flags=re.MULTILINE)
    readme, citation = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CITATION.cff"))
    assert len(urls) == 3
    assert all(f"({url})" in readme and f"url: {url}\n" in citation for url in urls)


def test_the_version_is_that_of_the_changelog_and_the_citation() -> None:
    assert 'version = { attr = "fairseq.system.version.__version__" }' in project_table("tool.setuptools.dynamic")
    assert not re.search(r"^version = \"", project_table("project"), flags=re.MULTILINE)
    assert "version" not in (ROOT / "setup.py").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert releases[0] == fairseq.__version__ and f"\nversion: {fairseq.__version__}\n" in citation


def test_the_wheel_holds_every_file_of_the_packages_and_the_commands(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    for name in ("fairseq", "fairseq_cli"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"fairseq_short-{fairseq.__version__}-py3-none-any.whl", "for every system and processor"
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    files = {path.relative_to(source) for top in ("fairseq", "fairseq_cli") for path in (source / top).rglob("*.*")}
    assert {path.as_posix() for path in files} == {name for name in held if ".dist-info/" not in name}


def test_a_tag_of_another_version_makes_no_release_and_notes_are_its_section_of_the_changelog() -> None:
    def notes(tag: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", ROOT / "scripts" / "release_notes.sh", tag], capture_output=True, text=True)

    section = notes(f"v{fairseq.__version__}").stdout
    assert section.strip() and not re.search("^## ", section, flags=re.MULTILINE)
    assert section in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert notes("v0.0.1").returncode == 1


def test_ci_can_be_executed() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR
