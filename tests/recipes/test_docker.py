"""The lines of the Dockerfile: files, order of layers, user, requirements. The image is not
built."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()


def place(pattern: str) -> int:
    """The number of the only line that *pattern* is found in."""
    (number,) = [number for number, line in enumerate(LINES) if re.search(pattern, line)]
    return number


def test_every_copied_file_is_in_the_build_context() -> None:
    copied = [line.split()[1:-1] for line in LINES if line.startswith("COPY ") and "--from" not in line]
    for name in (name for names in copied for name in names):
        assert (ROOT / name).exists()
        assert not any(fnmatch.fnmatch(name, pattern.removeprefix("**/")) for pattern in IGNORED)
    scripts = {path.name for path in ROOT.glob("*.py")} - {"setup.py", "hubconf.py"}
    assert scripts <= {name for names in copied for name in names}, "recipes call them"


def test_layers_go_from_the_rarely_changed_to_the_often_changed() -> None:
    stage = place("^FROM .*$(?<!AS wheel)")
    steps = [stage, place("^COPY constraints.txt pyproject.toml"), place("pip install .* torch ")]
    steps += [place("requirements.txt &&"), place("^COPY --from=wheel"), place(r"--no-deps /opt/dist/\*\.whl")]
    assert steps == sorted(steps)
    assert place(r"^COPY \. \.$") < stage, "the source is copied into the stage that builds the wheel only"


def test_torch_is_the_cpu_wheel_unless_the_base_image_has_one() -> None:
    assert "ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu" in LINES
    install = LINES[place("pip install .* torch ")]
    assert install.startswith('RUN python -c "import torch"') and '--index-url "$TORCH_INDEX_URL"' in install
    assert all("-c constraints.txt" in line or "--no-deps" in line for line in LINES if "pip install" in line)


def test_the_image_runs_as_a_user_who_may_write_to_the_working_folder() -> None:
    assert place("^USER fairseq$") > max(
        number for number, line in enumerate(LINES) if line.startswith(("RUN", "COPY"))
    )
    assert "chown fairseq /work" in LINES[place("useradd")] and LINES[place("^USER") + 1] == "WORKDIR /work"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib; the image has Python 3.12")
def test_the_requirements_are_those_of_the_package() -> None:
    found = re.search(r'RUN python -c "(import sys, tomllib.*?)" "\$EXTRAS" >requirements.txt', TEXT)
    extras = re.search(r"^ARG EXTRAS=(.*)$", TEXT, flags=re.MULTILINE)
    assert found is not None and extras is not None
    command = [sys.executable, "-c", found[1], extras[1]]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {"torch>=2.7", "numpy", "PyYAML", "matplotlib", "safetensors", "scikit-learn", "sentencepiece"} <= set(
        listed
    )
    assert "pytest" not in listed and "wandb" not in listed


def test_documented_build_arguments_exist() -> None:
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([A-Z_]+)` \|", page, flags=re.MULTILINE))
    named |= set(re.findall(r"--build-arg ([A-Z_]+)=", page))
    assert named == set(re.findall(r"^ARG ([A-Z_]+)=", TEXT, flags=re.MULTILINE))
