"""One run on machines that switches make of this one: without a compiler, without AVX-512, without bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
import torch

from fairseq import checkpoint

MODELS = {
    "Shortformer": f"{runs.SHORTFORMER} {runs.DROPOUT} --optimizer nag",
    "Transformer-XL": """--arch transformer_xl_tiny --cpu --train-subset valid --valid-subset test
        --tokens-per-sample 16 --mem-len 16 --batch-size 4 --criterion cross_entropy --optimizer adam
        --lr 0.002 --seed 3 --dropout 0.2""",
}
# The vector instructions of torch's own kernels, oneDNN's and MKL's; those of this package's kernels follow CFLAGS.
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "CFLAGS": "-mno-avx512f",
}
MACHINES = {"no compiler": {"CC": "false"}, "AVX2": AVX2, "AVX2, no compiler": {**AVX2, "CC": "false"}}


def trained(folder: Path, model: str, precision: str, **machine: str) -> dict[str, torch.Tensor]:
    """The parameters after five updates of a process on *machine*."""
    flags = f"{MODELS[model]} {precision} --max-update 5 --disable-validation --save-dir"
    done = runs.command("train.py", str(runs.DATA), flags, folder, **machine)
    assert not done.returncode, done.stderr
    return checkpoint.read(folder / "checkpoint_last.pt")["model"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("precision", "tolerance"), [("", 1e-5), ("--bf16", 0.05)])
def test_machines_give_the_same_results_to_rounding(
    tmp_path: Path, model: str, precision: str, tolerance: float
) -> None:
    expected = trained(tmp_path / "this", model, precision)
    start = runs.model_of(MODELS[model]).state_dict()
    for name, machine in MACHINES.items():
        found = trained(tmp_path / name, model, precision, **machine)
        assert found.keys() == expected.keys()
        moved = sum((expected[key] - start[key]).float().square().sum() for key in expected if key in start) ** 0.5
        apart = sum((found[key] - expected[key]).float().square().sum() for key in expected) ** 0.5
        print(name, float(apart / moved))
        assert moved > 0.02
        assert apart < tolerance * moved, name
