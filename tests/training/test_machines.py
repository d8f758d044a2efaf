"""One run on machines that switches make of this one: without a compiler, without AVX-512, without
bfloat16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import runs
from machines import HAS_AVX512

from fairseq import checkpoint

# Without dropout, whose masks are torch's where there is no compiler.
MODELS = {
    # With embeddings as large as what is added to them, as published models have them.
    "Shortformer": f"{runs.SHORTFORMER} {runs.NO_DROPOUT} --optimizer nag --embed-init-std 0.18",
    "Transformer-XL": """--arch transformer_xl_tiny --cpu --train-subset valid --valid-subset test
        --tokens-per-sample 16 --mem-len 16 --batch-size 4 --criterion cross_entropy --optimizer adam
        --lr 0.002 --seed 3 --dropout 0""",
}
# The vector instructions of torch's own kernels, oneDNN's and MKL's; those of this package's
# kernels follow CFLAGS.
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "CFLAGS": "-mno-avx512f",
}
MACHINES = {"this": {}, "no compiler": {"CC": "false"}}
if HAS_AVX512:
    MACHINES |= {"AVX2": AVX2, "AVX2, no compiler": {**AVX2, "CC": "false"}}
PRECISIONS = {"": 1e-5, "--bf16": 0.05}
RUNS = """
import json, pathlib, sys
import runs

for folder, *flags in json.loads(sys.argv[1]):
    runs.train(pathlib.Path(folder), *flags)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of five updates, of a process for each machine: its name, precision, and model
    are folders."""
    folder = tmp_path_factory.mktemp("machines")
    for name, machine in MACHINES.items():
        flags = "--max-update 5 --disable-validation --no-epoch-checkpoints"
        words = [
            [str(folder / name / precision / model), MODELS[model], precision, flags]
            for precision in PRECISIONS
            for model in MODELS
        ]
        environment = runs.environment(PYTHONPATH=f"{runs.ROOT}:{runs.ROOT / 'tests'}", **machine)
        command = [sys.executable, "-c", RUNS, json.dumps(words)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=runs.TIMEOUT)
        assert not done.returncode, done.stderr
    return folder


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("precision", "tolerance"), PRECISIONS.items())
@pytest.mark.parametrize("name", [name for name in MACHINES if name != "this"])
def test_machines_give_the_same_results_to_rounding(
    folder: Path, model: str, precision: str, tolerance: float, name: str
) -> None:
    places = (folder / machine / precision / model / "checkpoint_last.pt" for machine in ("this", name))
    expected, found = (checkpoint.read(place)["model"] for place in places)
    start = runs.model_of(MODELS[model]).state_dict()
    assert found.keys() == expected.keys()
    moved = sum((expected[key] - start[key]).float().square().sum() for key in expected if key in start) ** 0.5
    apart = sum((found[key] - expected[key]).float().square().sum() for key in expected) ** 0.5
    assert moved > 0.02
    assert apart < tolerance * moved
