"""Training of Llama- and GPT-2-shaped decoders, alternating with transformers' own classes and
nanoGPT under torch.compile; or generation, alternating with transformers' ``generate``.

    python -m benchmarks.decoders [--shape llama gpt2] [--precision fp32 bf16] [--nanogpt CHECKOUT]
        [--clock processor] [--turns 12] [--generate 1 8]

All have 4 layers of width 256 and the same sizes. In training, all have the same optimizer and
batches of 16 × 128 tokens, and ours is not compiled. In generation, none is compiled. Freed memory
stays in the process, as in ``fairseq-train``, for all of them. Where other programs run,
``OMP_NUM_THREADS=1`` and the processor's clock measure this process alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.config import fields, options
from fairseq.inference import Search, generate
from fairseq.inference.reader import Reader
from fairseq.models.transformer_lm import TransformerDecoder, TransformerLanguageModel
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.system.allocator import keep_freed_memory
from fairseq_cli.train import get_training_parser

WORDS, ROWS, TOKENS, WIDTH, LAYERS, HEADS, GATED = 8000, 16, 128, 256, 4, 4, 688
CALLS, GENERATED = 3, 96
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
PAD = 1
FLAGS = f"""data --arch ARCH_tiny --tokens-per-sample {TOKENS} --max-target-positions {TOKENS} --decoder-layers {LAYERS}
    --decoder-embed-dim {WIDTH} --decoder-input-dim {WIDTH} --decoder-output-dim {WIDTH}
    --decoder-attention-heads {HEADS} --dropout 0 --attention-dropout 0"""
OF_SHAPE = {
    "llama": f"--decoder-ffn-embed-dim {GATED} --decoder-kv-heads 2 --share-decoder-input-output-embed",
    "gpt2": f"--decoder-ffn-embed-dim {4 * WIDTH}",
}


def our_model(shape: str) -> TransformerDecoder:
    """This package's decoder of *shape*."""
    words = f"{FLAGS.replace('ARCH', shape)} {OF_SHAPE[shape]}".split()
    args = options.parse_args_and_arch(get_training_parser(), words)
    return TransformerDecoder(fields.typed(TransformerLMConfig, args), WORDS, PAD)


def their_model(shape: str) -> Any:
    """transformers' class of the same sizes."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": WORDS, "use_cache": False}
    if shape == "gpt2":
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes |= {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": TOKENS, **rates}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    sizes |= {"hidden_size": WIDTH, "intermediate_size": GATED, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def nanogpt(checkout: Path) -> nn.Module:
    """nanoGPT's model of the same sizes, with its defaults: biases, tied weights."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", checkout / "model.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {"block_size": TOKENS, "vocab_size": WORDS, "n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH}
    model: nn.Module = module.GPT(module.GPTConfig(**sizes))
    return model


