"""Commands of guides and recipes, at a small size, on processes of torchrun and of two nodes: as on
one process."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jobs
import noted
import pytest
import runs
import warm
from launches import srun

LOG = "--cpu --log-format json --log-interval 1 --disable-validation --no-save"
WORDS = "--train-subset valid --valid-subset test"
SMALL = {
    "shortformer": [
        runs.NO_DROPOUT,
        """--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32
        --decoder-ffn-embed-dim 64 --decoder-attention-heads 2 --adaptive-softmax-cutoff 200,600 --warmup-updates 4
        --adaptive-input-cutoff 200,600 --max-lr 0.1 --stages 8:3,16:6 --update-freq 2""",
        WORDS,
    ],
    "transformer_xl": ["--dropout 0 --dropatt 0", WORDS],
    "tnf": ["--dropout 0 --attention-dropout 0"],
}
RECIPES = {"transformer_xl": "wiki103-base.sh", "tnf": "pretrain-tnf-bert.sh"}
PRECISIONS = {"fp32": "", "bf16": "--bf16", "fp16": "--fp16"}
SHARDED = "--ddp-backend fully_sharded"


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noted.corpus(tmp_path_factory.mktemp("noted"))


def published(name: str, processes: int, notes: Path) -> list[str]:
    """The words after ``train.py DATA`` of a published command; any number of processes has the
    same global batch."""
    if name == "shortformer":
        text = re.sub(r"\\\n\s*", "", (runs.ROOT / "docs" / "methods.md").read_text(encoding="utf-8"))
        (line,) = re.findall(r"fairseq-train data-bin/wikitext-103 (--arch .*) --bf16 --save-dir shortformer", text)
        words = [*shlex.split(line), f"--max-tokens={64 // processes}"]
    else:
        passes = {"UPDATE_FREQ" if name == "tnf" else "BATCH_CHUNK": 2}
        variables = {"DRY_RUN": 1, "SMALL": 1, "PRECISION": "fp32", "GPUS": processes, **passes}
        printed = subprocess.run(
            ["bash", str(runs.ROOT / "examples" / name / RECIPES[name])],
            env={**os.environ, **{key: str(value) for key, value in variables.items()}, "DATA": "data-bin"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        (command,) = [shlex.split(line) for line in printed.stdout.splitlines() if line.startswith("python train.py")]
        words = [word.replace(" ", "") for word in command[2:] if word != "data-bin"]
    return [*words, *runs.words(SMALL[name], LOG), *(["DATA", str(notes)] if name == "tnf" else [])]


def with_flags(words: list[str], *flags: str) -> list[str]:
    """*words* with *flags* before the data folder at their end."""
    place = words.index("DATA") if "DATA" in words else len(words)
    return [*words[:place], *runs.words(*flags), *words[place:]]


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory, notes: Path) -> Any:
    """Logs of two processes that torchrun started."""
    folder = tmp_path_factory.mktemp("torchrun")
    commands = {name: published(name, 2, notes) for name in SMALL}
    cases = {f"{n}-{p}": with_flags(words, flag) for n, words in commands.items() for p, flag in PRECISIONS.items()}
    cases |= {f"{name}-sharded": with_flags(words, SHARDED) for name, words in commands.items()}
    words = jobs.__file__, jobs.write(folder, cases), "--cpu"
    with warm.torchrun(folder, *words, stdout=subprocess.DEVNULL) as job:
        return jobs.finish(folder, cases, [job])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, notes: Path) -> Any:
    """Losses of one process, computed when they are asked for first."""
    found: dict[tuple[str, str], list[float]] = {}

    def losses(name: str, precision: str) -> list[float]:
        if (name, precision) not in found:
            words = with_flags(published(name, 1, notes), PRECISIONS[precision])
            data = notes if name == "tnf" else runs.DATA
            flags = words[: words.index("DATA")] if "DATA" in words else words
            found[name, precision] = runs.losses(runs.train(tmp_path_factory.mktemp("alone"), *flags, data=data))
        return found[name, precision]

    return losses


@pytest.mark.parametrize("precision", [*PRECISIONS, "sharded"])
@pytest.mark.parametrize("name", SMALL)
def test_two_processes_of_torchrun_follow_one(torchrun: Any, alone: Any, name: str, precision: str) -> None:
    expected = alone(name, precision if precision in PRECISIONS else "fp32")
    found = runs.losses(torchrun[f"{name}-{precision}"])
    assert len(found) == len(expected) >= 6
    assert found == pytest.approx(expected, abs={"bf16": 1e-2, "fp16": 1e-3}.get(precision, 1e-5))


def test_two_nodes_of_two_processes_follow_one_process(tmp_path: Path, notes: Path, alone: Any) -> None:
    cases = {"pairs": with_flags(published("shortformer", 4, notes), f"{SHARDED} --shard-group-size 2")}
    file, flags = jobs.write(tmp_path, cases), "--cpu --nprocs-per-node 2"
    logs = jobs.finish(tmp_path, cases, [jobs.start(file, flags, variables=node) for node in srun(nodes=2)])
    assert runs.losses(logs["pairs"]) == pytest.approx(alone("shortformer", "fp32"), abs=1e-5)
