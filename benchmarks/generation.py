"""Speed of generation, with softmax and choice at every token, compared with the memory bandwidth
bound and GPT-2.

Part of ``python -m benchmarks.language_model``; ``--only generation`` runs it alone. All models
alternate in one process, so that their ratios are valid on a machine whose speed varies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks import machine
from fairseq.inference import Search, generate, generator_of
from fairseq.inference.reader import Reader

TOKENS, TOP_K = 192, 40
ROWS = (1, 16)
PRECISIONS: dict[str, tuple[torch.dtype | None, bool, float]] = {  # type, int8, bytes per weight
    "fp32": (None, False, 4),
    "bf16": (torch.bfloat16, False, 2),
    "int8": (None, True, 1),
}


@dataclass
class Line:
    """One measured model.

    Attributes:
        megabytes: read per step: weights of layers and output layer, and the cache; 0 if unknown.
        gigaflops: of the step's matrix products, 2 operations a weight and row.
        precision: of these products; int8 weights are widened to float32.
        speeds: tokens per second, one number per turn.
    """

    name: str
    rows: int
    megabytes: float
    gigaflops: float = 0
    precision: str = "fp32"
    speeds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the speeds."""
        return sorted(self.speeds)[len(self.speeds) // 2]


def measure(
    model: Any, vocabulary: int, device: torch.device, seconds: float, streams: Sequence[int] = ROWS
) -> dict[str, Any]:
    """Generate on each number of *streams* with all models in turn for about *seconds* in total.

    There are at least three turns; each measures the bandwidth, too.

    Returns:
        ``lines``, ``bandwidth``, the median in GB/s, and ``products``, large matrix products in
        GFLOP/s by precision.
    """
    contenders: list[tuple[Line, Callable[[], None]]] = []
    for rows in streams:
        for name, (dtype, int8, size) in PRECISIONS.items():
            reader = Reader(model, dtype, int8=int8)
            megabytes = step_bytes(model, rows, size, 4 if dtype is None else 2) / 1e6
            gigaflops = 2 * rows * _weights(model) / 1e9
            line = Line(name, rows, megabytes, gigaflops, "fp32" if dtype is None else name)
            contenders.append((line, _ours(reader, rows, vocabulary)))
        other = _gpt2(model, rows, vocabulary, device)
        if other is not None:
            contenders.append((Line("GPT-2, transformers", rows, 0), other))
    bandwidths: list[float] = []
    started, turns = time.perf_counter(), -1  # the first turn is a warm-up
    while turns < 3 or time.perf_counter() - started < seconds:
        bandwidths.append(machine.read_bandwidth(device))
        for line, work in contenders:
            machine.synchronize(device)
            start = time.perf_counter()
            work()
            machine.synchronize(device)
            if turns >= 0:
                line.speeds.append(line.rows * TOKENS / (time.perf_counter() - start))
        turns += 1
    lines = [{**asdict(line), "median": line.median} for line, _ in contenders]
    products = {
        name: machine.matrix_product(device, dtype)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    return {"lines": lines, "bandwidth": sorted(bandwidths)[len(bandwidths) // 2], "products": products, "turns": turns}


def step_bytes(model: Any, rows: int, weight_size: float, cache_size: float) -> float:
    """Minimum bytes of weights and cache that a step reads, averaged over a text.

    The matrices of the layers and of the whole output layer count once, the cache once for each
    row.
    """
    layers = model.decoder.layers
    segment, memory = model.cfg.tokens_per_sample, model.memory_length
    spans = [position if position < segment else memory + position % segment for position in range(TOKENS)]
    attention = layers[0].self_attn
    past = 2 * len(layers) * attention.kv_heads * attention.head_dim * sum(spans) / len(spans)
    return _weights(model) * weight_size + rows * past * cache_size


def _weights(model: Any) -> int:
    """Elements of the matrices that a step reads."""
    parts = *model.decoder.layers.parameters(), *model.output_layer.parameters()
    return sum(p.numel() for p in {*parts} if p.dim() == 2)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    gpt2 = {line["rows"]: line["median"] for line in result["lines"] if "GPT-2" in line["name"]}
    rows = [
        f"Generation, top-k {TOP_K}, {TOKENS} tokens a text; one streaming read: {result['bandwidth']:.0f} GB/s; large "
        + ", ".join(f"{name} products: {speed:.0f} GFLOP/s" for name, speed in result["products"].items())
        + "\n",
        "| | streams | tokens/s | MB a step | MFLOP a step | floor, tokens/s | of | share of the floor | × GPT-2 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in result["lines"]:
        speed, count, size = line["median"], line["rows"], line["megabytes"]
        cells = [""] * 5
        if size:
            seconds = {
                "bytes": size / 1e3 / result["bandwidth"],
                "products": line["gigaflops"] / result["products"][line["precision"]],
            }
            bound = max(seconds, key=seconds.__getitem__)
            floor = count / seconds[bound]
            cells = [f"{size:.1f}", f"{line['gigaflops'] * 1e3:.0f}", f"{floor:,.0f}", bound, f"{speed / floor:.0%}"]
        times = f"{speed / gpt2[count]:.1f}" if count in gpt2 else "–"
        rows.append(f"| {line['name']} | {count} | {speed:,.0f} | {' | '.join(cells)} | {times} |")
    return "\n".join(rows)


def _ours(reader: Reader, rows: int, vocabulary: int) -> Callable[[], None]:
    search = Search(TOKENS, top_k=TOP_K)
    prompts = [[2 + row % (vocabulary - 2)] for row in range(rows)]

    def work() -> None:
        texts = generate([reader], prompts, search, generators=lambda n: generator_of(1, n), batch_size=rows)
        assert sum(len(text.tokens) for _, [text] in texts) == rows * TOKENS

    return work


def _gpt2(model: Any, rows: int, vocabulary: int, device: torch.device) -> Callable[[], None] | None:
    """GPT-2 with equal layers, heads, width and vocabulary, random weights, float32; None without
    transformers."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return None
    layer = model.decoder.layers[0]
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=TOKENS + 1,
        n_embd=layer.fc1.in_features,
        n_layer=len(model.decoder.layers),
        n_head=layer.self_attn.num_heads,
        n_inner=layer.fc1.out_features,
        bos_token_id=2,
        eos_token_id=None,
        pad_token_id=1,
    )
    other: Any = GPT2LMHeadModel(config).eval()
    other.to(device)
    prompts = torch.full((rows, 1), 2, device=device)

    def work() -> None:
        with torch.inference_mode():
            texts = other.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=TOP_K,
                min_new_tokens=TOKENS,
                max_new_tokens=TOKENS,
            )
        assert texts.shape == (rows, 1 + TOKENS)

    return work
