"""Compiled models: as few graphs as there are kinds of batches, and the numbers of the uncompiled
model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import noted
import pytest
import runs
import torch
from functorch.compile import make_boxed_func
from mistakes import logged
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import bias

from fairseq.evaluation.scorer import Scorer, Scoring
from fairseq.models import FairseqLanguageModel, layerwise
from fairseq.modules import attention, dispatch
from fairseq.modules.transformer_layer import TransformerLayer
from fairseq.tasks import setup_task

XL = """--arch transformer_xl --n-layer 2 --d-model 16 --n-head 2 --d-inner 24 --mem-len 16 --cpu --tokens-per-sample 16
    --max-tokens 64 --required-batch-size-multiple 1 --train-subset valid --valid-subset test --lr 0.001
    --criterion adaptive_loss --cutoffs 200,600 --dropout 0 --clip-norm 0.1 --log-format json --log-interval 1"""
LLAMA = """--arch llama_tiny --criterion cross_entropy --tokens-from-prev 16 --cpu --tokens-per-sample 16 --lr 0.001
    --max-tokens 64 --required-batch-size-multiple 1 --train-subset valid --valid-subset test --dropout 0"""
FAMILIES = {
    "transformer_lm": f"{runs.BASELINE} {runs.NO_DROPOUT} --decoder-layers 4",
    "shortformer": f"{runs.SHORTFORMER} {runs.NO_DROPOUT}",
    "transformer-xl": XL,
    "shaw": f"{XL} --position-encoding shaw --same-length",
    "llama": LLAMA,
    "pythia": f"{LLAMA} --arch pythia_tiny --attention-window 12",
    "bert": f"{noted.BERT} --dropout 0 --attention-dropout 0 --activation-dropout 0",
}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs that torch.compile makes, which are run as they are."""
    found: list[Any] = []

    def keep(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(layerwise, "BACKEND", keep)
    # What the cache of tensors without data stores costs more than it saves in one tracing.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield found
    torch._dynamo.reset()


def compiled(model: Any) -> Any:
    """A compiled copy of *model*."""
    made = copy.deepcopy(model)
    layerwise.compile_model(made)
    return made


class Reader:
    """Reads batches with a compiled model and its original, which must agree."""

    def __init__(self, model: Any) -> None:
        self.models = [compiled(model), model]
        self.memory: Any = None

    def read(self, rows: int, tokens: int, remember: bool = True) -> None:
        source = torch.randint(4, 600, (rows, tokens), generator=torch.Generator().manual_seed(rows))
        source[0, -1] = 1  # padding
        memory = [layer[:rows] for layer in self.memory] if remember and self.memory else None
        found = []
        for model in self.models:
            states, extra = model(source, **({"memory": memory} if memory else {}))
            layers = [p for layer in layerwise.layers_of(model) for p in layer.parameters()]
            gradients = torch.autograd.grad(states.square().mean(), layers) if model.training else ()
            found.append((states, extra.get("memory"), gradients))
        torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
        self.memory = extra.get("memory")


def test_a_run_makes_a_graph_for_each_kind_of_batch_and_has_the_log_of_one_without_graphs(
    graphs: list[Any], tmp_path: Path
) -> None:
    """Two epochs with validation; their last batches have fewer rows."""
    flags = [FAMILIES["shortformer"], "--max-tokens 640 --max-tokens-valid 320 --max-epoch 2 --no-save"]
    log, plain = (runs.train(tmp_path, flags, more) for more in ("--compile", ""))
    assert len(graphs) == 4, "in training and validation, without memory and with it"
    found, expected = ([*runs.updates(lines), *runs.summaries(lines, "test")] for lines in (log, plain))
    assert len(found) == len(expected) == 12
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, abs=1e-5, rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_of_each_family_is_one_graph_for_batches_of_one_shape(graphs: list[Any], family: str) -> None:
    reader = Reader(runs.model_of(FAMILIES[family]).train())
    for rows in (4, 4, 3, 1):
        reader.read(rows, 16, remember=False)
    assert len(graphs) == 1


def test_shapes_that_change_make_one_more_graph(graphs: list[Any]) -> None:
    reader = Reader(runs.model_of(runs.BASELINE, runs.NO_DROPOUT, "--decoder-layers 4"))
    for rows, tokens in ((4, 16), (4, 16), (3, 9), (16, 4), (32, 2)):
        reader.read(rows, tokens)
    assert len(graphs) == 2
    # A copied layer has weights of its own.
    reader.models = [copy.deepcopy(model) for model in reader.models]
    for model in reader.models:
        nn.init.zeros_(model.decoder.layers[0].fc1.weight)
    reader.read(32, 2)
    assert len(graphs) == 2


def test_the_compiler_that_users_have_computes_a_layer_and_its_gradients_with_operators_of_kernels() -> None:
    assert layerwise.BACKEND == "inductor"
    flags = "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2"
    reader = Reader(runs.model_of(FAMILIES["shortformer"], flags))
    reader.read(2, 8)
    torch._dynamo.reset()


def test_evaluation_makes_two_graphs_and_none_for_single_tokens(graphs: list[Any]) -> None:
    model = runs.model_of(FAMILIES["shortformer"]).eval()
    task = setup_task(runs.arguments(FAMILIES["shortformer"]))
    corpus, made = task.corpus("test"), compiled(model)
    for scoring, count in ((Scoring(16, batch_size=3), 2), (Scoring(16, token_by_token=True, batch_size=8), 2)):
        found, wanted = (Scorer([m], task.source_dictionary, scoring).score(corpus).lprobs for m in (made, model))
        torch.testing.assert_close(*map(torch.from_numpy, (found, wanted)), atol=1e-5, rtol=1e-5)
        assert len(graphs) <= count


def test_compiling_for_a_cpu_says_that_it_is_slower(graphs: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    compiled(runs.model_of(runs.BASELINE))
    assert logged(caplog) == ["--compile: on a CPU this model is faster without it"]


def test_a_model_without_our_layers_is_compiled_as_a_whole(graphs: list[Any]) -> None:
    class Decoder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    model = FairseqLanguageModel(Decoder())
    layerwise.compile_model(model)
    model(torch.zeros(2, 3))
    assert len(graphs) == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("groups", [2, 1])
def test_compiled_attention_to_a_memory_is_flash_attention_on_gpus(
    monkeypatch: pytest.MonkeyPatch, groups: int, dynamic: bool
) -> None:
    """One graph forward and one backward, each with the flash kernel, causal and with dropout, and
    without a mask or repeated keys.

    Traced with tensors without data, on a device that stands for a GPU.
    """
    found: list[list[tuple[str, tuple[Any, ...]]]] = []

    def keep(graph: Any, inputs: Any) -> Any:
        found.append([(str(node.target), node.args) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    for module in (bias, torch.backends.cuda):
        monkeypatch.setattr(module, "can_use_flash_attention", lambda params: True)
    attend = torch.compile(
        attention.attend, dynamic=dynamic, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)
    )
    query, key = (
        torch.empty(3, heads, n, 12, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads, n in ((2, 8), (groups, 13))
    )
    for _ in range(2):
        visible = attention.CAUSAL.prepare(8, 13, query.device, blocks=False)
        result = attend(query, [key], [key], visible, dropout_p=0.1)
        assert result.shape == query.shape
        result.sum().backward()
    forward, backward = ([call for call in calls if "attention" in call[0]] for calls in found)
    ((name, arguments),) = forward
    assert name == "aten._scaled_dot_product_flash_attention.default" and arguments[3:5] == (0.1, True)
    assert [name for name, _ in backward] == ["aten._scaled_dot_product_flash_attention_backward.default"]
    assert not any("where" in name or "iota" in name or "expand" in name for name, _ in found[0])


@pytest.mark.parametrize("kind", ["window", "padded"])
def test_compiled_layers_read_block_masks_that_are_made_anew(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(dispatch, "is_cpu", lambda x: False)
    layer = TransformerLayer(attention.SelfAttention(32, 2, kv_heads=1), 32, 32).eval()
    x, memory = torch.randn(3, 8, 32), torch.randn(3, 5, 32) if kind == "window" else None
    compiled = torch.compile(layer, fullgraph=True, backend=keep)
    with torch.no_grad():
        for count in (2, 4):
            padding = torch.arange(8).expand(3, 8) >= count
            visible = attention.Causal(3) if kind == "window" else attention.Bidirectional(padding)
            prepared = visible.prepare(8, 8 if memory is None else 13, x.device, blocks=True)
            torch.testing.assert_close(
                compiled(x, memory=memory, visible=prepared)[0], layer(x, memory=memory, visible=visible)[0]
            )
    assert len(graphs) == 1 and "flex_attention" in graphs[0].code
