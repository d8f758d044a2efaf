"""Table 9 of Dai et al. 2019: evaluation time per token with reused memory and with a recomputed
window.

    python -m benchmarks.evaluation_speed [--arch transformer_xl_enwik8_base] [--json FILE]

At attention length L the Transformer-XL reads segments of ``--segment`` tokens; every token attends
to the last L, whose keys and values are cached. The vanilla model
(``--position-encoding absolute``, the same sizes) reads the last L tokens again for every predicted
token, and computes only that token's distribution. Both have random weights and one row, and run
one after the other in one process; the result is their ratio.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from fairseq.config import fields
from fairseq.models import ARCHITECTURES
from fairseq.models.transformer_xl import TransformerXL, TransformerXLDecoder
from fairseq.models.transformer_xl_settings import TransformerXLConfig
from fairseq.system.allocator import keep_freed_memory


def build(arch: str, vocabulary: int, device: torch.device, **settings: Any) -> TransformerXL:
    """A model with random weights."""
    args = argparse.Namespace(**settings)
    ARCHITECTURES[arch].fill(args)
    cfg = fields.typed(TransformerXLConfig, args)
    cfg.check_vocabulary(vocabulary)
    return TransformerXL(TransformerXLDecoder(cfg, vocabulary)).to(device).eval()


def seconds(work: Callable[[], object], device: torch.device, at_least: float) -> float:
    """Median duration of *work*, repeated at least three times."""
    durations: list[float] = []
    while len(durations) < 3 or sum(durations) < at_least:
        machine.synchronize(device)
        start = time.perf_counter()
        work()
        machine.synchronize(device)
        durations.append(time.perf_counter() - start)
    return sorted(durations)[len(durations) // 2]


def score(model: TransformerXL, hidden: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities of *target* after *hidden*."""
    assert model.output_layer is not None
    return model.output_layer.target_log_probs(hidden.flatten(0, 1), target.flatten())


def with_memory(args: argparse.Namespace, length: int, tokens: Tensor, device: torch.device) -> float:
    """Seconds per token of the Transformer-XL with a full memory."""
    segment = args.segment
    model = build(args.arch, args.vocabulary, device, tokens_per_sample=segment, mem_len=length, same_length=True)
    cache = model.new_cache(1)
    source = tokens[:, :segment]

    def read() -> Tensor:
        hidden = model(source, cache=cache)[0]
        cache.next_segment()
        return score(model, hidden, source)

    for _ in range(-(-length // segment) + 1):
        read()
    return seconds(read, device, args.seconds) / segment


def without(args: argparse.Namespace, length: int, tokens: Tensor, device: torch.device) -> float:
    """Seconds per token of the vanilla model, which reads *length* tokens for each."""
    model = build(args.arch, args.vocabulary, device, position_encoding="absolute", mem_len=0)
    source = tokens[:, :length]

    def read() -> Tensor:
        return score(model, model(source)[0][:, -1:], source[:, -1:])

    read()
    return seconds(read, device, args.seconds)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--arch", default="transformer_xl_enwik8_base", help="sizes of both models (default: %(default)s)"
    )
    parser.add_argument("--vocabulary", type=int, default=208, help="words (default: enwik8's %(default)s)")
    parser.add_argument("--lengths", default="800,1800,2800,3800", help="attention lengths (default: %(default)s)")
    parser.add_argument(
        "--segment", type=int, default=128, help="tokens read at once with memory (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=5, help="minimum seconds per measurement (default: %(default)s)"
    )
    parser.add_argument("--cpu", action="store_true", help="run on the CPU even if a GPU is available")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    args = parser.parse_args(argv)
    keep_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    torch.manual_seed(1)
    lengths = [int(length) for length in args.lengths.split(",")]
    tokens = torch.randint(args.vocabulary, (1, max(lengths)), device=device)
    results = []
    print("| attention length | with memory, ms a token | recomputed, ms a token | times slower |")
    print("|---|---|---|---|")
    with torch.inference_mode():
        for length in lengths:
            fast, slow = (1000 * run(args, length, tokens, device) for run in (with_memory, without))
            results.append({"length": length, "with_memory_ms": fast, "recomputed_ms": slow})
            print(f"| {length} | {fast:.2f} | {slow:,.0f} | {slow / fast:,.0f} |", flush=True)
    report = {"machine": machine.describe(device), "arch": args.arch, "segment": args.segment, "results": results}
    print(f"\n{json.dumps(report)}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
