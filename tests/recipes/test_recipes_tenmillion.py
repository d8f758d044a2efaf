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
import warm
import yaml

RECIPE = runs.ROOT / "examples" / "tenmillion" / "tenmillion.sh"
TABLES = RECIPE.with_name("tables.py")
COMPARE = RECIPE.with_name("compare.py")
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
    files |= {name: f"{name.removesuffix(' bf16')}.yaml" for name in ("memory", "memory bf16", "both", "notes")}
    files["memory, equal time"] = "memory.yaml"
    lines = (runs.ROOT / "benchmarks" / "results" / "tenmillion.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "flags" in row]
    assert {*files} < {row["runs"] for row in rows}
    for row in rows:
        settings = yaml.safe_load(COMPARE.with_name(files.get(row["runs"], "settings.yaml")).read_text())
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


def compare(*args: object) -> str:
    command = [os.environ["PYTHON"], COMPARE, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_settings_are_compared_within_a_budget_and_only_what_is_missing_is_trained(text: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data-bin", tmp_path / "runs"
    parts = [flag for name in ("train", "valid", "test") for flag in (f"--{name}pref", text)]
    assert not warm.command("preprocess.py", *parts, "--bpe", "hf", "--learn-bpe", 700, "--destdir", data).returncode
    settings = tmp_path / "settings.yaml"
    settings.write_text("base: --arch transformer_lm_fast_tiny --cpu --batch-size 4\nfirst: ''\nsecond: --lr 0.001\n")
    done = out / "second" / "1" / "row.json"
    done.parent.mkdir(parents=True)
    done.write_text(json.dumps({"bits_per_byte": 9.0, "updates": 7, "tokens": 7, "sittings": []}))
    budget = ("--seconds", 0.2, "--processes", 1, "--pairs", PAIRS, "--known-words", PAIRS)
    printed = compare("run", settings, "--data", data, "--out", out, *budget, "--eval-flags=--cpu")
    assert printed.startswith("first seed 1: ") and printed.count("\n") == 1
    row = json.loads((out / "first" / "1" / "row.json").read_text())
    assert row["updates"] == int((out / "first" / "updates").read_text()) > 0 and row["sittings"][0]["processor"] > 0
    table = compare("report", out).splitlines()
    assert (
        table[0].endswith(" pairs (%) | known words (%) |") and row["accuracy of known words"] == row["accuracy"]["all"]
    )
    share = f"{100 * row['accuracy']['all']:.2f}"
    assert table[2].endswith(f" {row['bits_per_byte']:.4f} | {share} | {share} |") and table[3].endswith(" | – | – |")
    assert table[3].startswith("| second | 1 | 7 |")


def test_a_setting_that_is_not_in_the_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("first: ''\n")
    words = ("run", tmp_path / "settings.yaml", "--data", tmp_path, "--out", tmp_path / "out", "--updates", 1)
    command = [os.environ["PYTHON"], COMPARE, *map(str, words), "--only", "nine"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and result.stderr.startswith("compare.py: error: --only nine: not in ")
    assert result.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_differences_are_between_runs_of_one_seed(tmp_path: Path) -> None:
    for name, bits in {"a": (2.0, 3.0), "b": (1.5, 2.7, 9.0)}.items():
        for seed, value in enumerate(bits, start=1):
            row = tmp_path / name / str(seed) / "row.json"
            row.parent.mkdir(parents=True)
            rest = {"seed": seed, "updates": 1, "tokens": 1, "sittings": []}
            row.write_text(json.dumps({"bits_per_byte": value, **rest}))
    a, b = compare("report", tmp_path, "--against", "a").splitlines()[2:]
    # −0.5 and −0.3: t(0.975; 1) · 0.1 = 1.2706.
    assert a.endswith(" – |") and b.endswith(" -0.4000 ± 1.2706 |")


def test_updates_until_a_perplexity_are_counted(tmp_path: Path) -> None:
    curves = {"slow": {100: 400.0, 200: 100.0}, "fast": {20: 90.0, 40: 400.0, 60: 25.0}, "bad": {50: 300.0}}
    for name, curve in curves.items():
        row = tmp_path / name / "1" / "row.json"
        row.parent.mkdir(parents=True)
        row.write_text("{}")
        measured = [{"tag": "valid", "num_updates": updates, "ppl": ppl} for updates, ppl in curve.items()]
        text = "".join(json.dumps(line) + "\n" for line in [{"tag": "train_inner", "num_updates": 1}, *measured])
        row.with_name("metrics.jsonl").write_text(text)
    first, *_, fast, slow, bad = compare("reach", tmp_path, "--against", "slow").splitlines()
    assert first == "Target: a perplexity of 100.00, the mean of 1 of slow"
    # 400 to 25 is four doublings, and 100 the second of them; below it at 20, but not for good.
    assert fast == "| fast | 1 | 1 | 50 | 4.00 | – | 25.00 | 60 |"
    assert slow == "| slow | 1 | 0 | 200 | 1.00 | – | 100.00 | 200 |"
    assert bad == "| bad | 1 | 0 | – | – | – | 300.00 | 50 |"


def test_ranks_are_compared(tmp_path: Path) -> None:
    for folder, order in (("small", (3.0, 2.0, 1.0, 4.0)), ("whole", (2.0, 2.5, 1.5, 9.0))):
        for name, bits in zip("abcd", order, strict=True):
            row = tmp_path / folder / name / "1" / "row.json"
            row.parent.mkdir(parents=True)
            row.write_text(json.dumps({"bits_per_byte": bits}))
    # Two neighbours change places: 1 − 6 · 2 / (4 · 15).
    assert compare("ranks", tmp_path / "small", tmp_path / "whole").endswith("correlation of 4 settings: 0.80\n")


def test_a_curve_extends_to_the_amount_that_reaches_a_target(tmp_path: Path) -> None:
    for folder, tokens, hours, pairs in (("small", 1e6, 0.1, 0.5), ("whole", 1e7, 10, 0.6)):
        row = tmp_path / folder / "a" / "1" / "row.json"
        row.parent.mkdir(parents=True)
        rest = {"bits_per_byte": 2.0, "accuracy": {"all": pairs}, "sittings": [{"processor": hours * 3600}]}
        row.write_text(json.dumps({"tokens": tokens, **rest}))
    folders = tmp_path / "small", tmp_path / "whole"
    *_, slope, needed = compare("curve", *folders, "--target", 70, "--over", "tokens").splitlines()
    assert slope == "10.00 points for ten times the tokens"
    assert needed == "70.0 %: 100 million tokens, if the trend continues"
    *_, slope, needed = compare("curve", *folders, "--target", 70).splitlines()
    assert slope == "5.00 points for ten times the time"
    assert needed == "70.0 %: 1,000 core-hours, if the trend continues"
