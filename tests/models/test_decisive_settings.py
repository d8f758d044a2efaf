"""Settings that parameters depend on beside their shapes: each is found by trying other values of
every setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import runs
import torch

from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.tasks import setup_task

COMMON = "--cpu --train-subset valid --valid-subset test --tokens-per-sample 16 --max-tokens 64 --lr 0.05"
DECODER = "--decoder-layers 1 --decoder-embed-dim 32 --decoder-ffn-embed-dim 8 --decoder-attention-heads 2"
ADAPTIVE = "--criterion adaptive_loss --adaptive-softmax-cutoff 50,100 --adaptive-input-cutoff 50,100"
ENCODER = "--task masked_lm --encoder-layers 1 --encoder-embed-dim 8 --encoder-ffn-embed-dim 8 --max-positions 32"
XL = "--task truncated_bptt_lm --arch transformer_xl_tiny --criterion adaptive_loss --n-layer 1 --cutoffs 50,100"
FAMILIES = {
    "transformer_lm": f"--arch transformer_lm_tiny {DECODER} {ADAPTIVE}",
    "shortformer": f"--arch shortformer_tiny {DECODER} {ADAPTIVE}",
    "llama": f"--arch llama_tiny {DECODER} --criterion cross_entropy --rotary-scaling 2 --rotary-trained-positions 8",
    "transformer_xl": f"{XL} --div-val 2 --tie-projs tails",
    "transformer_xl shaw": f"{XL} --position-encoding shaw",
    "transformer_xl absolute": f"{XL} --position-encoding absolute",
    "lstm_lm": "--arch lstm_lm_tiny --criterion cross_entropy --decoder-layers 2",
    "bert": f"--arch bert_tiny --criterion masked_lm {ENCODER} --encoder-attention-heads 2",
    "electra": f"--arch electra_tiny --criterion electra {ENCODER} --encoder-attention-heads 2",
}
MEMORY = {"tokens_from_prev", "mem_len", "memory_start", "clamp_len"}  # evaluation may change it
NORMS = ("layer", "rms")
TEXTS = ("gelu", "tanh", "relu", "silu", "relative", "shaw", "absolute", "learned", "none", "tails", "all", *NORMS)


def others(value: Any) -> Iterator[Any]:
    """Other values that a setting may have."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value * 2, value // 2, value + 1, value + 0.25)
    elif isinstance(value, str):
        yield from (text for text in TEXTS if text != value)
    elif value is None:
        yield from (*TEXTS, 4, True)


def outcome(model: BaseFairseqModel) -> tuple[torch.Tensor, int]:
    """What a model computes, and how many tensors it trains."""
    with torch.no_grad():
        output = model.eval()(torch.arange(4, 36).view(2, 16))[0]
    return output, len(list(model.parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_setting_that_changes_the_model_and_no_shape_is_decisive(family: str) -> None:
    args = runs.arguments(COMMON, FAMILIES[family])
    task = setup_task(args)
    model = task.build_model(args)
    state = model.state_dict()
    shapes = {name: tensor.shape for name, tensor in state.items()}
    output, parameters = outcome(model)
    unnoticed, noticed = set(), set()
    for name in {field.name for field in dataclasses.fields(model.cfg)} - MEMORY:
        for value in others(getattr(model.cfg, name)):
            try:
                changed = type(model).build_model(dataclasses.replace(model.cfg, **{name: value}), task)
            except (UserError, TypeError, ValueError, LookupError, ArithmeticError, RuntimeError, AssertionError):
                continue  # no such value
            if {name: tensor.shape for name, tensor in changed.state_dict().items()} != shapes:
                continue
            changed.load_state_dict(state)
            found, count = outcome(changed)
            if count != parameters or not torch.equal(found, output):
                (noticed if name in model.decisive_settings else unnoticed).add(name)
    assert not unnoticed and noticed
