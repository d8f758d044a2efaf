"""The recipe of ten million words, at a small size: a table within a budget, resumed where it was
cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import runs
import yaml

RECIPE = runs.ROOT / "examples" / "tenmillion" / "tenmillion.sh"
TABLES = RECIPE.with_name("tables.py")
PAIRS = runs.ROOT / "examples" / "babylm" / "pairs.jsonl"


def recipe(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SMALL": "1", "OUT": str(folder), **variables}
    return subprocess.run(["bash", RECIPE], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.RandomState(1)
    words = ["".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), 5)) for _ in range(900)]
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("\n".join(" ".join(rng.choice(words, 12)) for _ in range(1200)) + "\n")
    return path


def test_a_killed_run_is_resumed_and_ends_in_a_table_and_an_export(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = {**os.environ, "SMALL": "1", "OUT": str(out), "WORDS": "6K"}
    environment |= {
        "TRAIN": str(text),
        "KNOWN_WORDS": str(PAIRS),
        "UPDATES": "200",
        "EXTRA": "--cpu --save-interval-updates 20",
    }
    killed = subprocess.Popen(["bash", RECIPE], env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    while not list(out.glob("model/checkpoint_*_20.pt")) and killed.poll() is None:
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    whole = recipe(out, WORDS="6K", UPDATES="200", EXTRA="--cpu --save-interval-updates 20", KNOWN_WORDS=str(PAIRS))
    assert whole.returncode == 0 and "resum" in whole.stderr, whole.stderr
    table = (out / "table.md").read_text()
    results = json.loads((out / "results" / "checkpoint_best" / "pairs" / "results.json").read_text())
    cells = [f"{100 * part['averages']['paradigms']['acc']:.1f} ± " for part in (results, results["known_words"])]
    assert f"| checkpoint_best | {cells[0]}" in table and f" | {cells[1]}" in table and "| known words (%) |" in table
    assert (out / "exported" / "config.json").exists()


def test_a_dry_run_at_a_small_size_needs_no_texts(tmp_path: Path) -> None:
    result = recipe(tmp_path / "out", DRY_RUN="1")
    assert result.returncode == 0, result.stderr
    made, prepared, *_ = result.stdout.splitlines()
    assert " fairseq_cli.corpus pydoc " in made and f"--trainpref {tmp_path}/out/text/train.txt " in prepared
    assert not (tmp_path / "out").exists()


def test_every_setting_that_was_measured_is_in_its_file() -> None:
    files = dict.fromkeys(("ideas", "bytes", "equal time"), "ideas.yaml")
    files |= {name: f"{name.removesuffix(' bf16')}.yaml" for name in ("memory", "memory bf16", "notes")}
    files["memory, equal time"] = "memory.yaml"
    lines = (runs.ROOT / "benchmarks" / "results" / "tenmillion.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "flags" in row and row["runs"] != "both"]
    assert {*files} < {row["runs"] for row in rows}
    for row in rows:
        settings = yaml.safe_load(RECIPE.with_name(files.get(row["runs"], "settings.yaml")).read_text())
        flags = row["flags"].replace(" --bf16", "") if row["runs"] == "memory bf16" else row["flags"]
        # Once the architecture's defaults.
        base = settings["base"].replace(" --adaptive-input-factor 4 --adaptive-softmax-factor 4 --ngram-notes 0", "")
        assert flags.split() == f"{base} {settings[row['setting']]}".split()


def test_updates_fit_the_budget(tmp_path: Path) -> None:
    speeds = tmp_path / "speed.jsonl"
    speeds.write_text("".join(json.dumps({"ups": speed}) + "\n" for speed in (0.1, 2.0, 4.0, 3.0)))
    command = [os.environ["PYTHON"], TABLES, "updates", speeds, "--seconds", "100"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "300\n"


@pytest.mark.parametrize(("name", "value"), [("BUDGET", "soon"), ("STAGES", "64"), ("PAIRS", "nowhere"), ("BPE", "0")])
def test_a_mistake_is_one_line(name: str, value: str, tmp_path: Path) -> None:
    result = recipe(tmp_path / "out", DRY_RUN="1", TRAIN=str(TABLES), **{name: value})
    assert result.returncode == 2 and result.stderr.startswith(f"{name}={value}: ") and result.stderr.count("\n") == 1
