"""The predicted time of a training step on a GPU, from operators that are counted without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import ROOT
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import roofline
from benchmarks.launches import Kernel, Launches
from fairseq.kernels import training as fused
from fairseq.modules.attention import SelfAttention
from fairseq.modules.dropout import add_dropout, relu_dropout
from fairseq.modules.output_layer import linear_cross_entropy
from fairseq.modules.relative_attention import shift
from fairseq.modules.transformer_layer import TransformerLayer

DATA = "tests/golden/language_model/data-bin"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The predictions for a small Shortformer, eager and compiled, of a process in which torch has
    one device more."""
    path = tmp_path_factory.mktemp("roofline") / "out.json"
    arguments = ["shortformer_tiny", "--data", DATA, "--compile", "--json", str(path)]
    subprocess.run([sys.executable, "-m", "benchmarks.roofline", *arguments], cwd=ROOT, check=True, capture_output=True)
    return json.loads(path.read_text())


@pytest.fixture
def result(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The prediction without ``--compile``."""
    return results[0]


def test_a_kernel_takes_the_longest_of_operations_bytes_and_launch() -> None:
    assert Kernel("", "matmul", 7e11, 1e3).seconds(1e12, 1e12) == pytest.approx(1.0)
    assert Kernel("", "layers", 7e10, 8e11).seconds(1e12, 1e12) == pytest.approx(1.0)
    assert Kernel("", "layers", 1.0, 1.0).seconds(1e12, 1e12) == 2.5e-6


def test_an_update_waits_once(result: dict[str, Any]) -> None:
    assert result["waits"] == 1


def test_attention_with_a_cache_is_flash_attention(result: dict[str, Any]) -> None:
    launches = {name: sums[0] for name, sums in result["operators"]["attention"].items()}
    name = "_scaled_dot_product_flash_attention"
    assert launches == {name: 2, f"{name}_backward": 2}  # in each of two layers


def test_a_norm_moves_two_bytes_each_way_and_two_more_of_each_input_going_back(result: dict[str, Any]) -> None:
    # 128 tokens, 64 channels, two norms in each of two layers; besides gains, biases and
    # statistics.
    of = {name: sums for name, sums in result["operators"]["layers"].items() if "layer_norm" in name}
    assert {name: sums[0] for name, sums in of.items()} == {"native_layer_norm": 4, "native_layer_norm_backward": 8}
    for name, size in (("native_layer_norm", 4), ("native_layer_norm_backward", 10)):
        assert size < of[name][2] / (4 * 128 * 64) < size + 1


def test_operations_of_attention_are_those_of_the_keys_that_are_read(result: dict[str, Any]) -> None:
    # 4 rows of 32 tokens after a memory of 32, 2 layers of width 64: scores and sums of values, 2
    # operations each; going back five products for two.
    read = 4 * sum(32 + i for i in range(1, 33))
    assert sum(sums[1] for sums in result["operators"]["attention"].values()) == 2 * (4 + 10) * read * 64


def test_compiled_layers_compute_the_same_products_and_move_less(results: list[dict[str, Any]]) -> None:
    eager, compiled = results
    assert [r["compile"] for r in results] == [False, True]
    assert eager["operators"]["attention"] == compiled["operators"]["attention"]
    for part in ("matmul", "loss", "optimizer"):
        for of in (0, 1, 2):
            assert sum(x[of] for x in eager["operators"][part].values()) == pytest.approx(
                sum(x[of] for x in compiled["operators"][part].values())
            )
    moved = [sum(x[2] for x in r["operators"]["layers"].values()) for r in results]
    assert moved[1] < moved[0] and compiled["kernels"] < eager["kernels"]
    assert "zeros" not in compiled["operators"]["layers"]  # as gradient of what is remembered


def test_what_a_compiler_fuses_reads_inputs_and_writes_results_once() -> None:
    from benchmarks.compiled import kernels_of  # loads torch's compiler

    def function(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = (x @ weight).relu() * 2
        y = h - h.sum(1, keepdim=True)
        return y @ weight, y.sum(0)

    x, weight = torch.empty(16, 8), torch.empty(8, 8)
    kernels = kernels_of(make_fx(function, tracing_mode="fake")(x, weight).graph)
    of_x, of_weight, row = 16 * 8 * 4, 8 * 8 * 4, 8 * 4
    assert sorted((kernel.name, kernel.bytes) for kernel in kernels) == [
        ("fused", 2 * of_x), *[("mm", 2 * of_x + of_weight)] * 2, ("sum over rows", of_x + row)
    ]  # fmt: skip


def test_a_precision_that_a_gpu_lacks_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        roofline.main(["--gpu", "H100", "V100", "--precision", "bf16"])
    assert exit.value.code == 2
    assert capsys.readouterr().err == "python -m benchmarks.roofline: --precision bf16: V100 does not have it\n"


def test_a_measurement_stands_beside_the_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicted = {"arch": "bert_base", "precision": "bf16", "tokens_per_second": 2000.0}
    assert roofline.beside([predicted], {"bert_base, bf16": 1500.0}).endswith("| 2,000 | 1,500 | 0.75 |")
    (tmp_path / "gpu.json").write_text(json.dumps({"machine": {"device": "AMD EPYC"}, "results": []}))
    roofline.main(["--measured", str(tmp_path / "gpu.json")])
    assert capsys.readouterr().out.startswith("No prediction for AMD EPYC; there are predictions for NVIDIA H200, ")


def test_the_loss_moves_at_most_29_bytes_a_logit_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits: 2 bytes written, 2 read for the largest, 6 to cast; softmax 8; gradient: 6 to cast, 4
    for products."""
    monkeypatch.setattr(fused, "kernels", lambda *tensors: None)  # as on GPUs
    rows, words, channels = 256, 512, 4
    hidden, weight = torch.randn(rows, channels, requires_grad=True), torch.randn(words, channels, requires_grad=True)
    with Launches("cpu") as launches, torch.autocast("cpu", dtype=torch.bfloat16):
        linear_cross_entropy(hidden, weight, torch.randint(words, (rows,)))
    assert 28 < sum(kernel.bytes for kernel in launches.kernels) / (rows * words) < 29


@pytest.mark.parametrize("pre_norm", [True, False])
def test_a_layer_casts_its_input_once_for_all_projections_and_remembers_that(pre_norm: bool) -> None:
    layer = TransformerLayer(SelfAttention(8, 2), 8, 8, normalize_before=pre_norm, remember_input=not pre_norm)
    x = torch.randn(2, 5, 8)
    with Launches("cpu") as launches, torch.autocast("cpu", dtype=torch.bfloat16):
        _, remembered = layer(x)
    casts = [k for k in launches.kernels if k.name == "_to_copy" and k.bytes == x.numel() * 6]
    assert len(casts) == 2  # of attention and of the feed-forward network
    assert remembered.dtype == torch.bfloat16


def test_dropout_moves_17_bytes_after_a_relu_and_13_before_a_residual_on_gpus() -> None:
    """Of the feed-forward network only the result is stored, of the residual branch the mask."""
    x, residual = (torch.empty(64, 32, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    with Launches("meta") as launches:
        torch.autograd.grad(relu_dropout(x, 0.1), x, x)
        torch.autograd.grad(add_dropout(residual, x, 0.1), (residual, x), x)
    assert [(kernel.name, kernel.bytes / x.numel()) for kernel in launches.kernels] == [
        ("relu", 4), ("native_dropout", 5), ("gt", 3), ("native_dropout_backward", 5),
        ("bernoulli_", 1), ("addcmul", 7), ("native_dropout_backward", 5),
    ]  # fmt: skip


def test_scores_by_distance_are_shifted_in_one_pass_on_gpus_and_one_going_back() -> None:
    raw = torch.empty(2, 3, 4, 9, device="meta", requires_grad=True)
    with Launches("meta") as launches:
        shifted = shift(raw, torch.empty(4, 9, device="meta"))
    assert [kernel.name for kernel in launches.kernels] == ["add"]
    with Launches("meta") as launches:
        shifted.backward(torch.empty_like(shifted))
    assert [k.name for k in launches.kernels if k.bytes > raw.numel() * 4] == ["copy_"]


def test_wrong_arguments_are_named_in_one_line_before_anything_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(roofline, "predictions", None)
    none, other = tmp_path / "none.json", tmp_path / "other.json"
    other.write_text("{}")
    for flags, message in (
        (["--measured", none], "none.json"),
        (["--measured", other], f"--measured {other}: not a file of benchmarks.gpu; give one that its --json wrote"),
        (["--json", none / "a.json"], f"--json {none / 'a.json'}: there is no folder {none}"),
        (["--top", "-1"], "--top -1: must be at least 0"),
    ):
        with pytest.raises(SystemExit) as exit:
            roofline.main(["bert_base", *map(str, flags)])
        assert exit.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("python -m benchmarks.roofline: ") and message in error and error.count("\n") == 1