def update(model: nn.Module, loss: Callable[[], Tensor], precision: str) -> Callable[[], None]:
    """A function that makes an update of *model*."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def call() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return call


def seconds(call: Callable[[], None], clock: Callable[[], float]) -> float:
    """The mean time of :data:`CALLS` calls."""
    start = clock()
    for _ in range(CALLS):
        call()
    return (clock() - start) / CALLS


def in_turns(
    calls: dict[str, Callable[[], None]], tokens: int, turns: int, clock: Callable[[], float]
) -> Iterator[str]:
    """For each of *calls* but ours: its tokens per second, ours, and the ratio with its
    quartiles."""
    for call in calls.values():
        seconds(call, clock)  # compiles
    times = [{name: seconds(call, clock) for name, call in calls.items()} for _ in range(turns)]
    for name in [name for name in calls if name != "ours"]:
        low, ratio, high = statistics.quantiles([turn[name] / turn["ours"] for turn in times], n=4)
        speeds = [tokens / statistics.median(turn[each] for turn in times) for each in (name, "ours")]
        yield " | ".join([name, *(f"{speed:,.0f}" for speed in speeds), f"{ratio:.2f} ({low:.2f}–{high:.2f})"])


def losses(shape: str, checkout: Path | None) -> dict[str, tuple[nn.Module, Callable[[], Tensor]]]:
    """The models of *shape* and what each computes of one batch; ours comes first."""
    rows = torch.randint(4, WORDS, (ROWS, TOKENS + 1))
    tokens, target = rows[:, :-1].contiguous(), rows[:, 1:].flatten()
    ours, theirs = our_model(shape), their_model(shape)
    # fairseq's learned positions have two rows more.
    sizes = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert 0 <= sizes[0] - sizes[1] <= 2 * WIDTH, sizes
    layer = ours.output_distribution
    compiled: Any = torch.compile(theirs)

    def our_loss() -> Tensor:
        return layer.loss(ours(tokens)[0].flatten(0, 1), layer.partition(target, PAD)) / len(target)

    def their_loss() -> Tensor:
        return F.cross_entropy(compiled(input_ids=tokens).logits.float().flatten(0, 1), target)

    found = {"ours": (ours, our_loss), "transformers": (theirs, their_loss)}
    if checkout is not None:
        nano = nanogpt(checkout)
        compiled_nano: Any = torch.compile(nano)
        found["nanoGPT"] = nano, lambda: compiled_nano(tokens, target.view(ROWS, TOKENS))[1]
    return found


def generators(shape: str, precision: str, rows: int) -> dict[str, Callable[[], None]]:
    """Functions that generate :data:`GENERATED` tokens after each of *rows* texts of one token, the
    most probable ones; ours comes first."""
    lower = torch.bfloat16 if precision == "bf16" else None
    reader = Reader(TransformerLanguageModel(our_model(shape)).eval(), lower)
    theirs = their_model(shape).eval().to(lower or torch.float32)
    prompts = torch.full((rows, 1), 5)
    exactly = {"do_sample": False, "min_new_tokens": GENERATED, "max_new_tokens": GENERATED, "pad_token_id": PAD}

    def ours() -> None:
        texts = generate([reader], prompts.tolist(), Search(GENERATED, temperature=0), batch_size=rows)
        assert sum(len(text.tokens) for _, [text] in texts) == rows * GENERATED

    def transformers() -> None:
        with torch.inference_mode():
            found = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), use_cache=True, **exactly)
        assert found.shape == (rows, 1 + GENERATED)

    return {"ours": ours, "transformers": transformers}


def main() -> None:
    """Print tokens per second of each, and the ratios to ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=tuple(OF_SHAPE), default=tuple(OF_SHAPE))
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=("fp32", "bf16"))
    parser.add_argument("--nanogpt", type=Path, metavar="CHECKOUT", help="checkout of nanoGPT (default: left out)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="time measured (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=12, help="turns of each (default: %(default)s)")
    parser.add_argument(
        "--generate", nargs="+", type=int, metavar="ROWS", help="generate so many texts at once instead of training"
    )
    args = parser.parse_args()
    if args.generate and args.nanogpt:
        parser.error("--generate: compares with transformers only; leave out --nanogpt")
    keep_freed_memory()
    torch.manual_seed(1)
    clock = CLOCKS[args.clock]
    kind, other = ("texts", "other") if args.generate else ("rows", "other, compiled")
    print(f"| shape | precision | {kind} | {other} | other, tokens/s | ours, tokens/s | ratio (quartiles) |")
    print("|---|---|---:|---|---:|---:|---:|", flush=True)
    for shape, precision, rows in product(args.shape, args.precision, args.generate or (ROWS,)):
        if args.generate:
            calls, tokens = generators(shape, precision, rows), rows * GENERATED
        else:
            models = losses(shape, args.nanogpt)
            calls = {name: update(model, loss, precision) for name, (model, loss) in models.items()}
            tokens = rows * TOKENS
        for line in in_turns(calls, tokens, args.turns, clock):
            print(f"| {shape} | {precision} | {rows} | {line} |", flush=True)


if __name__ == "__main__":
    main()
