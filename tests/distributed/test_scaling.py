"""The model of scaling follows from sizes that can be counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import runs
import torch

from benchmarks.scaling import CLUSTERS, MODELS, SAVED, Cluster, Model, predict
from fairseq import checkpoint

CLUSTER = Cluster("test", flops=1e12, inside=1e11, between=1e10, latency=0.0)
MODEL = Model("test", 1e8, 2e7, 10, 512, 8, 128)


def test_a_checkpoint_and_the_state_have_the_predicted_size(tmp_path) -> None:
    runs.train(tmp_path, runs.SHORT, "--optimizer adam --lr 0.001 --no-epoch-checkpoints --disable-validation")
    state = checkpoint.load(tmp_path / "checkpoint_last.pt")
    weights = {id(w): w for w in state["model"].values() if w.is_floating_point() and w.numel() > 1}
    moments = [v for e in state["last_optimizer_state"]["state"].values() for v in e.values() if torch.is_tensor(v)]
    count = sum(p.numel() for p in runs.model_of(runs.BASELINE).parameters())
    size = sum(tensor.numel() * 4 for tensor in (*weights.values(), *moments))
    assert size == pytest.approx(SAVED * count, rel=0.01)


def test_what_is_summed_travels_twice_but_for_a_process_own_part() -> None:
    assert CLUSTER.summed(1e11, 2) == pytest.approx(1.0)
    assert CLUSTER.summed(1e11, 16) == pytest.approx(2 * 7 / 8 + 10.0)


# Of MODEL: 80 M parameters in layers, 20 M in embeddings, 1,024 tokens: 6 · 10^8 · 1,024 operations
# are 0.6144 s.
@pytest.mark.parametrize(
    ("processes", "backend", "between", "exposed", "state"),
    [
        (1, "c10d", 1e10, 0.0, 16e8),  # parameter, gradient and two moments in 4 bytes each
        (64, "c10d", 1e10, 0.0, 20e8),  # 0.077 s of summing behind 0.41 s of the backward pass; buckets
        (64, "c10d", 1e8, 7.007 - 0.4096, 20e8),  # 2 · 7/8 · 400 MB within a node, then between nodes
        (8, "fully_sharded", 1e10, 0.0014, 2e8 + 0.32e8 + 1.6e8),  # 7/8 · 160 MB of the root; two layers and the root
        (64, "fully_sharded", 1e10, 0.0014, 2e8 + 0.32e8 + 1.6e8),  # 0.0756 s between nodes are hidden
    ],
)
def test_an_update_costs_what_sums_by_hand_give(
    processes: int, backend: str, between: float, exposed: float, state: float
) -> None:
    found = predict(MODEL, replace(CLUSTER, between=between), processes, backend)
    assert found.compute == pytest.approx(0.6144) and found.exposed == pytest.approx(exposed)
    assert found.tokens_per_second == pytest.approx(processes * 1024 / (0.6144 + exposed))
    assert found.state == pytest.approx(state)


def test_recomputation_costs_a_third_more_and_keeps_inputs_in_two_bytes() -> None:
    found = predict(MODEL, CLUSTER, 1, "c10d", recompute=True)
    assert found.compute == pytest.approx(0.6144 * 8 / 6) and found.activations == 2 * 512 * 1024 * 10


def shown(cell: str) -> Any:
    """The number in a cell such as ``0.57 M (6%)`` or ``29 GB``, to its last digit."""
    number, unit, *_ = cell.split()
    size = {"k": 1e3, "M": 1e6, "GB": 1e9}[unit]
    return pytest.approx(float(number) * size, abs=0.501 * size / 10 ** len(number.partition(".")[2]))


def test_the_documented_table_is_that_of_the_model() -> None:
    lines = (runs.ROOT / "benchmarks" / "results" / "scaling.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "%)" in line]
    assert len(rows) == 9
    for number, (_, count, whole, parts, slow, state, part_of_state, gathered) in enumerate(rows):
        model, processes = MODELS[number // 3], int(count.replace(",", ""))
        first, second = (predict(model, CLUSTERS[0], processes, backend) for backend in ("c10d", "fully_sharded"))
        third = predict(model, CLUSTERS[1], processes, "c10d")
        cells = {whole: first.tokens_per_second, parts: second.tokens_per_second, slow: third.tokens_per_second}
        cells |= {state: first.state, part_of_state: second.state, gathered: first.gathered}
        assert all(size == shown(cell) for cell, size in cells.items() if cell != "–"), cells
        for cell, found in ((whole, first), (parts, second), (slow, third)):
            assert cell == "–" or cell.endswith(f" ({found.efficiency:.0%})")
