"""Training of Llama- and GPT-2-shaped decoders, alternating with transformers' own classes under
torch.compile.

    python -m benchmarks.decoders [--shape llama gpt2] [--precision fp32 bf16]

Both have 4 layers of width 256, the same initial sizes, optimizer and batches of 16 × 128 tokens;
ours is not compiled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.config import fields, options
from fairseq.models.transformer_lm import TransformerDecoder
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq_cli.train import get_training_parser

WORDS, ROWS, TOKENS, WIDTH, LAYERS, HEADS, GATED = 8000, 16, 128, 256, 4, 4, 688
TURNS, UPDATES = 12, 3
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


def seconds(call: Callable[[], None]) -> float:
    """The time of an update."""
    start = time.perf_counter()
    for _ in range(UPDATES):
        call()
    return (time.perf_counter() - start) / UPDATES


def main() -> None:
    """Print tokens per second of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=tuple(OF_SHAPE), default=tuple(OF_SHAPE))
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=("fp32", "bf16"))
    args = parser.parse_args()
    torch.manual_seed(1)
    rows = torch.randint(4, WORDS, (ROWS, TOKENS + 1))
    tokens, target = rows[:, :-1], rows[:, 1:].flatten()
    print("| shape | precision | transformers, compiled, tokens/s | ours, tokens/s | ratio |\n|---|---|---:|---:|---:|")
    for shape in args.shape:
        for precision in args.precision:
            ours, theirs = our_model(shape), their_model(shape)
            # fairseq's learned positions have two rows more.
            sizes = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
            assert 0 <= sizes[0] - sizes[1] <= 2 * WIDTH, sizes
            compiled: Any = torch.compile(theirs)

            def our_loss(model: TransformerDecoder = ours) -> Tensor:
                layer = model.output_distribution
                return layer.loss(model(tokens)[0].flatten(0, 1), layer.partition(target, PAD)) / len(target)

            def their_loss(model: Any = compiled) -> Tensor:
                return F.cross_entropy(model(input_ids=tokens).logits.float().flatten(0, 1), target)

            calls = update(theirs, their_loss, precision), update(ours, our_loss, precision)
            for call in calls:
                seconds(call)  # compiles
            times = [[seconds(call) for call in calls] for _ in range(TURNS)]
            other, own = (statistics.median(column) for column in zip(*times, strict=True))
            speeds = f"{ROWS * TOKENS / other:,.0f} | {ROWS * TOKENS / own:,.0f}"
            print(f"| {shape} | {precision} | {speeds} | {other / own:.2f} |", flush=True)


if __name__ == "__main__":
    main()
