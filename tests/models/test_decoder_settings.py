"""Settings of today's decoders: rotary positions, RMS norm, gates, shared heads of keys, windows,
parallel parts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import runs
import torch
from torch import Tensor

from fairseq.config import fields
from fairseq.config.registry import ARCHITECTURES
from fairseq.errors import UserError
from fairseq.inference.reader import Reader
from fairseq.models.transformer_lm import TransformerDecoder
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.modules.attention import Causal, SelfAttention
from fairseq.modules.positions import Rotation

WORDS = 1200
DATA = "--cpu --train-subset valid --valid-subset test --tokens-per-sample 16 --max-tokens 64 --lr 0.05 --seed 3"
PLAIN = f"{DATA} --criterion cross_entropy"
LLAMA = f"--arch llama_tiny {PLAIN}"
PYTHIA = f"--arch pythia_tiny {PLAIN}"
GPT2 = f"--arch gpt2_tiny {PLAIN}"
QWEN = f"{LLAMA} --decoder-biases qkv --qk-norm --decoder-norm-eps 1e-3"
MODELS = {
    "llama": LLAMA,
    "pythia": PYTHIA,
    "gpt2": GPT2,
    "biases of queries, keys and values": QWEN,
    "Llama 3's scaling": f"{LLAMA} --rotary-scaling 8 --rotary-trained-positions 64 --rotary-base 500",
    "linear scaling": f"{PYTHIA} --rotary-scaling 2.5",
    "GEGLU with biases": f"{GPT2} --decoder-gated-ffn --decoder-kv-heads 1",
    "window": f"{LLAMA} --attention-window 5",
    "post-norm": f"{LLAMA} --no-decoder-normalize-before --decoder-norm layer",
}
REMEMBERING = {
    "llama": f"{LLAMA} --tokens-from-prev 16",
    "short memory": f"{LLAMA} --tokens-from-prev 5",
    "memory of two segments": f"{PYTHIA} --tokens-from-prev 32",
    "window": f"{PYTHIA} --tokens-from-prev 16 --attention-window 7",
    "normalised queries and keys": f"{QWEN} --tokens-from-prev 9",
    "scaling": f"{LLAMA} --tokens-from-prev 16 --rotary-scaling 8 --rotary-trained-positions 64",
}


def build(flags: str) -> Any:
    """A model in evaluation, its parameters large enough to matter."""
    model = runs.model_of(flags).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(4, WORDS, (rows, length), generator=torch.Generator().manual_seed(0))


def naive_angle(cfg: TransformerLMConfig, turning: int, pair: int, position: int) -> float:
    """The angle of one pair of channels, as the papers write it."""
    frequency = cfg.rotary_base ** (-2 * pair / turning)
    if not cfg.rotary_trained_positions:
        return position / cfg.rotary_scaling * frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < cfg.rotary_trained_positions / 4:
        return position * frequency
    if wavelength > cfg.rotary_trained_positions:
        return position * frequency / cfg.rotary_scaling
    smooth = (cfg.rotary_trained_positions / wavelength - 1) / (4 - 1)
    return position * ((1 - smooth) * frequency / cfg.rotary_scaling + smooth * frequency)


def turned(cfg: TransformerLMConfig, vector: Tensor, position: int) -> Tensor:
    turning = int(len(vector) * cfg.rotary_fraction)
    result = vector.clone()
    for pair in range(turning // 2):
        angle, other = naive_angle(cfg, turning, pair, position), pair + turning // 2
        a, b = vector[pair], vector[other]
        result[pair] = a * math.cos(angle) - b * math.sin(angle)
        result[other] = a * math.sin(angle) + b * math.cos(angle)
    return result


class Naive:
    """A decoder in float64, a query and a head at a time."""

    def __init__(self, model: Any) -> None:
        self.cfg: TransformerLMConfig = model.cfg
        self.state = {name.removeprefix("decoder."): value.double() for name, value in model.state_dict().items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.state.get(f"{name}.bias")
        return x @ self.state[f"{name}.weight"].t() + (0 if bias is None else bias)

    def norm(self, name: str, x: Tensor) -> Tensor:
        if self.cfg.decoder_norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + self.cfg.decoder_norm_eps).sqrt()
        return x * self.state[f"{name}.weight"] + self.state.get(f"{name}.bias", torch.zeros(()))

    def heads(self, name: str, x: Tensor, first: int) -> list[Tensor]:
        """The heads of queries or keys at the positions from *first* on, each [T, D]."""
        dim = self.cfg.decoder_embed_dim // self.cfg.decoder_attention_heads
        result = []
        for head in self.linear(f"{name}_proj", x).split(dim, dim=-1):
            gain = self.state.get(f"{name}_norm.weight")
            normed = head if gain is None else gain * head / (head.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
            result.append(torch.stack([turned(self.cfg, row, first + t) for t, row in enumerate(normed)]))
        return result

    def attention(self, name: str, x: Tensor, before: Tensor) -> Tensor:
        every, dim = torch.cat([before, x]), self.cfg.decoder_embed_dim // self.cfg.decoder_attention_heads
        queries, keys = self.heads(f"{name}.q", x, len(before)), self.heads(f"{name}.k", every, 0)
        values = self.linear(f"{name}.v_proj", every).split(dim, dim=-1)
        group = len(queries) // len(keys)
        attended = torch.zeros(len(x), len(queries) * dim, dtype=torch.float64)
        for t in range(len(x)):
            end = len(before) + t + 1
            start = max(0, end - (self.cfg.attention_window or end))
            for head, query in enumerate(queries):
                key, value = keys[head // group][start:end], values[head // group][start:end]
                weights = (key @ query[t] / math.sqrt(dim)).softmax(0)
                attended[t, head * dim : (head + 1) * dim] = weights @ value
        return self.linear(f"{name}.out_proj", attended)

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        inner = self.linear(f"{name}.fc1", x)
        if self.cfg.activation_fn == "silu":
            inner = inner / (1 + (-inner).exp())
        elif self.cfg.activation_fn == "gelu":
            inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        else:
            inner = inner * 0.5 * (1 + (math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)).tanh())
        if self.cfg.decoder_gated_ffn:
            inner = inner * self.linear(f"{name}.fc3", x)
        return self.linear(f"{name}.fc2", inner)

    def __call__(self, source: Tensor, memory: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """The hidden states of one row, and what each layer's attention read of it."""
        x, read = self.state["embed_tokens.weight"][source], []
        if self.cfg.decoder_learned_pos:
            x = x + self.state["embed_positions.weight"][2 : 2 + len(x)]
        for number in range(self.cfg.decoder_layers):
            name = f"layers.{number}"
            before = x[:0] if memory is None else memory[number]
            if not self.cfg.decoder_normalize_before:
                x = self.norm(f"{name}.self_attn_layer_norm", x + self.attention(f"{name}.self_attn", x, before))
                x = self.norm(f"{name}.final_layer_norm", x + self.feed_forward(name, x))
                continue
            read.append(self.norm(f"{name}.self_attn_layer_norm", x))
            attended = self.attention(f"{name}.self_attn", read[-1], before)
            between = x if self.cfg.decoder_parallel_residual else x + attended
            inner = self.feed_forward(name, self.norm(f"{name}.final_layer_norm", between))
            x = x + attended + inner
        return (self.norm("layer_norm", x) if "layer_norm.weight" in self.state else x), read


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_model_agrees_with_a_naive_computation(flags: str) -> None:
    model, source = build(flags), tokens(2, 11)
    hidden, extra = model(source)
    assert extra["memory"] is None
    expected = torch.stack([Naive(model)(row)[0] for row in source])
    torch.testing.assert_close(hidden.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("flags", REMEMBERING.values(), ids=REMEMBERING)
def test_model_with_memory_agrees_with_a_naive_computation_segment_after_segment(flags: str) -> None:
    model, source = build(flags), tokens(1, 23)
    naive, memory, length = Naive(model), None, model.memory_length
    remembered = [torch.zeros(0, 64, dtype=torch.float64)] * 2
    for segment in source.split([8, 8, 7], dim=1):
        hidden, extra = model(segment, memory)
        memory = extra["memory"]
        expected, read = naive(segment[0], remembered)
        remembered = [torch.cat([a, b])[-length:] for a, b in zip(remembered, read, strict=True)]
        torch.testing.assert_close(hidden[0].double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("flags", [*REMEMBERING.values(), f"{GPT2} --attention-window 5"])
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("step", [1, 5])
def test_cached_inference_is_inference_segment_by_segment(flags: str, step: int, kernels: bool) -> None:
    model, source = build(flags), tokens(3, 16 * 3 + 5)
    memory, whole, single = None, [], []
    with torch.inference_mode():
        reader = Reader(model, kernels=kernels)
        cache = reader.new_cache(3)
        for segment in source.split(16, dim=1):
            hidden, extra = model(segment, memory)
            memory = extra["memory"]
            whole.append(hidden)
            single += [reader.read(piece, cache) for piece in segment.split(step, dim=1)]
            cache.next_segment()
    torch.testing.assert_close(torch.cat(single, 1), torch.cat(whole, 1), atol=1e-4, rtol=1e-4)


def test_positions_far_from_the_start_turn_back_to_the_same_keys() -> None:
    attention = build(f"{LLAMA} --tokens-from-prev 16").decoder.layers[0].self_attn
    length, count = 6000, 50
    table = Rotation(16).table(length, torch.device("cpu"))
    x = torch.randn(1, length, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = attention.new_cache(1, length, table)
        attention(x, cache=cache)
        cache.keep_last(length, count)
        fresh = attention.new_cache(1, length, table)
        attention(x[:, -count:], cache=fresh)
    torch.testing.assert_close(cache.keys[:, :, :count], fresh.keys[:, :, :count], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("flags", [*MODELS.values(), *REMEMBERING.values()])
def test_all_parameters_are_trained_and_load_strictly(flags: str) -> None:
    model, source = build(flags).train(), tokens(4, 16)
    hidden, _ = model(source)
    layer = model.output_layer
    layer.loss(hidden.flatten(0, 1), layer.partition(torch.arange(64).mul(19) % WORDS, 1)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    other = runs.model_of(flags, "--seed 9")
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("flags", [LLAMA, f"{PYTHIA} --tokens-from-prev 16 --attention-window 7"])
def test_attention_maps_are_what_attention_computes(flags: str) -> None:
    model = build(flags)
    attention, x = model.decoder.layers[0].self_attn, torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0))
    memory = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(1))
    positions, visible = model.decoder._positions(10), model.decoder._visible(0)
    with torch.no_grad():
        every = torch.cat([memory, x], dim=1)
        value = attention._heads(attention.v_proj(every)).repeat_interleave(4 // attention.kv_heads, dim=1)
        weights = attention.weights(x, memory, positions, visible)
        attended = attention.out_proj((weights @ value).transpose(1, 2).flatten(2))
        torch.testing.assert_close(attended, attention(x, memory, positions, visible))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))


def test_single_token_in_groups_reads_the_same_through_a_window() -> None:
    torch.manual_seed(0)
    attention, x, memory = SelfAttention(32, 4, kv_heads=2).eval(), torch.randn(2, 1, 32), torch.randn(2, 9, 32)
    with torch.no_grad():
        windowed = attention(x, memory, visible=Causal(4))
        torch.testing.assert_close(windowed, attention(x, memory[:, -3:]))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_are_computed_in_full_precision(kind: str) -> None:
    model = build(f"{LLAMA} --decoder-norm {kind}")
    norm, x = model.decoder.layer_norm, 300 * torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).half()
    assert norm.weight.any() and getattr(norm, "bias", None) is None
    narrow = norm(x) if kind == "rms" else norm.half()(x)
    assert narrow.dtype == torch.float16
    torch.testing.assert_close(narrow, norm.float()(x.float()).half(), atol=2e-2, rtol=2e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--decoder-kv-heads 3", "--decoder-attention-heads 4: must be a multiple of --decoder-kv-heads 3"),
        ("--rotary-fraction 0.07", "1 of 16 channels of a head turn; choose an even number"),
        ("--rotary-fraction 0.2", "3 of 16 channels of a head turn; choose an even number"),
        ("--position-infused-attention", "--rotary-fraction: replaces --position-infused-attention"),
        ("--decoder-learned-pos", "--rotary-fraction: replaces --decoder-learned-pos"),
        ("--no-decoder-normalize-before --decoder-parallel-residual", "needs --decoder-normalize-before"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags: str, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        runs.model_of(LLAMA, flags)
    assert message in refusal.value.with_flags


@pytest.mark.parametrize(
    ("arch", "words", "millions"),
    [
        ("llama_135m", 49152, 134.515),  # SmolLM-135M
        ("llama_360m", 49152, 361.821),  # SmolLM-360M
        ("llama_1b", 32000, 1100.048),  # TinyLlama
        ("llama_7b", 32000, 6738.416),
        ("pythia_70m", 50304, 70.427),  # Biderman et al. 2023, table 1, total
        ("pythia_160m", 50304, 162.323),
        ("pythia_410m", 50304, 405.334),
        ("pythia_1b", 50304, 1011.782),
        ("gpt2_small", 50257, 124.440),
        ("gpt2_medium", 50257, 354.823),
        ("gpt2_large", 50257, 774.030),
        ("gpt2_xl", 50257, 1557.611),
    ],
)
def test_architectures_have_the_published_numbers_of_parameters(arch: str, words: int, millions: float) -> None:
    settings = ARCHITECTURES[arch].complete({"tokens_per_sample": 1024})
    with torch.device("meta"):
        # Without a padding symbol, as in the published models: positions are numbered from 0.
        decoder = TransformerDecoder(fields.typed(TransformerLMConfig, settings), words, -1)
    assert sum(p.numel() for p in decoder.parameters()) == pytest.approx(millions * 1e6, abs=500)
