"""Training follows the original implementation, update by update, from its own checkpoint."""

from __future__ import annotations

import json

import pytest
import runs

FLAGS = """--task language_modeling --arch transformer_lm_wiki103 --decoder-layers 2 --decoder-attention-heads 4
    --decoder-embed-dim 64 --decoder-input-dim 64 --decoder-output-dim 64 --decoder-ffn-embed-dim 128
    --adaptive-softmax-cutoff 200,600 --adaptive-input-cutoff 200,600 --dropout 0 --attention-dropout 0
    --relu-dropout 0 --adaptive-softmax-dropout 0 --max-lr 0.2 --t-mult 2 --lr-period-updates 200
    --lr-scheduler cosine --lr-shrink 0.75 --warmup-updates 20 --warmup-init-lr 1e-07 --min-lr 1e-09
    --optimizer nag --lr 0.0001 --clip-norm 0.1 --criterion adaptive_loss --adaptive-loss-legacy-padding
    --update-freq 1 --seed 1 --sample-break-mode none --skip-invalid-size-inputs-valid-test
    --ddp-backend=no_c10d --required-batch-size-multiple 1 --curriculum 1000 --cpu --log-format json
    --log-interval 1 --no-epoch-checkpoints"""
TRACES = {
    "trace_stage2": "--max-epoch 2 --max-tokens 128 --tokens-per-sample 64 --max-tokens-valid 64 --tokens-from-prev 64",
    "trace_reset": "--reset-optimizer --reset-dataloader --reset-lr-scheduler --reset-meters --max-update 30"
    " --max-tokens 128 --tokens-per-sample 32 --max-tokens-valid 32 --tokens-from-prev 32",
}


@pytest.fixture(scope="module", params=TRACES)
def trace(request, tmp_path_factory):
    """What the original logged at each update, and what we log."""
    expected = json.loads((runs.GOLDEN / "expected" / f"{request.param}.json").read_text())
    restore = ["--restore-file", str(runs.GOLDEN / "shortformer_stage1.pt")]
    log = runs.train(tmp_path_factory.mktemp(request.param), FLAGS, TRACES[request.param], restore)
    return expected, runs.updates(log)[: len(expected)]


def test_trace_has_the_same_updates(trace):
    expected, found = trace
    assert len(expected) in (30, 40)
    assert [(e["num_updates"], e["epoch"]) for e in expected] == [(f["num_updates"], f["epoch"]) for f in found]


@pytest.mark.parametrize("name, tolerance", [("loss", 1e-4), ("gnorm", 1e-3)])
def test_trace_agrees_with_the_original(trace, name, tolerance):
    expected, found = trace
    assert [f[name] for f in found] == pytest.approx([e[name] for e in expected], abs=tolerance)


def test_trace_follows_the_originals_learning_rate(trace):
    expected, found = trace
    assert [f["lr"] for f in found] == pytest.approx([e["lr"] for e in expected], rel=1e-5)
