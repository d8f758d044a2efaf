"""Operations per token are those that torch counts in a step; mfu is logged where the device's peak
is known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import runs
import torch
from torch.utils.flop_counter import FlopCounterMode

from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.modules import attention, relative_attention
from fairseq.tasks import setup_task
from fairseq.training import utilisation
from fairseq.training.state import TrainingState
from fairseq.training.update import update
from fairseq.training.utilisation import Reading, peak_flops, token_flops, token_share

# Dropout of attention lets torch's operators on CPUs write the products out, so that torch counts
# all of them.
PLAIN = f"--arch transformer_lm {runs.SMALL} --optimizer adam --criterion cross_entropy --attention-dropout 0.1"
XL = """--arch transformer_xl_tiny --cpu --train-subset valid --batch-size 8 --tokens-per-sample 16 --mem-len 16
    --optimizer adam --lr 0.01"""
BERT = """--task masked_lm --criterion masked_lm --arch bert_tiny --cpu --train-subset valid --tokens-per-sample 33
    --max-positions 33 --sample-break-mode none --batch-size 32 --optimizer adam --lr 0.01 --attention-dropout 0.1"""

LSTM = """--arch lstm_lm --cpu --train-subset valid --tokens-per-sample 16 --batch-size 4 --decoder-embed-dim 16
    --decoder-hidden-size 24 --decoder-out-embed-dim 20 --optimizer adam --lr 0.01 --criterion cross_entropy"""


def trainer(*flags: Any) -> TrainingState:
    settings = training_settings(runs.arguments(*flags))
    task = setup_task(settings)
    model = task.build_model(settings)
    return TrainingState(settings, task, model, task.build_criterion(settings))


def products(total: Any, left: torch.Size, right: torch.Size, **_: Any) -> int:
    return 2 * left.numel() * right[-1]


def linear_products(left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * left.numel() * right[0]


def counted(run: TrainingState, skip: int = 0) -> float:
    """Operations per token that torch counts in the update after *skip* others."""
    batches = iter(run.task.iterator("valid", run.model, run.criterion, training=True))
    for _ in range(skip):
        update(run, [next(batches)])
    sample = next(batches)
    not_counted = {torch.ops.aten.addmm_: products, torch.ops.aten.baddbmm_: products}
    if torch.backends.mkldnn.is_available():
        not_counted[torch.ops.mkldnn._linear_pointwise] = linear_products
    with FlopCounterMode(display=False, custom_mapping=not_counted) as counter:
        update(run, [sample])
    assert sample is not None
    return counter.get_total_flops() / sample["ntokens"]


@pytest.mark.parametrize(
    "flags, skip, tolerance",
    [
        ([PLAIN], 0, 0),
        ([PLAIN, "--share-decoder-input-output-embed --decoder-ffn-embed-dim 48"], 0, 0),
        ([PLAIN, "--position-infused-attention --tokens-from-prev 24"], 3, 0),
        ([XL], 1, 0.01),  # the counted step projects the distances, too
        ([BERT], 0, 0.06),  # the share of masked tokens varies
    ],
)
def test_operations_are_those_that_torch_counts(
    flags: list[str], skip: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Products in kernels of attention are not torch's to count.
    for module in (attention, relative_attention):
        monkeypatch.setattr(module, "kernels_for", lambda *operands: None)
    run = trainer(*flags)
    assert token_flops(run) == pytest.approx(counted(run, skip), rel=tolerance or 1e-9)


def test_a_recurrent_model_costs_the_weights_of_its_cells_and_its_output() -> None:
    run = trainer(LSTM)
    words = len(run.task.source_dictionary)
    assert token_flops(run) == 6 * (4 * 24 * (16 + 24) + 24 * 20 + 20 * words)


def test_bands_cost_as_much_as_they_are_used() -> None:
    reading = Reading(segment=1, memory=0, predicted=1.0, counts=np.array([6, 2, 1, 1]))
    assert reading.shares([0, 1, 2, 4]) == [0.6, 0.2, 0.2]
    flags = """--criterion adaptive_loss --adaptive-input --adaptive-input-cutoff 50,200
        --adaptive-softmax-cutoff 50,200 --adaptive-input-factor 4 --adaptive-softmax-factor 4 --decoder-layers 1
        --decoder-input-dim 32 --decoder-output-dim 32"""
    run = trainer(f"--arch transformer_lm {runs.SMALL}", flags)
    counts = np.array(run.task.source_dictionary.count)
    share = [part.sum() / counts.sum() for part in np.split(counts, [50, 200])]
    words = len(counts)
    inputs = share[0] * 32 * 32 + share[1] * 8 * 32 + share[2] * 2 * 32
    output = 32 * (50 + 2) + share[1] * (32 * 8 + 8 * 150) + share[2] * (32 * 2 + 2 * (words - 200))
    layer = 4 * 32 * 32 + 2 * 32 * 64 + 2 * 16 * 32
    assert token_flops(run) == pytest.approx(6 * (inputs + layer + output))


def test_the_clustered_softmax_counts_its_bands_too() -> None:
    plain, banded = trainer(XL), trainer(XL, "--cutoffs 50,200")
    found = [token_flops(run) or 0 for run in (plain, banded)]
    words = len(plain.task.source_dictionary)
    counts = np.array(plain.task.source_dictionary.count)
    share = [part.sum() / counts.sum() for part in np.split(counts, [50, 200])]
    width = plain.model.output_layer.bands[0].weight.size(1)  # type: ignore[union-attr, index]
    banded_words = 50 + 2 + share[1] * 150 + share[2] * (words - 200)
    assert found[0] - found[1] == pytest.approx(6 * width * (words - banded_words))


@pytest.mark.parametrize(
    "device, precision, expected",
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "fp16", None),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA A100 80GB PCIe", "bf16", 312e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA GeForce GTX 1080", "fp32", None),
    ],
)
def test_the_peak_is_that_of_the_device_and_precision(device: str, precision: str, expected: float | None) -> None:
    assert peak_flops(device, precision) == expected


def test_precisions_are_those_of_the_flags() -> None:
    flags = {"": "fp32", "--bf16": "bf16", "--fp16": "fp16", "--memory-efficient-fp16": "fp16", "--tf32": "tf32"}
    for given, expected in flags.items():
        assert utilisation.matrix_precision(training_settings(runs.arguments(PLAIN, given)).common) == expected


def test_mfu_is_the_share_of_the_peaks_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(PLAIN)
    assert token_share(run) is None  # on a CPU
    names = {torch.device("cuda", 1): "NVIDIA H200"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device])
    run.world = World(rank=0, size=4, device=torch.device("cuda", 1))
    share = token_share(run)
    assert share == pytest.approx(100 * (token_flops(run) or 0) / (4 * 66.9e12))
    whole, run.model = run.model, SimpleNamespace(memory_length=0, output_layer=None)
    assert token_flops(run) is None and token_share(run) is None, "of a model without an output layer"
    run.model, run.task = whole, SimpleNamespace(batch_settings=dict)
    assert token_flops(run) is None, "of a task without blocks"


def test_the_log_has_mfu_only_where_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = runs.train(tmp_path / "a", PLAIN, "--max-update 2 --disable-validation --no-save")
    assert "mfu" not in lines[0] and "wps" in lines[0]
    monkeypatch.setattr("fairseq.training.callbacks.log.token_share", lambda state: 0.5)
    lines = runs.train(tmp_path / "b", PLAIN, "--max-update 2 --disable-validation --no-save")
    assert float(lines[0]["mfu"]) == pytest.approx(0.5 * float(lines[0]["wps"]), rel=0.02)
