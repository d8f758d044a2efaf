"""Checkpoints of fairseq 0.6 to 0.12 in today's layout, piece by piece; whole files are in
tests/golden."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fairseq.checkpoint import standins
from fairseq.checkpoint.former_layouts import upgrade, upgrade_args, upgrade_model
from fairseq.checkpoint.standins import SAFE_GLOBALS, Attributes, DType, scalar


def state(args: Any = None, **more: Any) -> dict[str, Any]:
    return {"args": Attributes(**(args or {})), "model": {}, **more}


def test_fused_projections_are_cut_into_queries_keys_and_values() -> None:
    fused = {"a.in_proj_weight": torch.arange(12.0).view(6, 2), "a.in_proj_bias": torch.arange(6.0), "b": torch.ones(1)}
    model = upgrade_model(fused)
    assert list(model) == [
        *("a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight"),
        *("a.q_proj.bias", "a.k_proj.bias", "a.v_proj.bias", "b"),
    ]
    assert [model[f"a.{part}_proj.bias"].tolist() for part in "qkv"] == [[0, 1], [2, 3], [4, 5]]
    assert model["a.k_proj.weight"].tolist() == [[4, 5], [6, 7]]
    with pytest.raises(ValueError, match="zip"):
        upgrade_model({"in_proj_bias": torch.ones(2), "a.in_proj_bias": torch.ones(2)})


@pytest.mark.parametrize("length, left", [(5, [0, 3, 4]), (4, [0, 3]), (9, list(range(9)))])
def test_copies_leave_an_optimizers_flat_state_unless_it_is_longer_than_the_model(length: int, left: list[int]) -> None:
    model = {"a": torch.ones(1), "b.layers.0.fc1_weight": torch.ones(2), "c": torch.ones(2)}
    sums = {"state": {0: {"sums": torch.arange(length), "step": 3}}, "param_groups": [{"params": [0]}]}
    upgraded = upgrade({**state(), "model": model, "last_optimizer_state": sums})
    assert list(upgraded["model"]) == ["a", "c"]
    entry = upgraded["last_optimizer_state"]["state"][0]
    assert entry["sums"].tolist() == left and entry["step"] == 3


def test_norms_have_todays_names() -> None:
    names = ["layers.0.layer_norms.0.weight", "layers.0.layer_norms.1.bias", "layers.0.layer_norms.2.bias"]
    assert list(upgrade_model(dict.fromkeys(names[:2], torch.ones(1)))) == [
        "layers.0.self_attn_layer_norm.weight",
        "layers.0.final_layer_norm.bias",
    ]
    assert list(upgrade_model({names[2]: torch.ones(1)})) == ["layers.0.final_layer_norm.bias"]


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"relu_dropout": 0.5}, {"activation_dropout": 0.5}),
        ({"relu_dropout": 0.5, "activation_dropout": 0.1}, {"activation_dropout": 0.1}),
        ({"max_sentences": 4, "max_sentences_valid": 5}, {"batch_size": 4, "batch_size_valid": 5}),
        ({"lr": 0.5, "update_freq": 2}, {"lr": [0.5], "update_freq": [2]}),
        ({"store_ema": False, "ema_decay": 0.9999}, {}),
        ({"store_ema": True, "ema_decay": 0.9999}, {"ema_decay": 0.9999}),
        ({"ema_decay": 0.9999}, {"ema_decay": 0.9999}),
        ({"lr": [0.5]}, {"lr": [0.5]}),
        ({"tokens_from_prev": -1}, {"tokens_from_prev": 0, "position_infused_attention": True}),
        ({"tokens_from_prev": 9}, {"tokens_from_prev": 9, "position_infused_attention": True}),
        (
            {"tokens_from_prev": 9, "rotary_fraction": 1.0},
            {"tokens_from_prev": 9, "rotary_fraction": 1.0, "position_infused_attention": False},
        ),
        (
            {"tokens_from_prev": 9, "position_infused_attention": False},
            {"tokens_from_prev": 9, "position_infused_attention": True},
        ),
        (
            {"tokens_from_prev": 0, "position_infused_attention": False},
            {"tokens_from_prev": 0, "position_infused_attention": False},
        ),
        (
            {"arch": "transformer_lm"},
            {
                "arch": "transformer_lm",
                "decoder_normalize_before": True,
                "decoder_input_dim": None,
                "decoder_output_dim": None,
            },
        ),
        (
            {
                "arch": "transformer_lm",
                "decoder_normalize_before": False,
                "decoder_input_dim": 3,
                "decoder_output_dim": 4,
            },
            {
                "arch": "transformer_lm",
                "decoder_normalize_before": False,
                "decoder_input_dim": 3,
                "decoder_output_dim": 4,
            },
        ),
        ({"arch": "transformer_lm_big"}, {"arch": "transformer_lm_big"}),
        ({"arch": "transformer_lm_fast_demo"}, {"arch": "transformer_lm_fast_demo", "ngram_notes": 0}),
        (
            {"arch": "transformer_lm_fast_demo", "ngram_notes": 9},
            {"arch": "transformer_lm_fast_demo", "ngram_notes": 9},
        ),
        ({"no_tie_adaptive_proj": True}, {"no_decoder_final_norm": True}),
        ({"no_tie_adaptive_proj": False}, {"no_decoder_final_norm": True, "tie_adaptive_proj": True}),
        ({"decoder_final_norm": True}, {"no_decoder_final_norm": False}),
        ({"decoder_final_norm": False}, {"no_decoder_final_norm": True}),
    ],
)
def test_settings_have_todays_names_and_former_defaults(given: dict[str, Any], expected: dict[str, Any]) -> None:
    before = dict(given)
    assert upgrade_args(given) == expected
    assert given == before


def test_groups_of_settings_become_flat() -> None:
    cfg = {
        "common": {"seed": 3, "_name": None},
        "model": Attributes(_name="transformer_lm_gbw", dropout=0.1, seed=9),
        "task": {"_name": "language_modeling", "data": "d"},
        "none": None,
    }
    flat = upgrade({"cfg": cfg, "model": {}})["args"]
    assert flat == {
        "seed": 3,
        "arch": "transformer_lm_gbw",
        "dropout": 0.1,
        "task": "language_modeling",
        "data": "d",
    }
    assert upgrade({"args": {"seed": 4}, "cfg": cfg, "model": {}})["args"] == {"seed": 4}
    assert "cfg" not in upgrade({"args": None, "cfg": cfg, "model": {}})


@pytest.mark.parametrize(
    "optimizer, stored, name",
    [
        ("nag", "FP16Optimizer", "FairseqNAG"),
        ("adam", "MemoryEfficientFP16Optimizer", "FairseqAdam"),
        ("mine", "FP16Optimizer", "FP16Optimizer"),
        ("nag", "FairseqAdam", "FairseqAdam"),
        (None, "FP16Optimizer", "FP16Optimizer"),
    ],
)
def test_the_history_names_the_optimizer_itself(optimizer: str | None, stored: str, name: str) -> None:
    args = {"optimizer": optimizer} if optimizer else {}
    upgraded = upgrade(state(args, optimizer_history=[{"optimizer_name": stored}, {"num_updates": 7}]))
    assert upgraded["optimizer_history"] == [{"num_updates": 0, "optimizer_name": name}, {"num_updates": 7}]


def test_extra_state_keeps_the_training_time_and_the_place() -> None:
    extra = {"epoch": 3, "batch_offset": 5, "train_meters": {"train_wall": SimpleNamespace(sum=2.5)}, "kept": 1}
    assert upgrade(state(extra_state=extra))["extra_state"] == {
        "epoch": 3,
        "batch_offset": 5,
        "kept": 1,
        "previous_training_time": 2.5,
        "train_iterator": {"epoch": 3, "iterations_in_epoch": 5},
    }
    here = {"epoch": 3, "train_iterator": {"epoch": 4}, "previous_training_time": 9}
    timed = {**here, "train_meters": {"train_wall": SimpleNamespace(sum=2.5)}}
    assert upgrade(state(extra_state=timed))["extra_state"] == here
    bare = upgrade(state(extra_state={"epoch": 2, "train_meters": {"train_wall": SimpleNamespace()}}))["extra_state"]
    assert bare["train_iterator"] == {"epoch": 2, "iterations_in_epoch": 0} and bare["previous_training_time"] == 0
    empty = upgrade(state())
    assert empty["extra_state"] == {} and empty["optimizer_history"] == [] and empty["last_optimizer_state"] is None


@pytest.mark.parametrize("order", ["<", ">", "="])
@pytest.mark.parametrize("code, value", [("f8", -2.5), ("i4", -70_000), ("u2", 513), ("b1", True)])
def test_a_numpy_scalar_becomes_a_python_number(order: str, code: str, value: Any) -> None:
    kind = DType(code, False, True)
    kind.__setstate__((3, order, None))
    raw = np.array(value, np.dtype(code).newbyteorder(order)).tobytes()
    for data in (raw, raw.decode("latin-1")):
        found = scalar(kind, data)
        assert found == value and type(found) is type(value)


@pytest.mark.parametrize("code", ["O8", "V8", "U1", "M8", "x", "f8,f8"])
def test_other_types_than_numbers_are_rejected(code: str) -> None:
    with pytest.raises(ValueError, match="is not a number type"):
        scalar(DType(code), b"\0" * 16)


def test_a_type_without_an_order_has_that_of_the_machine() -> None:
    assert scalar(DType("i4"), np.array(77, "=i4").tobytes()) == 77


def test_a_part_has_the_name_of_the_class_or_function_that_it_replaces() -> None:
    kind = standins._known_as("numpy.core.multiarray.dtype", DType)
    function = standins._known_as("numpy.core.multiarray.scalar", lambda *values: values)
    for part, name in ((kind, "dtype"), (function, "scalar")):
        assert (part.__module__, part.__name__, part.__qualname__) == ("numpy.core.multiarray", name, name)
    assert isinstance(kind("i4"), DType) and function(1, "a") == (1, "a")


def test_the_allow_list_names_data_only() -> None:
    names = {f"{part.__module__}.{part.__qualname__}" for part in SAFE_GLOBALS}
    assert names == {
        "argparse.Namespace",
        "numpy.dtype",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        *(f"fairseq.meters.{kind}Meter" for kind in ("Average", "Time", "Stopwatch")),
    }
