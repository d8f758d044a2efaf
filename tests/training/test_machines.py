"""One run on machines that switches make of this one: without a compiler, without AVX-512, without
bfloat16."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import runs
from machines import HAS_AVX512

from fairseq import checkpoint
from fairseq.kernels import build as native
from fairseq.modules import precision

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
PLACES = {"this": {}, **({"AVX2": AVX2} if HAS_AVX512 else {})}
COMPILERS = {"": {}, ", no compiler": {"CC": "false"}}
MACHINES = [place + compiler for place in PLACES for compiler in COMPILERS]
PRECISIONS = {"": 1e-5, "--bf16": 0.05}


def train(folder: Path, place: str) -> None:
    """Five updates with and without a compiler, in each precision, of each model: these are
    folders."""
    for compiler, variables in COMPILERS.items():
        with mock.patch.dict(os.environ, variables), mock.patch.object(precision, "bfloat16_is_slower", lambda: False):
            native.library.cache_clear()
            for flag, model in itertools.product(PRECISIONS, MODELS):
                flags = "--max-update 5 --disable-validation --no-epoch-checkpoints"
                runs.train(folder / (place + compiler) / flag / model, MODELS[model], flag, flags)
    native.library.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a process for each set of instructions, which torch reads when it is
    imported."""
    folder = tmp_path_factory.mktemp("machines")
    train(folder, "this")
    for place in [*PLACES][1:]:
        program = "import pathlib, sys, test_machines; test_machines.train(pathlib.Path(sys.argv[1]), sys.argv[2])"
        paths = ":".join(map(str, (runs.ROOT, runs.ROOT / "tests", Path(__file__).parent)))
        done = subprocess.run(
            [sys.executable, "-c", program, folder, place],
            capture_output=True,
            text=True,
            env=runs.environment(PYTHONPATH=paths, **PLACES[place]),
            timeout=runs.TIMEOUT,
        )
        assert not done.returncode, done.stderr
    return folder


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("flag", "tolerance"), PRECISIONS.items())
@pytest.mark.parametrize("name", [name for name in MACHINES if name != "this"])
def test_machines_give_the_same_results_to_rounding(
    folder: Path, model: str, flag: str, tolerance: float, name: str
) -> None:
    places = (folder / machine / flag / model / "checkpoint_last.pt" for machine in ("this", name))
    expected, found = (checkpoint.read(place)["model"] for place in places)
    start = runs.model_of(MODELS[model]).state_dict()
    assert found.keys() == expected.keys()
    moved = sum((expected[key] - start[key]).float().square().sum() for key in expected if key in start) ** 0.5
    apart = sum((found[key] - expected[key]).float().square().sum() for key in expected) ** 0.5
    assert moved > 0.02
    assert apart < tolerance * moved
