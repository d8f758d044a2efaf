"""The model of scaling follows from sizes that can be counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import runs
import torch

from benchmarks.scaling import MODELS, SAVED, Cluster, Model, predict
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


def test_predictions_are_ordered() -> None:
    alone = predict(MODEL, CLUSTER, 1, "c10d")
    assert alone.exposed == 0 and alone.tokens_per_second == pytest.approx(1e12 / 6e8)
    assert predict(MODEL, CLUSTER, 1, "fully_sharded") == alone
    eight, many = (predict(MODEL, CLUSTER, count, "fully_sharded") for count in (8, 64))
    assert many.state == eight.state < alone.state, "parts are those of a node"
    slow = predict(MODEL, replace(CLUSTER, between=1e8), 64, "c10d")
    assert slow.efficiency < 0.5 < predict(MODEL, CLUSTER, 64, "c10d").efficiency
    recomputed = predict(MODEL, CLUSTER, 8, "c10d", recompute=True)
    assert recomputed.activations < alone.activations / 10 and recomputed.compute > alone.compute
    for model in MODELS:
        one, many = (predict(model, CLUSTER, count, "c10d") for count in (1, 1024))
        assert many.gathered == 1024 * one.gathered
        assert many.saving - one.saving == pytest.approx(1023 * one.gathered / CLUSTER.disk), "memory is written, too"
